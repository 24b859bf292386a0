"""``sparse_mla`` by a CUDA kernel: one launch, no workspace; a row's keys are cut over the blocks of a cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kimi_hal.dispatch.contract import BuildContext
from kimi_hal.ops.sparse_mla import SparseMLASpec
from kimi_hal_nvidia import driver
from kimi_hal_nvidia.attention_plan import PROCESSORS, head_blocks, heads_of, parts_of, tiles
from kimi_hal_nvidia.parameters import Parameters
from kimi_hal_nvidia.streams import device_index, on_device, raw_stream

#: ``struct Attention`` of ``sparse_mla.cu``: addresses, then numbers.
ADDRESSES, NUMBERS = 10, "10q15if"
#: Kernels of a latent format by heads of a block: name, and bytes of shared memory of a block.
KERNELS = {
    "latent.fp8.e4m3fn.tensor": {16: ("fp8_16", 223232), 32: ("fp8_32", 211968)},
    "latent.nvfp4.352": {16: ("nvfp4_16", 208896), 32: ("nvfp4_32", 214016)},
}
THREADS = 384
SPACES = {"slot": 0, "position": 1, "local": 2}


def address(tensor: Any) -> int:
    """Return where a tensor's data is; 0 for none."""
    return 0 if tensor is None else int(tensor.data_ptr())


def stride(tensor: Any) -> int:
    """Return the step of a tensor's first dimension; 0 for none."""
    return 0 if tensor is None else int(tensor.stride(0))


class Attention:
    """Attends for one plan."""

    def __init__(self, ctx: BuildContext) -> None:
        spec: SparseMLASpec = ctx.spec
        index = device_index(ctx.device)
        name, shared = KERNELS[spec.latent][heads_of(spec)]
        self.parts = ctx.configuration.get("parts") or parts_of(spec, ctx.limits)
        self.blocks = head_blocks(spec)
        self.parameters = Parameters(ADDRESSES, NUMBERS)
        kernel = driver.kernel("sparse_mla", ctx.arch, name, threads=THREADS, shared=shared, device=index)
        self.launch = driver.launcher(kernel, self.parameters.address, cluster=True)
        self.stream = raw_stream(index)
        each = -(-tiles(spec) // self.parts)
        #: Where rows are not cut, blocks take rows and heads in turn; a cluster has one.
        self.most = PROCESSORS if self.parts == 1 else 1 << 30
        self.fixed = (
            *(spec.num_heads, self.parts, each, spec.page, SPACES[spec.index_space]),
            *(spec.dcp.world, spec.dcp.rank, spec.dcp.interleave),
            *(int(spec.q_dtype != "bfloat16"), int(spec.return_lse)),
            float(spec.softmax_scale),
        )

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
    ) -> None:
        """Fill ``out`` and ``lse_out``; there is at least one row. The operands are the operator's own."""
        operands = (q, cache, indices, k_scale, q_scale, index_len, block_table, row_req, out, lse_out)
        with self.parameters.lock:
            self.parameters.point(*map(address, operands))
            self.parameters.tell(
                *(*q.stride()[:2], cache.stride(0), indices.stride(0)),
                *(stride(index_len), stride(block_table), stride(row_req)),
                *(*out.stride()[:2], lse_out.stride(0)),
                *(indices.shape[1], cache.shape[0]),
                *((0, 0) if block_table is None else block_table.shape),
                q.shape[0],
                *self.fixed,
            )
            items = min(q.shape[0] * self.blocks, self.most)
            self.launch(items * self.parts, 1, self.stream(), self.parts)


def build_sparse_mla(ctx: BuildContext) -> Callable[..., Any]:
    """Make the run function of ``sparse_mla``."""
    spec, check = ctx.spec, ctx.check
    attend = Attention(ctx)
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
            attend(q, cache, indices, k_scale, q_scale, index_len, block_table, row_req, out, lse_out)
        return out, lse_out

    return on_device(ctx.device, run)
