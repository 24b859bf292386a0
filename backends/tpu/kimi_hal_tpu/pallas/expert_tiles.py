"""Routes sorted by expert and cut into tiles of rows: a static number of tiles, of which the first are used."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from kimi_hal.ops.moe import MoESpec
from kimi_hal_tpu import expert_grid
from kimi_hal_tpu.pallas.mode import Array


class Tiles(NamedTuple):
    """What each tile does. Tiles from ``used`` on repeat the last that is used, so that they bring no weights.

    Attributes:
        expert: ``[tiles]`` int32, the local expert.
        count: ``[tiles]`` int32, how many rows.
        used: ``[1]`` int32, how many tiles have rows.
        rows: ``[tiles, 1, size]`` int32, the rows' numbers, ascending.
        weights: ``[tiles, 1, size]`` float32.
    """

    expert: Array
    count: Array
    used: Array
    rows: Array
    weights: Array


def local_experts(spec: MoESpec, ids: Array, expert_map: Array | None) -> Array:
    """Return each route's local expert, or ``num_local`` where this rank contributes nothing."""
    real = (ids >= 0) & (ids < spec.num_experts)
    local = ids - spec.expert_offset if expert_map is None else expert_map[jnp.where(real, ids, 0)]
    return jnp.where(real & (local >= 0) & (local < spec.num_local), local, spec.num_local)


def once(spec: MoESpec, local: Array, weights: Array) -> tuple[Array, Array]:
    """Let the first of a row's routes to one expert bear the weights of all: no tile has a row twice."""
    same = local[:, :, None] == local[:, None, :]
    first = jnp.argmax(same, axis=2) == jnp.arange(local.shape[1])
    return jnp.where(first, local, spec.num_local), jnp.sum(jnp.where(same, weights[:, None], 0.0), axis=2)


def cut(spec: MoESpec, ids: Array, weights: Array, expert_map: Array | None, size: int) -> Tiles:
    """Sort ``[T, k]`` routes by local expert, then by row, and cut them into tiles of ``size`` rows."""
    routes = ids.size
    local, weights = once(spec, local_experts(spec, ids, expert_map), weights)
    local = local.reshape(-1)
    order = jnp.argsort(local, stable=True)
    number = jnp.arange(spec.num_local, dtype=jnp.int32)
    first = jnp.searchsorted(local[order], number, side="left").astype(jnp.int32)
    counts = jnp.searchsorted(local[order], number, side="right").astype(jnp.int32) - first
    ends = jnp.cumsum((counts + size - 1) // size, dtype=jnp.int32)
    tile = jnp.minimum(
        jnp.arange(expert_grid.most(spec, routes, size), dtype=jnp.int32), jnp.maximum(ends[-1] - 1, 0)
    )
    expert = jnp.minimum(jnp.searchsorted(ends, tile, side="right").astype(jnp.int32), spec.num_local - 1)
    own = tile - (ends - (counts + size - 1) // size)[expert]
    places = jnp.minimum((first[expert] + own * size)[:, None] + jnp.arange(size), routes - 1)
    route = order[places]
    return Tiles(
        expert=expert,
        count=jnp.clip(counts[expert] - own * size, 0, size),
        used=ends[-1:],
        rows=(route // ids.shape[1]).astype(jnp.int32)[:, None],
        weights=weights.reshape(-1)[route][:, None],
    )
