"""Selection from a row of scores: what SparseCore selects, in the contract's terms."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp

from kimi_hal.ops.spec import DCP
from kimi_hal.ops.topk_merge import TopKSpec
from kimi_hal.parallel import ownership
from kimi_hal_tpu.pallas import selection
from kimi_hal_tpu.pallas.mode import Array, Mode


def topk_select(spec: TopKSpec, given: Mapping[str, Array], mode: Mode) -> tuple[Array, Array]:
    """Return indices ``[T, k]`` int32 and the selected scores."""
    scores = rounded(given["scores"], spec.score)
    width = given["size_L"]
    start = given.get("row_start")
    first = jnp.zeros_like(given["row_len"]) if start is None else jnp.clip(start, 0, width)
    count = jnp.clip(local_length(given["row_len"], ownership.of_keys(spec.dcp)), 0, width - first)
    index = selection.select(scores, first, count, spec.topk, mode)
    if not spec.return_selected:
        return index, jnp.zeros((index.shape[0], 0), jnp.float32)
    return index, chosen(scores, index, first)


def rounded(scores: Array, score: str) -> Array:
    """Return scores as float32 numbers of the score type, rounded once."""
    wide = scores.astype(jnp.float32)
    return wide.astype(jnp.bfloat16).astype(jnp.float32) if score == "bfloat16" else wide


def chosen(scores: Array, index: Array, first: Array) -> Array:
    """Return the scores of selected positions, −inf where −1."""
    column = jnp.clip(index + first[:, None], 0, scores.shape[1] - 1)
    return jnp.where(index < 0, -jnp.inf, jnp.take_along_axis(scores, column, axis=1))


def local_length(length: Array, dcp: DCP) -> Array:
    """Return how many of the first ``length`` positions rank ``dcp.rank`` owns, as ``ownership`` counts them."""
    run = dcp.world * dcp.interleave
    bound = jnp.maximum(length, 0)
    over = jnp.clip(bound % run - dcp.rank * dcp.interleave, 0, dcp.interleave)
    return bound // run * dcp.interleave + over
