"""Sparse MLA: SparseCore gathers the selected latents into a dense buffer, TensorCore attends to it."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from kimi_hal.ops.sparse_mla import SparseMLASpec
from kimi_hal.parallel import ownership
from kimi_hal_tpu.pallas import attention, gather
from kimi_hal_tpu.pallas.latents import LAYOUTS, as_words
from kimi_hal_tpu.pallas.mode import Array, Mode

INT32_MAX = (1 << 31) - 1
QUERY = {"float8_e4m3fn": jnp.float8_e4m3fn, "float8_e4m3fnuz": jnp.float8_e4m3fnuz}


def sparse_mla(spec: SparseMLASpec, given: Mapping[str, Array], mode: Mode) -> tuple[Array, Array]:
    """Return out ``[T, H, 512]`` and the natural LSE ``[T, H]``."""
    slots = physical_slots(spec, given)
    count = slots.shape[1]
    whole = max(1, -(-count // gather.BLOCK)) * gather.BLOCK
    slots = jnp.pad(slots, ((0, 0), (0, whole - count)), constant_values=-1)
    layout = LAYOUTS[spec.latent]
    table = as_words(given["cache"].reshape(-1, layout.row_bytes))
    keys = gather.rows(table, slots.reshape(-1), mode)
    valid = (slots >= 0).astype(jnp.int32)
    q, scales = query(spec, given["q"]), factors(spec, given)
    out, lse = attention.attend(q, keys, valid, scales, layout, jnp.dtype(spec.out_dtype), mode)
    return out, lse if spec.return_lse else lse[:, :0]


def query(spec: SparseMLASpec, q: Array) -> Array:
    """Return the query in bfloat16, in which an FP8 one is exact."""
    if spec.q_dtype in QUERY:
        q = jax.lax.bitcast_convert_type(q, QUERY[spec.q_dtype])
    return q.astype(jnp.bfloat16)


def factors(spec: SparseMLASpec, given: Mapping[str, Array]) -> Array:
    """Return what a dot product of codes and a value of codes are multiplied with, ``[2]`` float32."""
    k_scale = given["k_scale"][0] if LAYOUTS[spec.latent].needs_scale else jnp.float32(1.0)
    scale = jnp.float32(spec.softmax_scale) * k_scale
    if "q_scale" in given:
        scale = scale * given["q_scale"][0]
    return jnp.stack([scale, k_scale])


def physical_slots(spec: SparseMLASpec, given: Mapping[str, Array]) -> Array:
    """Return ``[T, k]`` int32 slots of the cache, −1 where an index contributes nothing."""
    index = given["indices"]
    if "index_len" in given:
        column = jnp.arange(index.shape[1], dtype=jnp.int32)
        index = jnp.where(column < given["index_len"][:, None], index, -1)
    if spec.index_space == "position":
        owned = (index >= 0) & (ownership.owner(index, spec.dcp) == spec.dcp.rank)
        index = jnp.where(owned, ownership.local(index, spec.dcp), -1)
    if spec.index_space != "slot":
        index = translated(spec, given, index)
    return jnp.where((index >= 0) & (index < given["cache"].shape[0] * spec.page), index, -1)


def translated(spec: SparseMLASpec, given: Mapping[str, Array], local: Array) -> Array:
    """Turn local positions into slots through each row's line of the block table."""
    table, request = given["block_table"], given["row_req"]
    there = ((request >= 0) & (request < given["size_R"]))[:, None]
    most = jnp.minimum(given["size_blocks"], INT32_MAX // spec.page) * spec.page
    live = there & (local >= 0) & (local < most)
    line = table[jnp.clip(request, 0, table.shape[0] - 1)]
    block = jnp.take_along_axis(line, jnp.where(live, local, 0) // spec.page, axis=1)
    live &= (block >= 0) & (block < given["cache"].shape[0])  # before the product, which has 32 bits
    return jnp.where(live, block * spec.page + local % spec.page, -1)
