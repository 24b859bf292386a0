"""``sparse_mla`` a tile of selected keys at a time: gather, decode into the workspace, two matrix products.

``build`` keeps the contract's numerics. ``build_rounded`` rounds the probabilities to bf16, as a matrix engine
that takes bf16 operands does, and says so in its declaration.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from kimi_hal import formats
from kimi_hal.dispatch.contract import BuildContext
from torch import Tensor

from kimi_hal_trainium.codes import decoding_table
from kimi_hal_trainium.tiles import spans, tile_of

Run = Callable[..., tuple[Tensor, Tensor]]


def build(ctx: BuildContext) -> Run:
    """Return the function that attends for one Spec."""
    return _build(ctx, torch.float32)


def build_rounded(ctx: BuildContext) -> Run:
    """Return the same function with probabilities rounded to bf16: numerics class ``attn.p=bf16``."""
    return _build(ctx, torch.bfloat16)


@dataclass(frozen=True)
class Kernel:
    """What a Spec fixes: read once, when the function is built."""

    spec: Any
    row_bytes: int
    scaled: bool
    table: Tensor
    tile: int
    probabilities: torch.dtype


def _build(ctx: BuildContext, probabilities: torch.dtype) -> Run:
    spec, check, fmt = ctx.spec, ctx.check, formats.latent(ctx.spec.latent)
    table, tile = decoding_table(ctx.persistent), tile_of(ctx.settings)
    kernel = Kernel(spec, fmt.row_bytes, fmt.needs_scale, table, tile, probabilities)
    dtype, width = getattr(torch, spec.out_dtype), spec.kv_rank + spec.pe_dim

    def run(
        q: Tensor,
        cache: Tensor,
        indices: Tensor,
        k_scale: Tensor | None = None,
        q_scale: Tensor | None = None,
        index_len: Tensor | None = None,
        block_table: Tensor | None = None,
        row_req: Tensor | None = None,
        *,
        step: Tensor | None = None,
        out: Tensor | None = None,
        lse_out: Tensor | None = None,
        workspace: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
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
        rows, heads = q.shape[:2]
        if out is None:
            out = q.new_empty((rows, heads, spec.kv_rank), dtype=dtype)
        if lse_out is None:
            lse_out = q.new_empty((rows, heads if spec.return_lse else 0), dtype=torch.float32)
        if workspace is None:
            workspace = q.new_empty(ctx.sizes.workspace, dtype=torch.uint8)
        slots = physical(spec, cache, indices, block_table, row_req)
        room = workspace[: tile * width * 4].view(torch.float32).view(tile, width)
        for row in range(rows):
            attended, lse = attend(kernel, q[row].float(), cache, slots[row], k_scale, room)
            out[row] = attended.to(dtype)
            if spec.return_lse:
                lse_out[row] = lse
        return out, lse_out

    return run


def physical(
    spec: Any, cache: Tensor, indices: Tensor, block_table: Tensor | None, row_req: Tensor | None
) -> Tensor:
    """Return int64 slots of this cache, −1 where an index contributes nothing (rule 4)."""
    index = indices.long().clamp(min=-1)
    if spec.index_space == "position" and block_table is not None and row_req is not None:
        requests, columns = block_table.shape
        if not requests * columns:
            return torch.full_like(index, -1)
        known = (index >= 0) & (index < columns * spec.page)
        known &= ((row_req >= 0) & (row_req < requests))[:, None]
        line = row_req.long().clamp(0, requests - 1)[:, None].expand_as(index)
        block = block_table[line, index.clamp(0, columns * spec.page - 1) // spec.page].long()
        index = torch.where(known & (block >= 0), block * spec.page + index % spec.page, -1)
    return torch.where(index < cache.shape[0] * spec.page, index, -1)


def attend(
    kernel: Kernel, q: Tensor, cache: Tensor, slots: Tensor, k_scale: Tensor | None, room: Tensor
) -> tuple[Tensor, Tensor]:
    """Attend ``q [H, 576]`` to its keys, a tile at a time under a running maximum (rule 3: natural log)."""
    value = kernel.spec.kv_rank
    top = q.new_full(q.shape[:1], -torch.inf)
    total, out = torch.zeros_like(top), q.new_zeros((q.shape[0], value))
    for span in spans(slots.shape[0], kernel.tile):
        live = slots[span] >= 0
        keys = gather(kernel, cache, slots[span], live, k_scale, room)
        logits = (q @ keys.T * kernel.spec.softmax_scale).masked_fill(~live, -torch.inf)
        highest = torch.maximum(top, logits.amax(dim=1))
        base = highest.masked_fill(highest == -torch.inf, 0.0)  # −inf − −inf would be NaN
        weight, kept = torch.exp(logits - base[:, None]), torch.exp(top - base)
        total = total * kept + weight.sum(dim=1)
        rounded = weight.to(kernel.probabilities).float()
        out = out * kept[:, None] + rounded @ keys[:, :value]
        top = highest
    lse = torch.where(top.isinf(), top, top + torch.log(total))
    return out / total.masked_fill(total == 0, 1.0)[:, None], lse


def gather(
    kernel: Kernel, cache: Tensor, slots: Tensor, live: Tensor, k_scale: Tensor | None, room: Tensor
) -> Tensor:
    """Decode the keys of a tile into the workspace; what is not selected is written as zeros, never read as one."""
    keys = room[: slots.shape[0]]
    if not cache.shape[0]:
        return keys.zero_()
    page = kernel.spec.page
    rows = cache[:, : page * kernel.row_bytes].view(-1, page, kernel.row_bytes)
    slot = slots.clamp(min=0)
    codes = rows[slot // page, slot % page]
    if kernel.scaled and k_scale is not None:
        decoded = kernel.table[codes.long()] * k_scale
    else:
        decoded = codes.view(torch.bfloat16).float()
    return torch.where(live[:, None], decoded, decoded.new_zeros(()), out=keys)
