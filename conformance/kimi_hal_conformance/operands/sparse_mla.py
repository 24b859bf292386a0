"""Small operands for any Spec of the sparse_mla family."""

from __future__ import annotations

import torch

from kimi_hal import formats
from kimi_hal.formats import minifloat
from kimi_hal.ops.sparse_mla import MergeSpec, SparseMLASpec, StoreLatentSpec
from kimi_hal_conformance.case import Make, Operands
from kimi_hal_conformance.cases.sparse_mla import attention_operands, merge_operands, store_operands
from kimi_hal_conformance.operands.recipe import Recipe

#: Tokens of a request and keys that a row selects, at most: off every tile.
CONTEXT, KEYS = 90, 37


def store(spec: StoreLatentSpec, rows: int) -> Make:
    """Return latents for slots of a small cache."""
    return store_operands(spec.latent, spec.page, min(rows, 4 * spec.page))


def store_bytes(spec: StoreLatentSpec, rows: int) -> int:
    """Return the bytes of the cache, its copies and its canaries."""
    return 8 * 4 * spec.page * formats.latent(spec.latent).row_bytes


def attention(spec: SparseMLASpec, rows: int) -> Make:
    """Return queries with spread logits over shuffled pages, FP8 queries with their scale."""
    keys = min(KEYS, spec.topk)
    plain = attention_operands(spec, rows, keys, CONTEXT, spread=2.0)
    return plain if spec.q_dtype == "bfloat16" else quantised(plain, spec.q_dtype)


def quantised(make: Make, dtype: str) -> Make:
    """Return operands whose ``q`` is FP8, with ``q_scale``."""
    return lambda g: with_scale(make(g), dtype)


def with_scale(drawn: Operands, dtype: str) -> Operands:
    """Return the operands with ``q`` in FP8 and its scale."""
    largest, scale = minifloat.ELEMENTS[dtype.removeprefix("float8_")].largest, torch.tensor([0.0625])
    q = (drawn["q"].float() / scale).clamp(-largest, largest).to(getattr(torch, dtype))
    return {**drawn, "q": q, "q_scale": scale}


def attention_bytes(spec: SparseMLASpec, rows: int) -> int:
    """Return the bytes of pages, queries, outputs and decoded keys."""
    pages = 3 * (-(-CONTEXT // spec.page) + 1)
    cache = pages * spec.page * formats.latent(spec.latent).row_bytes
    return 4 * cache + rows * spec.num_heads * (576 + 512) * 24 + KEYS * 576 * 8


def merge(spec: MergeSpec, rows: int) -> Make:
    """Return parts of which some are empty."""
    return merge_operands(spec, rows)


def merge_bytes(spec: MergeSpec, rows: int) -> int:
    """Return the bytes of the parts and of the merged output."""
    return rows * spec.num_heads * spec.dim * (spec.parts * 16 + 32)


RECIPES = {
    "store_latent": Recipe(store, store_bytes, rows=4),
    "sparse_mla": Recipe(
        attention,
        attention_bytes,
        leading=("dcp.world",),
        small={"topk": 65, "num_heads": 5, "page": 16},
        rows=4,
        max_context=128,
    ),
    "merge_attn_states": Recipe(merge, merge_bytes, small={"num_heads": 3, "dim": 60, "parts": 3}, rows=5),
}
