"""``sparse_mla`` by a CUDA kernel, one launch.

A row's keys are cut over the blocks of a cluster; or its parts meet in workspace, whatever blocks they were dealt to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kimi_hal.dispatch.contract import BuildContext
from kimi_hal.ops.sparse_mla import SparseMLASpec
from kimi_hal.ops.spec import Limits
from kimi_hal_nvidia import driver
from kimi_hal_nvidia.attention_plan import Way, counter_bytes, covers, cut, tiles, workspace_bytes
from kimi_hal_nvidia.h200 import CLUSTERS, PROCESSORS
from kimi_hal_nvidia.parameters import Parameters
from kimi_hal_nvidia.sizes import ATTENTION_LAUNCHES
from kimi_hal_nvidia.streams import device_index, on_device, raw_stream
from kimi_hal_nvidia.tickets import Tickets

#: ``struct Attention`` of ``sparse_mla.cu``: addresses, then numbers.
ADDRESSES, NUMBERS = 12, "10q12i15I2if"
#: Kernels of a latent format by form: name, and bytes of shared memory of a block. Those of ``few`` are of a half and a
#: quarter of the latents too.
KERNELS = {
    "latent.fp8.e4m3fn.tensor": {
        "16": ("fp8_16", 231424),
        "32": ("fp8_32", 228352),
        "48": ("fp8_48", 232448),
        "pair": ("fp8_pair", 101376),
        "few": ("fp8_few", 232448),
        "few_2": ("fp8_few_2", 166912),
        "few_4": ("fp8_few_4", 134144),
    },
    "latent.nvfp4.352": {
        "16": ("nvfp4_16", 227328),
        "32": ("nvfp4_32", 230400),
        "48": ("nvfp4_48", 219136),
        "pair": ("nvfp4_pair", 91136),
        "few": ("nvfp4_few", 216064),
        "few_2": ("nvfp4_few_2", 150528),
        "few_4": ("nvfp4_few_4", 117760),
    },
}
SPACES = {"slot": 0, "position": 1, "local": 2}
#: Clusters that share the latents of a row in ``few``, and their kernels. A latent's bits are the same by any.
SLICES = {1: "few", 2: "few_2", 4: "few_4"}


def divisor(by: int) -> tuple[int, int, int]:
    """Return ``struct Divisor``: what a number below 2^31 is multiplied by, and shifted, to be divided by ``by``."""
    bits = 31 + (by - 1).bit_length()
    return by, (1 << bits) // by + 1, bits


def address(tensor: Any) -> int:
    """Return where a tensor's data is; 0 for none."""
    return 0 if tensor is None else int(tensor.data_ptr())


def stride(tensor: Any) -> int:
    """Return the step of a tensor's first dimension; 0 for none."""
    return 0 if tensor is None else int(tensor.stride(0))


class Attention:
    """Attends in one way of cutting.

    Args:
        spec: of the operator.
        limits: of the plan.
        way: of cutting.
        arch: of the device.
        index: of the device.
        words: zeros that nobody else writes, by which parts that meet in memory are counted. Where there are none, or
            no more, parts meet in a cluster, which gives the same bits.
        follows: what goes before it on the stream is the kernel that writes its indices, and nothing else that it
            reads: it may begin before that one has ended.
    """

    def __init__(
        self,
        spec: SparseMLASpec,
        limits: Limits,
        way: Way,
        arch: str,
        index: int,
        words: Any = None,
        follows: bool = False,
    ) -> None:
        form, parts = way.form, way.parts
        self.parts, self.blocks = parts, form.blocks(spec)
        self.parameters = Parameters(ADDRESSES, NUMBERS)
        self.tickets = Tickets(
            words if way.in_memory else None, ATTENTION_LAUNCHES, counter_bytes(spec, limits, way)
        )
        #: Blocks that parts that meet in memory are dealt to in a launch, at most as many as are resident at once; of a
        #: relay, whose blocks take one part, as many as there are parts.
        self.dealt, self.most_dealt = 1, 1 << 30 if form.relayed else PROCESSORS * form.there

        def launch(name: str, cluster: bool = True) -> Callable[..., None]:
            what, shared = KERNELS[spec.latent][name]
            kernel = driver.kernel(
                "sparse_mla", arch, what, threads=form.threads, shared=shared, device=index
            )
            return driver.launcher(kernel, self.parameters.address, cluster=cluster, overlap=follows)

        few = form.name == "few"
        #: By slices of latents, the most first.
        self.launches = (
            {n: launch(name) for n, name in reversed(SLICES.items())} if few else {1: launch(form.name)}
        )
        self.launch, self.grid = self.launches[1], 0
        #: The launch without clusters, of parts that meet in memory.
        self.unclustered = launch(form.name, cluster=False) if way.in_memory else None
        self.stream = raw_stream(index)
        #: Items, a row and block of heads each, that are launched at most: where rows are not cut, blocks take items in
        #: turn; a cluster has one, and so has a block of ``few``.
        self.most_items = PROCESSORS * form.there if parts == 1 and not few else 1 << 30
        #: Clusters of ``few`` that are resident at once.
        self.resident = CLUSTERS[parts] if few else 0
        world, interleave = spec.dcp.world, spec.dcp.interleave
        self.fixed = (
            *(spec.num_heads, parts, -(-tiles(spec) // parts), SPACES[spec.index_space], spec.dcp.rank),
            *(int(spec.q_dtype != "bfloat16"), int(spec.return_lse)),
            *(*divisor(spec.page), *divisor(interleave), *divisor(world * interleave), *divisor(self.blocks)),
            *divisor(parts),
        )
        self.scale = float(spec.softmax_scale)

    def __call__(
        self,
        q: Any,
        cache: Any,
        indices: Any,
        k_scale: Any,
        q_scale: Any,
        index_len: Any,
        block_table: Any,
        row_req: Any,
        out: Any,
        lse_out: Any,
        partials: Any = None,
    ) -> None:
        """Fill ``out`` and ``lse_out``; there is at least one row. The operands are the operator's own.

        ``partials`` is memory of ``workspace_bytes`` for parts that meet there; without it they meet in clusters.
        """
        operands = (q, cache, indices, k_scale, q_scale, index_len, block_table, row_req, out, lse_out)
        every = q.shape[0] * self.blocks * self.parts
        with self.parameters.lock:
            self.dealt = min(every, self.most_dealt)
            self.parameters.tell(
                *(*q.stride()[:2], cache.stride(0), indices.stride(0)),
                *(stride(index_len), stride(block_table), stride(row_req)),
                *(*out.stride()[:2], lse_out.stride(0)),
                *(indices.shape[1], cache.shape[0]),
                *((0, 0) if block_table is None else block_table.shape),
                q.shape[0],
                *self.fixed,
                *divmod(every, self.dealt),
                self.scale,
            )
            items = min(q.shape[0] * self.blocks, self.most_items)
            slices = next((n for n in self.launches if items * n <= self.resident), 1)
            self.launch, self.grid = self.launches[slices], items * slices * self.parts
            self.start(*map(address, operands), partials=address(partials))

    def start(self, *addresses: int, partials: int = 0) -> None:
        """Launch with the numbers that are there, over operands, outputs and partials at these addresses."""
        stream = self.stream()
        words = self.tickets.of(stream) if self.unclustered and partials else 0
        self.parameters.point(*addresses, partials if words else 0, words)
        if self.unclustered and words:
            self.unclustered(self.dealt, 1, stream)
        else:
            self.launch(self.grid, 1, stream, self.parts)


def words_of(spec: SparseMLASpec, limits: Limits, way: Way, words: Any) -> Any:
    """Return ``words`` if parts meet in memory and the plan has asked for enough of it; else None."""
    fits = way.in_memory and covers(spec, limits, cut(spec, limits, {}), way)
    return words if fits else None


def build_sparse_mla(ctx: BuildContext) -> Callable[..., Any]:
    """Make the run function of ``sparse_mla``."""
    spec, check = ctx.spec, ctx.check
    way = cut(spec, ctx.limits, ctx.configuration)
    needed, words = workspace_bytes(spec, ctx.limits, way), words_of(spec, ctx.limits, way, ctx.persistent)
    attend = Attention(spec, ctx.limits, way, ctx.arch, device_index(ctx.device), words)
    heads, rank, lse_width = spec.num_heads, spec.kv_rank, spec.num_heads if spec.return_lse else 0

    def run(
        q: Any,
        cache: Any,
        indices: Any,
        k_scale: Any = None,
        q_scale: Any = None,
        index_len: Any = None,
        block_table: Any = None,
        row_req: Any = None,
        *,
        step: Any = None,
        out: Any = None,
        lse_out: Any = None,
        workspace: Any = None,
    ) -> Any:
        check(
            q=q,
            cache=cache,
            indices=indices,
            k_scale=k_scale,
            q_scale=q_scale,
            index_len=index_len,
            block_table=block_table,
            row_req=row_req,
            step=step,
            out=out,
            lse_out=lse_out,
            workspace=workspace,
        )
        if out is None:
            out = q.new_empty((q.shape[0], heads, rank), dtype=torch.bfloat16)
        if lse_out is None:
            lse_out = q.new_empty((q.shape[0], lse_width), dtype=torch.float32)
        if q.shape[0]:
            partials = (
                q.new_empty((needed,), dtype=torch.uint8)
                if words is not None and workspace is None
                else workspace
            )
            attend(
                q, cache, indices, k_scale, q_scale, index_len, block_table, row_req, out, lse_out, partials
            )
        return out, lse_out

    return on_device(ctx.device, run)
