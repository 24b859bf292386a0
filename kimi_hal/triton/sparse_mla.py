"""Portable Triton kernels of the sparse_mla family: merging of attention states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from kimi_hal.dispatch.contract import BuildContext
from kimi_hal.ops.operator import torch_dtype


@triton.jit
def _merge(
    outs,
    lses,
    out,
    lse_out,
    part_stride,
    row_stride,
    head_stride,
    lse_part_stride,
    lse_row_stride,
    lse_head_stride,
    out_row_stride,
    out_head_stride,
    lse_out_stride,
    heads,
    PARTS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    RETURN_LSE: tl.constexpr,
):
    """Merge the parts of one row and head; a part without a finite LSE is not read."""
    program = tl.program_id(0)
    row = (program // heads).to(tl.int64)
    head = (program % heads).to(tl.int64)
    element = tl.arange(0, BLOCK)
    inside = element < D
    infinity = float("inf")
    lse_at = lses + row * lse_row_stride + head * lse_head_stride
    out_at = outs + row * row_stride + head * head_stride
    top = -infinity
    for part in range(PARTS):
        lse = tl.load(lse_at + tl.cast(part, tl.int64) * lse_part_stride)
        top = tl.maximum(top, tl.where(tl.abs(lse) < infinity, lse, -infinity))
    base = tl.where(top == -infinity, 0.0, top)
    total = 0.0
    merged = tl.zeros((BLOCK,), dtype=tl.float32)
    for part in range(PARTS):
        at = tl.cast(part, tl.int64)
        lse = tl.load(lse_at + at * lse_part_stride)
        live = tl.abs(lse) < infinity  # false for NaN
        weight = tl.where(live, tl.exp(lse - base), 0.0)
        value = tl.load(out_at + at * part_stride + element, mask=inside & live, other=0.0)
        total += weight
        merged += weight * value.to(tl.float32)
    merged = merged / tl.where(total == 0.0, 1.0, total)
    tl.store(
        out + row * out_row_stride + head * out_head_stride + element,
        merged.to(out.dtype.element_ty),
        mask=inside,
    )
    if RETURN_LSE:
        tl.store(
            lse_out + row * lse_out_stride + head, tl.where(total == 0.0, -infinity, base + tl.log(total))
        )


def build_merge_attn_states(ctx: BuildContext) -> Callable[..., Any]:
    """Make the run function of ``merge_attn_states``: one program a row and head."""
    spec, check, dtype = ctx.spec, ctx.check, torch_dtype(ctx.spec.dtype)
    heads, dim, lse_width = spec.num_heads, spec.dim, spec.num_heads if spec.return_lse else 0
    block = triton.next_power_of_2(dim)

    def run(outs: Any, lses: Any, *, out: Any = None, lse_out: Any = None) -> Any:
        check(outs=outs, lses=lses, out=out, lse_out=lse_out)
        rows = outs.shape[1]
        if out is None:
            out = outs.new_empty((rows, heads, dim), dtype=dtype)
        if lse_out is None:
            lse_out = outs.new_empty((rows, lse_width), dtype=torch.float32)
        if rows:
            _merge[(rows * heads,)](
                outs,
                lses,
                out,
                lse_out,
                *outs.stride()[:3],
                *lses.stride(),
                *out.stride()[:2],
                lse_out.stride(0),
                heads,
                PARTS=spec.parts,
                D=dim,
                BLOCK=block,
                RETURN_LSE=spec.return_lse,
            )
        return out, lse_out

    return run
