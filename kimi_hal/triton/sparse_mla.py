"""Portable Triton kernels of the sparse_mla family: the latent store, sparse attention, merging of states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from kimi_hal import formats
from kimi_hal.dispatch.contract import BuildContext
from kimi_hal.ops.operator import torch_dtype
from kimi_hal.triton import attention, latent_plan, latent_quantisation


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


def build_store_latent(ctx: BuildContext) -> Callable[..., Any]:
    """Make the run function of ``store_latent``: one program a token."""
    spec, check = ctx.spec, ctx.check
    row_bytes = formats.latent(spec.latent).row_bytes
    kind = latent_plan.FORMATS[spec.latent].kind

    def run(kv_c: Any, k_pe: Any, slots: Any, cache: Any, k_scale: Any = None) -> None:
        check(kv_c=kv_c, k_pe=k_pe, slots=slots, cache=cache, k_scale=k_scale)
        if slots.shape[0]:
            latent_quantisation.store[(slots.shape[0],)](
                kv_c,
                k_pe,
                slots,
                cache,
                k_scale,
                kv_c.stride(0),
                k_pe.stride(0),
                slots.stride(0),
                cache.stride(0),
                cache.shape[0] * spec.page,
                FORMAT=kind,
                ROW_BYTES=row_bytes,
                PAGE=spec.page,
            )

    return run


def build_sparse_mla(ctx: BuildContext) -> Callable[..., Any]:
    """Make the run function of ``sparse_mla`` with probabilities kept within the contract's precision."""
    return _attention(ctx, terms=3 if ctx.spec.out_dtype == "float32" else 2)


def build_sparse_mla_p16(ctx: BuildContext) -> Callable[..., Any]:
    """Make the run function of ``sparse_mla`` with probabilities rounded to bfloat16."""
    return _attention(ctx, terms=1)


def _constants(spec: Any, cut: latent_plan.Cut) -> dict[str, Any]:
    """Return the constants of the attention kernel."""
    fmt = latent_plan.FORMATS[spec.latent]
    return {
        "FORMAT": fmt.kind,
        "ROW_BYTES": formats.latent(spec.latent).row_bytes,
        "PAGE": spec.page,
        "SPACE": spec.index_space,
        "WORLD": spec.dcp.world,
        "RANK": spec.dcp.rank,
        "INTERLEAVE": spec.dcp.interleave,
        "Q_ELEMENT": spec.q_dtype.removeprefix("float8_"),
        "GROUP": fmt.group,
        "SHARED_GROUP": fmt.shared_group,
        "RUN": fmt.run,
        "SHARED_RUN": fmt.shared_run,
        "SMALL": cut.small,
        "SPLITS": cut.splits,
        "CHUNK": cut.chunk,
        "SINGLE": cut.single,
        "HEADS": cut.heads,
        "KEYS": cut.keys,
        "COUNT": fmt.count,
        "STAGES": cut.stages,
        "num_warps": cut.warps,
    }


def _attention(ctx: BuildContext, terms: int) -> Callable[..., Any]:
    """Make the run function of ``sparse_mla``: a program a row, block of heads and part of the keys."""
    spec, check = ctx.spec, ctx.check
    cut = latent_plan.cut(spec, ctx.limits, ctx.arch)
    constants = _constants(spec, cut) | {"TERMS": terms}
    heads, splits, rank = spec.num_heads, cut.splits, spec.kv_rank
    blocks = triton.cdiv(heads, cut.heads)
    lse_width = heads if spec.return_lse else 0
    dtype, narrow = torch_dtype(spec.out_dtype), spec.q_dtype != "bfloat16"
    scale = float(spec.softmax_scale)
    together = {"D": rank, "BLOCK": rank if splits < 8 else 128, "SPLITS": splits, "LSE": spec.return_lse}

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
            out = q.new_empty((rows, heads, rank), dtype=dtype)
        if lse_out is None:
            lse_out = q.new_empty((rows, lse_width), dtype=torch.float32)
        if not rows:
            return out, lse_out
        to, lse_to = out, lse_out
        if splits > 1:
            to, lse_to = _parts(workspace, q, latent_plan.partial_floats(spec, splits, rows), (heads, rank))
        attention.attend[(rows * splits * blocks,)](
            q.view(torch.uint8) if narrow else q,
            cache,
            indices,
            k_scale,
            q_scale,
            index_len,
            block_table,
            row_req,
            to,
            lse_to,
            *q.stride()[:2],
            cache.stride(0),
            indices.stride(0),
            0 if index_len is None else index_len.stride(0),
            0 if block_table is None else block_table.stride(0),
            0 if row_req is None else row_req.stride(0),
            *to.stride()[:2],
            lse_to.stride(0),
            indices.shape[1],
            cache.shape[0],
            *(block_table.shape if block_table is not None else (0, 0)),
            heads,
            scale,
            LSE=splits > 1 or spec.return_lse,
            **constants,
        )
        if splits > 1:
            attention.combine[(rows * heads * (rank // together["BLOCK"]),)](
                to, lse_to, out, lse_out, *out.stride()[:2], lse_out.stride(0), heads, **together
            )
        return out, lse_out

    return run


def _parts(workspace: Any, like: Any, floats: tuple[int, int], shape: tuple[int, int]) -> tuple[Any, Any]:
    """Return the outputs ``[rows of parts, heads, rank]`` and LSEs of parts, in the workspace if there is one."""
    size = 4 * sum(floats)
    room = like.new_empty(size, dtype=torch.uint8) if workspace is None else workspace
    room = room[:size].view(torch.float32)
    return room[: floats[0]].view(-1, *shape), room[floats[0] :].view(-1, shape[0])
