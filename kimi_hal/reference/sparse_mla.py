"""Sparse MLA in plain torch: the meaning of ``ops/sparse_mla.py``, in float32 or float64."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_hal import formats
from kimi_hal.ops.sparse_mla import MergeSpec, SparseMLASpec, StoreLatentSpec
from kimi_hal.parallel import ownership

#: Selected keys gathered at once: 64 rows x 2048 keys x 576 x 8 bytes = 0.6 GB in float64.
KEYS_AT_ONCE = 1 << 17


def store_latent(
    spec: StoreLatentSpec,
    kv_c: Tensor,
    k_pe: Tensor,
    slots: Tensor,
    cache: Tensor,
    k_scale: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write the latents of T tokens into their slots; encoding has one reference, so ``dtype`` has no effect."""
    rows = slots.shape[0]
    live = (slots >= 0) & (slots < cache.shape[0] * spec.page)
    fmt = formats.latent(spec.latent)
    fmt.write(cache, spec.page, slots[live], kv_c[:rows][live].float(), k_pe[:rows][live].float(), k_scale)


def sparse_mla(
    spec: SparseMLASpec,
    q: Tensor,
    cache: Tensor,
    indices: Tensor,
    k_scale: Tensor | None = None,
    q_scale: Tensor | None = None,
    index_len: Tensor | None = None,
    block_table: Tensor | None = None,
    row_req: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Attend to the selected keys, a few rows at a time; returns out and lse in ``dtype``."""
    slots = selected_slots(spec, cache, indices, index_len, block_table, row_req)
    rows, heads = q.shape[0], spec.num_heads
    out = q.new_zeros((rows, heads, spec.kv_rank), dtype=dtype)
    lse = q.new_full((rows, heads), -torch.inf, dtype=dtype)
    scale = spec.softmax_scale * (q_scale.to(dtype) if q_scale is not None else 1.0)
    step = max(1, KEYS_AT_ONCE // max(1, indices.shape[1]))
    for start in range(0, rows, step):
        part = slice(start, start + step)
        out[part], lse[part] = _attend(spec, q[part].to(dtype) * scale, cache, slots[part], k_scale, dtype)
    return out, lse if spec.return_lse else lse[:, :0]


def selected_slots(
    spec: SparseMLASpec,
    cache: Tensor,
    indices: Tensor,
    index_len: Tensor | None,
    block_table: Tensor | None,
    row_req: Tensor | None,
) -> Tensor:
    """Return ``[T, k]`` int64 physical slots, −1 where an index contributes nothing."""
    index = indices.long()
    if index_len is not None:
        column = torch.arange(index.shape[1], device=index.device)
        index = torch.where(column < index_len[:, None], index, -1)
    if spec.index_space == "position":
        owned = (index >= 0) & (ownership.owner(index, spec.dcp) == spec.dcp.rank)
        index = torch.where(owned, ownership.local(index, spec.dcp), -1)
    if spec.index_space != "slot":
        index = _translate(index, block_table, row_req, spec.page)
    return torch.where((index >= 0) & (index < cache.shape[0] * spec.page), index, -1)


def _translate(local: Tensor, block_table: Tensor | None, row_req: Tensor | None, page: int) -> Tensor:
    """Turn local positions into slots through each row's block-table row."""
    assert block_table is not None and row_req is not None  # the metadata check required them
    column = local // page
    inside = (local >= 0) & (column < block_table.shape[1])
    live = inside.any(dim=1) & (row_req >= 0) & (row_req < block_table.shape[0])
    inside &= live[:, None]
    table_row = torch.where(live, row_req, 0).long()[:, None].expand_as(column)
    block = block_table[table_row, torch.where(inside, column, 0)].long()
    return torch.where(inside & (block >= 0), block * page + local % page, -1)


def _attend(
    spec: SparseMLASpec, q: Tensor, cache: Tensor, slots: Tensor, k_scale: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Attend ``q [t, H, D]`` (scaled) to ``slots [t, k]``; keys that are not selected are zeros, never read."""
    live = slots >= 0
    keys = q.new_zeros((*slots.shape, spec.kv_rank + spec.pe_dim))
    keys[live] = formats.latent(spec.latent).read(cache, spec.page, slots[live], k_scale, dtype=dtype)
    logits = torch.einsum("thd,tkd->thk", q, keys).masked_fill(~live[:, None], -torch.inf)
    lse = torch.logsumexp(logits, dim=-1)
    # A row without keys has lse −inf; subtracting 0 instead keeps its weights exp(−inf) = 0.
    weights = torch.exp(logits - torch.where(lse == -torch.inf, 0.0, lse)[..., None])
    return torch.einsum("thk,tkv->thv", weights, keys[..., : spec.kv_rank]), lse


def merge_attn_states(
    spec: MergeSpec, outs: Tensor, lses: Tensor, *, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Combine M parts by LSE; an empty part's output is never multiplied, whatever it holds."""
    empty = ~torch.isfinite(lses)
    clean = lses.to(dtype).masked_fill(empty, -torch.inf)
    lse = torch.logsumexp(clean, dim=0)
    weights = torch.exp(clean - torch.where(lse == -torch.inf, 0.0, lse))
    parts = outs.to(dtype).masked_fill(empty[..., None], 0.0)
    return (weights[..., None] * parts).sum(dim=0), lse if spec.return_lse else lse[:, :0]
