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
from kimi_hal_nvidia import driver, sizes
from kimi_hal_nvidia.indexer_claims import PAGES
from kimi_hal_nvidia.layouts import Layout
from kimi_hal_nvidia.parameters import Parameters
from kimi_hal_nvidia.streams import device_index, on_device, raw_stream
from kimi_hal_nvidia.tickets import Tickets

#: ``struct Scoring`` of ``scores.cuh``: addresses, then numbers.
ADDRESSES, NUMBERS = 9, "10q 11i 4x"
PAGE = 64
#: Rows that four warps know.
SOME = 128
#: Keys of a request, and those of all together, from which on the last of all are dealt out to blocks that are early.
#: Rows change more often then, which costs more than it gains where each block has few pages.
DEALT, DEALT_IN_ALL = 32768, 1 << 20
#: Warpgroups of the kernels that deal them out: each has the slots of one warp that copies.
DEALING = 4
#: Kinds of rows, ``enum class Rows`` of ``scores.cuh`` -> how their kernels' names end.
KINDS = {"one": "_one", "some": "", "many": "_many"}
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

    def kind(self, rows: int, requests: int) -> str:
        """Return which of ``KINDS`` so many rows are."""
        return "one" if requests == 1 and rows <= self.rows else "some" if rows <= SOME else "many"

    def kernel(self, element: str, kind: str) -> str:
        """Return the name of the kernel of a kind."""
        return f"{element}_{self.heads}x{self.rows}{KINDS[kind]}"

    def shared(self, element: str) -> int:
        """Return the bytes of ``struct Ring``."""
        groups, pages = self.cut[element]
        key, column = {"fp8": (128, 256), "fp4": (64, 128)}[element]
        page = -(-PAGE * (key + 4) // 128) * 128
        apart = groups * self.columns * 8 if element == "fp4" else 32
        size = groups * self.columns * (column + 4) + pages * page + apart + groups * 32 + pages * 32 + 1296
        return -(-size // 16) * 16


RINGS = (
    Ring(32, 1, {"fp8": (4, 20), "fp4": (5, 20)}),
    Ring(32, 2, {"fp8": (4, 16), "fp4": (5, 20)}),
    Ring(32, 4, {"fp8": (2, 16), "fp4": (3, 24)}),
    Ring(32, 8, {"fp8": (2, 8), "fp4": (2, 20)}),
    Ring(64, 1, {"fp8": (4, 16), "fp4": (5, 20)}),
    Ring(64, 4, {"fp8": (2, 8), "fp4": (2, 20)}),
)


def element_of(fmt: formats.IndexFormat) -> str:
    """Return the name of a key's numbers among kernels."""
    return "fp4" if fmt.element == "e2m1" else "fp8"


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
        self.ring = ring_for(spec.num_heads, ctx.limits)
        self.deals = self.ring.cut[element_of(fmt)][0] == DEALING
        self.parameters = Parameters(ADDRESSES, NUMBERS)
        self.launches = {
            kind: driver.launcher(kernel, self.parameters.address, overlap=follows)
            for kind, kernel in self.kernels(ctx, fmt, index).items()
        }
        self.tickets = Tickets(ctx.persistent, sizes.SCORES_LAUNCHES, sizes.TICKET)
        self.facts: tuple[Any, ...] = ()
        self.layout = Layout()
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

    def kernels(self, ctx: BuildContext, fmt: formats.IndexFormat, index: int) -> dict[str, driver.Kernel]:
        """Return the kernels for these keys, heads and sizes by ``KINDS``; ``many`` serves what has none of its own."""
        element = element_of(fmt)
        return {
            kind: driver.kernel(
                f"index_scores_{element}",
                ctx.arch,
                self.ring.kernel(element, kind),
                threads=self.ring.threads(element),
                shared=self.ring.shared(element),
                device=index,
            )
            for kind in KINDS
        }

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
        stream = self.stream()
        self.parameters.point(*addresses, self.tickets.of(stream) if self.dealt else 0)
        self.launch(self.blocks, 1, stream)

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
                self.facts = ()  # of nothing, should it fail
                self.layout.forget()
                self.learn(given, out)
                self.facts = facts
            else:
                self.layout.learn(*given, out)
            self.start(*[tensor.data_ptr() for tensor in (*given, out)])

    def learn(self, given: Operands, out: Tensor) -> None:
        """Write down the numbers of these shapes."""
        q, q_scale, weights, cache, table, row_req, row_len = given
        room = min(table.shape[1] * PAGE, out.shape[1])
        kind = self.ring.kind(q.shape[0], table.shape[0])
        kind = kind if kind in self.launches else "many"
        self.launch = self.launches[kind]
        self.dealt = kind == "some" and self.deals and room >= DEALT and table.shape[0] * room >= DEALT_IN_ALL
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
            room,
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
