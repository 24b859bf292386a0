"""``sparse_mla`` by FlashMLA: its 656-byte records as a decode, a bfloat16 cache as a prefill, 64 or 128 heads.

Two builds register the same kernels: vLLM's (``torch.ops._flashmla_C``) and sgl-flash-mla's
(``torch.ops.flash_mla_legacy``). Heads are padded with zeros to what they take. A row without a key has LSE +inf there
and −inf here. Probabilities, and keys times their scales, are rounded to bfloat16: ``attn.p=bf16``, ``attn.k=bf16``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kimi_hal.dispatch.contract import BuildContext
from kimi_hal.ops.sparse_mla import SparseMLASpec
from kimi_hal_nvidia.adapters import libraries, slots
from kimi_hal_nvidia.adapters.pages import with_stride
from kimi_hal_nvidia.streams import on_device

#: What the kernels are given, in this order; what either build takes besides has defaults or is ``NONE``.
DECODE = (
    *("q", "kv", "indices", "topk_length", "attn_sink", "tile_scheduler_metadata", "num_splits"),
    *("extra_kv", "extra_indices", "extra_topk_length", "d_v", "sm_scale"),
)
PREFILL = ("q", "kv", "indices", "sm_scale", "d_v", "attn_sink", "topk_length")
#: vLLM's prefill takes an output besides, which has no default.
VLLM_PREFILL = (*PREFILL, "out_")
#: Heads that the kernels take, and indices that they take at a time.
HEADS, INDICES = (64, 128), 128
RECORD, ROW = 656, 1152


def operators() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the decode and the prefill of whichever build is installed; sgl-flash-mla's goes first.

    Raises:
        ImportError: neither is installed, or it takes other arguments.
    """
    if libraries.installed("sgl-flash-mla"):
        libraries.load("flash_mla", "_C_legacy*.so")
        name = "flash_mla_legacy"
        return (
            libraries.operator(name, "sparse_decode_fwd", DECODE),
            libraries.operator(name, "sparse_prefill_fwd", PREFILL),
        )
    libraries.load("vllm", "_flashmla_C*.so")
    prefill = libraries.operator("_flashmla_C", "sparse_prefill_fwd", VLLM_PREFILL)
    return (
        libraries.operator("_flashmla_C", "sparse_decode_fwd", DECODE),
        lambda *operands: prefill(*operands, None),
    )


class Attention:
    """Attends for one plan."""

    def __init__(self, spec: SparseMLASpec) -> None:
        self.spec = spec
        self.decode, self.prefill = operators()
        self.heads = next(h for h in HEADS if h >= spec.num_heads)

    def units(self, cache: Tensor) -> tuple[int, int]:
        """Return how far a page and a row of it are, in what the kernel's indices count."""
        if self.spec.latent == "latent.flashmla.656":
            return self.spec.page, 1
        unit = math.gcd(cache.stride(0), ROW)
        return cache.stride(0) // unit, ROW // unit

    def records(self, q: Tensor, cache: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Attend to records: out ``[T, heads, 512]`` and its LSE ``[T, heads]``."""
        page, row = self.spec.page, RECORD
        kv = cache.as_strided((cache.shape[0], page, 1, row), (cache.stride(0), row, row, 1))
        numbers = kv.view(torch.float8_e4m3fn)
        given = (q[:, None], numbers, index[:, None], *[None] * 7, 512, self.spec.softmax_scale)
        out, lse = self.decode(*given)[:2]
        return out[:, 0], lse[:, :, 0]

    def rows(self, q: Tensor, cache: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Attend to bfloat16 rows: out ``[T, heads, 512]`` and its LSE ``[T, heads]``.

        ``index`` counts in the largest units that pages and rows are whole multiples of, so that a page may have any
        stride: the library multiplies an index by one stride.
        """
        unit = math.gcd(cache.stride(0), ROW) // 2
        rows = ((cache.shape[0] - 1) * cache.stride(0) + (self.spec.page - 1) * ROW) // (2 * unit) + 1
        kv = cache.view(torch.bfloat16).as_strided((rows, 1, 576), (unit, 576, 1))
        out, _, lse = self.prefill(q, kv, index[:, None], self.spec.softmax_scale, 512, None, None)
        return out, lse

    def __call__(self, q: Tensor, cache: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return out ``[T, H, 512]`` and LSE ``[T, H]``; there is at least one row."""
        heads = q.shape[1]
        if heads < self.heads:
            q = torch.nn.functional.pad(q, (0, 0, 0, self.heads - heads))
        attend = self.records if self.spec.latent == "latent.flashmla.656" else self.rows
        out, lse = attend(q.contiguous(), cache, index)
        lse = lse[:, :heads]
        return out[:, :heads], lse.masked_fill(lse == torch.inf, -torch.inf)


def build_sparse_mla(ctx: BuildContext) -> Callable[..., Any]:
    """Make the run function of ``sparse_mla``."""
    spec, check = ctx.spec, ctx.check
    attend = Attention(spec)
    lse_width = spec.num_heads if spec.return_lse else 0

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
        rows = q.shape[0]
        if out is None:
            out = q.new_empty((rows, spec.num_heads, spec.kv_rank))
        if lse_out is None:
            lse_out = q.new_empty((rows, lse_width), dtype=torch.float32)
        if rows:
            cache = with_stride(cache)
            units = attend.units(cache)
            index = slots.turn(spec, indices, index_len, block_table, row_req, cache.shape[0], INDICES, units)
            found, lse = attend(q, cache, index)
            out.copy_(found)
            if lse_width:
                lse_out.copy_(lse)
        return out, lse_out

    return on_device(ctx.device, run)
