"""Latent store, sparse attention and LSE merging as traced programs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kimi_hal import formats
from kimi_hal.formats import minifloat
from kimi_hal.formats.latents import FlashMLALatent, LatentFormat, TensorScaledLatent
from kimi_hal.ops.sparse_mla import MergeSpec, SparseMLASpec, StoreLatentSpec
from kimi_hal.parallel import ownership
from kimi_hal.reference import sparse_mla as reference
from kimi_hal_tpu.xla import order
from kimi_hal_tpu.xla.products import WHOLE, product

Given = Mapping[str, Tensor]
QUERY = {"float8_e4m3fn": minifloat.E4M3FN, "float8_e4m3fnuz": minifloat.E4M3FNUZ}


def store_latent(spec: StoreLatentSpec, given: Given) -> tuple[Tensor]:
    """Return the cache with the latents of T tokens in their slots."""
    fmt, cache, slots = formats.latent(spec.latent), given["cache"], given["slots"]
    count = slots.shape[0]
    packed = fmt.pack(given["kv_c"][:count].float(), given["k_pe"][:count].float(), given.get("k_scale"))
    capacity = cache.shape[0] * spec.page
    where = order.last_writer(torch.where((slots >= 0) & (slots < capacity), slots, -1))
    rows = cache.reshape(capacity, fmt.row_bytes)
    return (order.put(rows, where, packed).reshape(cache.shape),)


def sparse_mla(spec: SparseMLASpec, given: Given) -> tuple[Tensor, Tensor]:
    """Return out ``[T, H, 512]`` and lse ``[T, H]`` in float32."""
    fmt, cache = formats.latent(spec.latent), given["cache"]
    slots = physical_slots(spec, given)
    valid = slots >= 0
    rows = cache.reshape(-1, fmt.row_bytes)[slots.clamp(min=0).reshape(-1)]
    values, count = latents(fmt, rows)
    keys = torch.where(valid[..., None], values.reshape(*slots.shape, values.shape[1]), 0.0)
    factor = given["k_scale"] if fmt.needs_scale else torch.ones_like(values[0, :1])
    scale = factor * spec.softmax_scale
    if "q_scale" in given:
        scale = scale * given["q_scale"]
    dots = product(query(spec, given["q"]), keys.transpose(1, 2), b_terms=count)
    logits = torch.where(valid[:, None], dots * scale, -torch.inf)
    top = logits.amax(dim=2)  # XLA's maximum may hide a NaN behind +inf; the sum of weights does not
    # Nothing yet, or a logit of +inf: whatever is subtracted, the exponential says the right thing of it.
    base = torch.where(top.abs() < torch.inf, top, 0.0)
    # What does not count weighs 0 even where a NaN or an infinity among the others makes the base no number.
    weights = torch.where(valid[:, None], torch.exp(logits - base[..., None]), 0.0)
    total = weights.sum(dim=2)
    sums = product(weights, keys[..., : spec.kv_rank], a_terms=WHOLE, b_terms=count)
    out = sums / torch.where(total == 0, 1.0, total)[..., None] * factor
    out = torch.where((top == torch.inf)[..., None], torch.nan, out)
    out = torch.where(valid.any(dim=1)[:, None, None], out, 0.0)  # whatever the cache's scale is
    lse = torch.where(top == torch.inf, total, top + torch.log(total))
    return out, lse if spec.return_lse else lse[:, :0]


def latents(fmt: LatentFormat, rows: Tensor) -> tuple[Tensor, int]:
    """Return the elements of rows ``[n, 576]`` in float32, without the cache's scale, and their bfloat16 terms."""
    if isinstance(fmt, TensorScaledLatent):
        return minifloat.decode(rows, minifloat.ELEMENTS[fmt.element]), 1
    return fmt.unpack(rows, None, torch.float32), WHOLE if isinstance(fmt, FlashMLALatent) else 1


def query(spec: SparseMLASpec, q: Tensor) -> Tensor:
    """Return the query in float32: exact in bfloat16, whatever it was."""
    return minifloat.decode(q, QUERY[spec.q_dtype]) if spec.q_dtype in QUERY else q.float()


def physical_slots(spec: SparseMLASpec, given: Given) -> Tensor:
    """Return int64 ``[T, k]`` slots of the cache, −1 where an index contributes nothing."""
    index = reference.live_indices(given["indices"], given.get("index_len"))
    if spec.index_space == "position":
        owned = (index >= 0) & (ownership.owner(index, spec.dcp) == spec.dcp.rank)
        index = torch.where(owned, ownership.local(index, spec.dcp), -1)
    if spec.index_space != "slot":
        index = translated(spec, given, index)
    return torch.where((index >= 0) & (index < given["cache"].shape[0] * spec.page), index, -1)


def translated(spec: SparseMLASpec, given: Given, local: Tensor) -> Tensor:
    """Turn local positions into slots through each row's line of the block table."""
    table, request = given["block_table"], given["row_req"].long()
    there = ((request >= 0) & (request < given["size_R"]))[:, None]
    live = there & (local >= 0) & (local < given["size_blocks"].long() * spec.page)
    line = table[request.clamp(0, table.shape[0] - 1)].long()
    block = line.gather(1, torch.where(live, local, 0) // spec.page)
    return torch.where(live & (block >= 0), block * spec.page + local % spec.page, -1)


def merge_attn_states(spec: MergeSpec, given: Given) -> tuple[Tensor, Tensor]:
    """Return the merged out and lse."""
    outs, lses = given["outs"].float(), given["lses"]
    empty = ~(lses.abs() < torch.inf)  # NaN too
    clean = torch.where(empty, -torch.inf, lses)
    top = clean.amax(dim=0)
    base = torch.where(top == -torch.inf, 0.0, top)
    out, total = torch.zeros_like(outs[0]), torch.zeros_like(top)
    for part in range(spec.parts):
        weight = torch.exp(clean[part] - base)
        out = out + weight[..., None] * torch.where(empty[part][..., None], 0.0, outs[part])
        total = total + weight
    out = out / torch.where(total == 0, 1.0, total)[..., None]
    lse = torch.where(top == -torch.inf, top, top + torch.log(total))
    return out, lse if spec.return_lse else lse[:, :0]
