"""``indexer_logits`` by CUDA kernels: pages of all rows' keys shared out evenly over the multiprocessors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kimi_hal import formats
from kimi_hal.dispatch.contract import BuildContext
from kimi_hal.ops.indexer import IndexerSpec, logits_width
from kimi_hal.ops.operator import torch_dtype
from kimi_hal.ops.spec import Limits
from kimi_hal.parallel import ownership
from kimi_hal_nvidia import driver
from kimi_hal_nvidia.indexer_claims import PAGES
from kimi_hal_nvidia.layouts import Layout
from kimi_hal_nvidia.parameters import Parameters
from kimi_hal_nvidia.streams import device_index, on_device, raw_stream

#: ``struct Scoring`` of ``scores.cuh``: addresses, then numbers.
ADDRESSES, NUMBERS = 8, "10q 11i 4x"
PAGE = 64
#: Where the cache stands among the operands, and what its address is a multiple of.
CACHE, ALIGN = 3, PAGES.align


@dataclass(frozen=True)
class Ring:
    """The shape of one kernel: see ``SCORES`` in ``scores.cuh``.

    Args:
        heads: that a row is padded to.
        rows: of a request that share a key's read.
        cut: warpgroups, and pages in flight, by element.
    """

    heads: int
    rows: int
    cut: dict[str, tuple[int, int]]

    @property
    def columns(self) -> int:
        """Columns of the matrix product."""
        return self.heads * self.rows

    def threads(self, element: str) -> int:
        """Return the threads of a block: its warpgroups, and one that copies."""
        return self.cut[element][0] * 128 + 128

    def shared(self, element: str) -> int:
        """Return the bytes of ``struct Ring``."""
        groups, pages = self.cut[element]
        key, column, scales = {"fp8": (128, 256, 16), "fp4": (64, 128, groups * 1024)}[element]
        page = -(-PAGE * (key + 4) // 128) * 128
        size = groups * self.columns * (column + 4) + pages * page + scales + groups * 32 + pages * 32 + 264
        return -(-size // 16) * 16


RINGS = (
    Ring(32, 1, {"fp8": (5, 15), "fp4": (5, 30)}),
    Ring(32, 2, {"fp8": (4, 12), "fp4": (4, 32)}),
    Ring(32, 4, {"fp8": (2, 14), "fp4": (4, 24)}),
    Ring(32, 8, {"fp8": (2, 10), "fp4": (2, 24)}),
    Ring(64, 1, {"fp8": (4, 12), "fp4": (4, 24)}),
    Ring(64, 4, {"fp8": (2, 10), "fp4": (2, 24)}),
)


def ring_for(heads: int, limits: Limits) -> Ring:
    """Return the kernel for a head count and for as many rows as one request is likely to have."""
    known = limits.rows_per_req if limits.uniform else 1
    likely = max(known, -(-limits.max_rows // max(1, limits.max_reqs)))
    fitting = [r for r in RINGS if r.heads >= heads]
    fitting = [r for r in fitting if r.heads == fitting[0].heads]
    return next((r for r in fitting if r.rows >= likely), fitting[-1])


class Operands(NamedTuple):
    """The seven operands of the scores."""

    q: Tensor
    q_scale: Tensor
    weights: Tensor
    cache: Tensor
    block_table: Tensor
    row_req: Tensor
    row_len: Tensor

    def rows(self, some: slice) -> Operands:
        """Return the operands of some rows."""
        return Operands(
            self.q[some],
            self.q_scale[some],
            self.weights[some],
            self.cache,
            self.block_table,
            self.row_req[some],
            self.row_len[some],
        )


class Scorer:
    """Scores rows against the keys of their requests, for one plan.

    Args:
        ctx: of the plan.
        follows: what goes before it on the stream is the kernel that writes its queries and weights, and nothing else
            that it reads: it may begin before that one has ended.
    """

    def __init__(self, ctx: BuildContext, follows: bool = False) -> None:
        spec: IndexerSpec = ctx.spec
        fmt, index = formats.index(spec.index), device_index(ctx.device)
        kernel = self.kernel(ctx, fmt, index)
        self.parameters = Parameters(ADDRESSES, NUMBERS)
        self.facts: tuple[Any, ...] = ()
        self.layout = Layout()
        self.launch = driver.launcher(kernel, self.parameters.address, overlap=follows)
        self.stream = raw_stream(index)
        self.blocks = torch.cuda.get_device_properties(index).multi_processor_count
        keys = ownership.of_keys(spec.dcp)
        self.constants = (
            spec.num_heads,
            keys.world,
            keys.rank,
            keys.interleave,
            int(spec.weights_dtype == "bfloat16"),
            int(spec.score == "bfloat16"),
            int(fmt.scale == "ue8m0x4"),
        )

    def kernel(self, ctx: BuildContext, fmt: formats.IndexFormat, index: int) -> driver.Kernel:
        """Return the kernel for these keys, heads and sizes."""
        element = "fp4" if fmt.element == "e2m1" else "fp8"
        ring = ring_for(ctx.spec.num_heads, ctx.limits)
        return driver.kernel(
            f"index_scores_{element}",
            ctx.arch,
            f"{element}_{ring.heads}x{ring.rows}",
            threads=ring.threads(element),
            shared=ring.shared(element),
            device=index,
        )

    def again(self, *tensors: Any) -> bool:
        """Do what was done last, if these, operands and output, are laid out like those; else nothing. Tell which."""
        with self.parameters.lock:
            if not self.layout.same(*tensors):
                return False
            addresses = [tensor.data_ptr() for tensor in tensors]
            if addresses[CACHE] % ALIGN:
                return False
            self.start(*addresses)
        return True

    def start(self, *addresses: int) -> None:
        """Launch with the numbers that are there, over operands and output at these addresses."""
        self.parameters.point(*addresses)
        self.launch(self.blocks, 1, self.stream())

    def __call__(self, given: Operands, out: Tensor) -> None:
        """Write the scores of every row into ``out [T, L]``; there is at least one row."""
        q, q_scale, weights, cache, table, row_req, row_len = given
        facts = (
            q.shape,
            q.stride(),
            q_scale.stride(),
            weights.stride(),
            cache.shape,
            cache.stride(),
            table.shape,
            table.stride(),
            row_req.stride(),
            row_len.stride(),
            out.shape,
            out.stride(),
        )
        with self.parameters.lock:
            if facts != self.facts:
                self.layout.forget()
                self.learn(given, out)
                self.facts = facts
            else:
                self.layout.learn(*given, out)
            self.start(*[tensor.data_ptr() for tensor in (*given, out)])

    def learn(self, given: Operands, out: Tensor) -> None:
        """Write down the numbers of these shapes."""
        q, q_scale, weights, cache, table, row_req, row_len = given
        self.parameters.tell(
            *q.stride()[:2],
            *q_scale.stride()[:2],
            weights.stride(0),
            cache.stride(0),
            table.stride(0),
            row_req.stride(0),
            row_len.stride(0),
            out.stride(0),
            q.shape[0],
            table.shape[0],
            cache.shape[0],
            min(table.shape[1] * PAGE, out.shape[1]),
            *self.constants,
        )


def build_indexer_logits(ctx: BuildContext) -> Callable[..., Any]:
    """Make the run function of ``indexer_logits``."""
    return run_by(ctx, Scorer(ctx))


def run_by(ctx: BuildContext, score: Scorer) -> Callable[..., Any]:
    """Make the run function of ``indexer_logits`` that scores by these kernels."""
    spec, limits, check = ctx.spec, ctx.limits, ctx.check
    dtype = torch_dtype(spec.score)

    def run(
        q: Any,
        q_scale: Any,
        weights: Any,
        cache: Any,
        block_table: Any,
        row_req: Any,
        row_len: Any,
        *,
        step: Any = None,
        out: Any = None,
        workspace: Any = None,
    ) -> Any:
        unusual = step is not None or workspace is not None
        if not unusual and score.again(q, q_scale, weights, cache, block_table, row_req, row_len, out):
            return out
        check(
            q=q,
            q_scale=q_scale,
            weights=weights,
            cache=cache,
            block_table=block_table,
            row_req=row_req,
            row_len=row_len,
            step=step,
            out=out,
            workspace=workspace,
        )
        rows = q.shape[0]
        if out is None:
            width = logits_width(spec, limits, block_table.shape[1])
            out = q.new_empty((rows, width), dtype=dtype)
        if rows:
            score(Operands(q, q_scale, weights, cache, block_table, row_req, row_len), out)
        return out

    return on_device(ctx.device, run)
