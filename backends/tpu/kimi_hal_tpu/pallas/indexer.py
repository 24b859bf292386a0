"""The lightning indexer: TensorCore scores paged FP8 keys, SparseCore selects."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from kimi_hal.ops.indexer import IndexerSpec, IndexerTopKSpec
from kimi_hal.parallel import ownership
from kimi_hal_tpu.pallas import scores, selection
from kimi_hal_tpu.pallas.mode import Array, Mode
from kimi_hal_tpu.pallas.topk_merge import chosen, local_length, rounded


def indexer_logits(spec: IndexerSpec, given: Mapping[str, Array], mode: Mode) -> tuple[Array]:
    """Return the scores ``[T, 64 · columns]``; columns behind a row's keys hold anything."""
    return (scored(spec, given, keys(spec, given), mode).astype(spec.score),)


def all_scores(spec: IndexerTopKSpec, given: Mapping[str, Array], mode: Mode) -> tuple[Array]:
    """Return the scores that ``indexer_topk`` selects from."""
    return (rounded(scored(spec, given, keys(spec, given), mode), spec.score),)


def indexer_topk(spec: IndexerTopKSpec, given: Mapping[str, Array], mode: Mode) -> tuple[Array, Array]:
    """Return the selected positions, or slots, ``[T, k]`` and their scores."""
    count = keys(spec, given)
    found = rounded(scored(spec, given, count, mode), spec.score)
    zero = jnp.zeros_like(count)
    index = selection.select(found, zero, count, spec.topk, mode)
    best = chosen(found, index, zero)
    if spec.emit == "slot":
        index, best = as_slots(spec, given, index, best)
    return index, best if spec.return_selected else best[:, :0]


def keys(spec: IndexerSpec, given: Mapping[str, Array]) -> Array:
    """Return the local keys of each row, int32 ``[T]``: 0 for padding and for a request that is none."""
    request = given["row_req"]
    there = (request >= 0) & (request < given["size_R"])
    room = given["size_columns"] * spec.page
    count = jnp.minimum(local_length(given["row_len"], ownership.of_keys(spec.dcp)), room)
    return jnp.where(there, count, 0)


def scored(spec: IndexerSpec, given: Mapping[str, Array], count: Array, mode: Mode) -> Array:
    """Return the float32 scores of a padded call."""
    q = jax.lax.bitcast_convert_type(given["q"], jnp.float8_e4m3fn)
    cache = given["cache"].reshape(-1, scores.PAGE_ROWS, scores.LANES)
    request = jnp.clip(given["row_req"], 0, given["block_table"].shape[0] - 1)
    weights = given["weights"].astype(jnp.float32)
    return scores.score(q, weights, cache, given["block_table"], request, count, mode)


def as_slots(
    spec: IndexerTopKSpec, given: Mapping[str, Array], index: Array, best: Array
) -> tuple[Array, Array]:
    """Turn positions into slots; those without a page drop out and the others close up."""
    table = given["block_table"]
    line = table[jnp.clip(given["row_req"], 0, table.shape[0] - 1)]
    page = jnp.take_along_axis(line, jnp.maximum(index, 0) // spec.page, axis=1)
    live = (index >= 0) & (page >= 0) & (page < given["cache"].shape[0])
    slots = jnp.where(live, page * spec.page + index % spec.page, -1)
    order = jnp.argsort(~live, axis=1, stable=True)
    ordered = jnp.where(live, best, -jnp.inf)
    return jnp.take_along_axis(slots, order, axis=1), jnp.take_along_axis(ordered, order, axis=1)
