"""Sparse MLA in plain torch: the meaning of ``ops/sparse_mla.py``, in float32 or float64.

Each query row is computed by itself, a bounded number of keys at a time: its bits depend on no other row,
and no row is too long.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kimi_hal import formats
from kimi_hal.ops.sparse_mla import MergeSpec, SparseMLASpec, StoreLatentSpec
from kimi_hal.parallel import ownership

#: Keys decoded at once: 32,768 x 576 x 8 bytes = 151 MB in float64, and 34 MB of logits for 128 heads.
KEYS = 1 << 15
#: Tokens encoded at once by a store.
TOKENS = 1 << 16
#: Indices turned into slots at once.
INDICES = 1 << 22
#: Elements of one part merged at once.
ELEMENTS = 1 << 24


def spans(total: int, step: int) -> Iterator[slice]:
    """Cut ``range(total)`` into slices of at most ``step``, and of at least one."""
    step = max(1, step)
    return (slice(start, min(start + step, total)) for start in range(0, total, step))


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
    """Write the latents of T tokens into their slots. Encoding has one reference: ``dtype`` has no effect."""
    fmt = formats.latent(spec.latent)
    live = (slots >= 0) & (slots < cache.shape[0] * spec.page)
    for part in spans(slots.shape[0], TOKENS):
        keep = live[part]
        latent, pe = kv_c[part][keep].float(), k_pe[part][keep].float()
        fmt.write(cache, spec.page, slots[part][keep], latent, pe, k_scale)


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
    """Attend to the selected keys, row by row; returns out and lse in ``dtype``."""
    rows, width = indices.shape
    out = q.new_zeros((rows, spec.num_heads, spec.kv_rank), dtype=dtype)
    lse = q.new_full((rows, spec.num_heads), -torch.inf, dtype=dtype)
    scale = spec.softmax_scale * q_scale.to(dtype) if q_scale is not None else spec.softmax_scale
    for part in spans(rows, INDICES // max(1, width)):
        index = live_indices(indices[part], index_len[part] if index_len is not None else None)
        requests = row_req[part] if row_req is not None else None
        slots = physical_slots(spec, cache, index, block_table, requests)
        for row, row_slots in zip(range(part.start, part.stop), slots, strict=True):
            out[row], lse[row] = _attend(spec, q[row].to(dtype), scale, cache, row_slots, k_scale)
    return out, lse if spec.return_lse else lse[:, :0]


def live_indices(indices: Tensor, index_len: Tensor | None) -> Tensor:
    """Return the indices as int64, −1 where negative or at or beyond ``index_len``."""
    index = indices.long().clamp(min=-1)
    if index_len is None:
        return index
    column = torch.arange(index.shape[1], device=index.device)
    return torch.where(column < index_len[:, None], index, -1)


def physical_slots(
    spec: SparseMLASpec, cache: Tensor, index: Tensor, block_table: Tensor | None, row_req: Tensor | None
) -> Tensor:
    """Return int64 ``[T, k]`` slots of this cache view, −1 where an index contributes nothing."""
    if spec.index_space == "position":
        owned = (index >= 0) & (ownership.owner(index, spec.dcp) == spec.dcp.rank)
        index = torch.where(owned, ownership.local(index, spec.dcp), -1)
    if spec.index_space != "slot":
        index = _translate(index, block_table, row_req, spec.page)
    return torch.where(index < cache.shape[0] * spec.page, index, -1)


def _translate(local: Tensor, block_table: Tensor | None, row_req: Tensor | None, page: int) -> Tensor:
    """Turn local positions into slots through each row's line of the block table; −1 where there is none."""
    if block_table is None or row_req is None:
        raise ValueError("positions need block_table and row_req")  # the metadata check required them
    requests, columns = block_table.shape
    live = (local >= 0) & (local < columns * page) & ((row_req >= 0) & (row_req < requests))[:, None]
    line = row_req.long()[:, None].expand_as(local)
    slots = torch.full_like(local, -1)
    block = block_table[line[live], local[live] // page].long()
    slots[live] = torch.where(block >= 0, block * page + local[live] % page, -1)
    return slots


def _attend(
    spec: SparseMLASpec,
    q: Tensor,
    scale: float | Tensor,
    cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attend ``q [H, D]`` to the keys in ``slots [k]``: a softmax over pieces with a running maximum."""
    top = q.new_full((spec.num_heads,), -torch.inf)
    total, out = torch.zeros_like(top), q.new_zeros((spec.num_heads, spec.kv_rank))
    chosen = slots[slots >= 0]  # what is not selected is not read, so it cannot matter
    for piece in spans(chosen.shape[0], KEYS):
        keys = formats.latent(spec.latent).read(cache, spec.page, chosen[piece], k_scale, dtype=q.dtype)
        logits = q @ keys.T * scale
        new_top = torch.maximum(top, logits.amax(dim=1))
        base = finite_base(new_top)
        weights, kept = torch.exp(logits - base[:, None]), torch.exp(top - base)
        total = total * kept + weights.sum(dim=1)
        out = out * kept[:, None] + weights @ keys[:, : spec.kv_rank]
        top = new_top
    return out / denominator(total)[:, None], log_sum(top, total)


def finite_base(top: Tensor) -> Tensor:
    """Return what to subtract before exp: the maximum, or 0 where there is nothing (exp(−inf − 0) = 0)."""
    return top.masked_fill(top == -torch.inf, 0.0)


def denominator(total: Tensor) -> Tensor:
    """Return the softmax's denominator, 1 where nothing was added: then the quotient is the 0 above it."""
    return total.masked_fill(total == 0, 1.0)


def log_sum(top: Tensor, total: Tensor) -> Tensor:
    """Return ``top + ln total``; an infinite maximum is the result itself."""
    return torch.where(torch.isinf(top), top, top + torch.log(total))


def merge_attn_states(
    spec: MergeSpec, outs: Tensor, lses: Tensor, *, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Combine M parts by LSE, in order; an empty part's output is never multiplied, whatever it holds."""
    rows = outs.shape[1]
    out = outs.new_zeros((rows, spec.num_heads, spec.dim), dtype=dtype)
    lse = lses.new_full((rows, spec.num_heads), -torch.inf, dtype=dtype)
    for part in spans(rows, ELEMENTS // (spec.num_heads * spec.dim)):
        clean = lses[:, part].to(dtype).masked_fill(~torch.isfinite(lses[:, part]), -torch.inf)
        top = clean.amax(dim=0)
        weights, total = torch.exp(clean - finite_base(top)), torch.zeros_like(top)
        # One by one: a sum's order, and with it a row's bits, must not depend on how many rows there are.
        for weight, logit, piece in zip(weights, clean, outs[:, part], strict=True):
            filled = piece.to(dtype).masked_fill((logit == -torch.inf)[..., None], 0.0)
            out[part] += weight[..., None] * filled
            total += weight
        out[part] /= denominator(total)[..., None]
        lse[part] = log_sum(top, total)
    return out, lse if spec.return_lse else lse[:, :0]
