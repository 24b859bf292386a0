"""Kimi Delta Attention: XLA lays out the rows and takes the sizes of a call, TensorCore advances the states."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from kimi_hal.ops.kda import KDASpec
from kimi_hal_tpu.pallas import chunks, gates, recurrence
from kimi_hal_tpu.pallas.layout import Layout
from kimi_hal_tpu.pallas.mode import Array, Mode
from kimi_hal_tpu.pallas.recurrence import Work
from kimi_hal_tpu.pallas.sequences import Sequences, in_range, put

Given = Mapping[str, Any]


def kda_decode(spec: KDASpec, given: Given, mode: Mode) -> tuple[Array, Array]:
    """Return the rows' outputs, and the pool with each live slot advanced once."""
    pool = given["state"]
    slot = in_range(given["state_ids"], pool.shape[0])
    none = jnp.full_like(slot, -1)
    work = Work(source=slot, count=(slot >= 0).astype(jnp.int32), target=slot, saved=none, after=none)
    rows = {name: given[name][:, None] for name in "qkv"}
    rows |= gated(spec, given["raw_g"][:, None], given["raw_beta"][:, None], given)
    found, pool = recurrence.advance(spec, work, rows, pool, mode, results=("out",))
    return found["out"][:, 0], pool


def gated(spec: KDASpec, g: Array, raw_beta: Array, given: Given) -> dict[str, Array]:
    """Return what a kernel makes gates of: ``g [N, Q, H, K]``, beta ``[N, Q, H, 1]``, and a raw gate's parameters."""
    finished = gates.beta(spec, raw_beta)[..., None]
    parameters = gates.parameters(spec, given.get("A_log"), given.get("dt_bias"))
    return {"g": g, "beta": finished, **parameters}


def kda_prefill(spec: KDASpec, given: Given, mode: Mode) -> tuple[Array, Array]:
    """Return the rows' outputs, and the pool with each sequence's last state and checkpoint."""
    pool, rows = given["state"], given["q"].shape[0]
    if not given["state_ids"].shape[0]:
        return jnp.zeros_like(given["v"]), pool
    runs = Sequences.cut(given["cu_seqlens"], given["state_ids"], rows, pool.shape[0])
    saved, after = runs.stops(pool.shape[0], given.get("checkpoint_ids"), given.get("checkpoint_offsets"))
    layout = Layout.of(runs, after)
    fresh = 1 - given["has_initial_state"] if "has_initial_state" in given else jnp.zeros_like(runs.slot)
    picked, work = layout.work(runs, fresh != 0, saved, rows, spec.checkpoints)
    names = {"q": "q", "k": "k", "v": "v", "g": "raw_g"}
    operands = {new: given[name][picked].transpose(2, 0, 1, 3) for new, name in names.items()}
    operands["beta"] = gates.beta(spec, given["raw_beta"])[picked].transpose(2, 0, 1)[:, :, None]
    parameters = gates.parameters(spec, given.get("A_log"), given.get("dt_bias"))
    operands |= {name: value[:, None] for name, value in parameters.items()}
    out, pool = chunks.advance(spec, work, operands, pool, mode)
    owner, place, live = runs.owners(rows)
    found = out[:, *layout.of_rows(owner, place)].swapaxes(0, 1)
    return jnp.where(live[:, None, None], found, 0), pool


def kda_verify(spec: KDASpec, given: Given, mode: Mode) -> tuple[Array, Array]:
    """Return the outputs of speculated rows, and the records from which a commit decodes them again."""
    x, pool, records = given["x"], given["state"], given["records"]
    rows, room = x.shape[0], records.shape[1] // row_bytes(spec)
    if not given["state_ids"].shape[0]:
        return jnp.zeros((rows, spec.num_heads, spec.head_dim), x.dtype), records
    runs = Sequences.cut(given["cu_seqlens"], given["state_ids"], rows, pool.shape[0])
    picked = jnp.clip(runs.start[:, None] + jnp.arange(room, dtype=jnp.int32), 0, rows - 1)
    count, none = jnp.minimum(runs.length, room), jnp.full_like(runs.slot, -1)
    work = Work(jnp.where(count > 0, runs.slot, -1), count, target=none, saved=none, after=none)
    g, raw_beta = given["raw_g"][picked], given["raw_beta"][picked]
    past = history(spec, given["conv_state"], runs.slot)
    operands = convolved(spec, past, x[picked], given["weight"]) | gated(spec, g, raw_beta, given)
    found, _ = recurrence.advance(spec, work, operands, pool, mode, results=("out", "k", "v"), stores=False)
    packed = packed_records(records, found["k"], found["v"], g, raw_beta, x[picked])
    owner, place, live = runs.owners(rows)
    out = found["out"][owner, jnp.clip(place, 0, room - 1)]
    return jnp.where(live[:, None, None], out, 0), packed


def convolved(spec: KDASpec, past: Array, x: Array, weight: Array) -> dict[str, Array]:
    """Return what a kernel convolves: inputs ``[N, 3 + Q, 3, H, D]`` and taps ``[4, 3, H, D]`` float32."""
    parts = (3, spec.num_heads, spec.head_dim)
    inputs = jnp.concatenate([past, x], axis=1)
    return {
        "x": inputs.reshape(*inputs.shape[:2], *parts),
        "weight": weight.astype(jnp.float32).T.reshape(-1, *parts),
    }


def by_width(spec: KDASpec, conv_state: Array) -> Array:
    """Turn a conv state to ``[slots, 3, C]``, or back."""
    return conv_state if spec.conv_layout == "width_channel" else conv_state.swapaxes(1, 2)


def history(spec: KDASpec, conv_state: Array, slot: Array) -> Array:
    """Return the inputs before each sequence, ``[N, 3, C]``, zero where it is padding."""
    found = by_width(spec, conv_state)[jnp.maximum(slot, 0)]
    return jnp.where((slot >= 0)[:, None, None], found, 0)


def row_bytes(spec: KDASpec) -> int:
    """Return the record bytes of one verified row: k, v, the gate and beta as given, and the raw inputs."""
    return sum(jnp.dtype(kind).itemsize * math.prod(shape) for kind, shape in record_fields(spec))


def record_fields(spec: KDASpec) -> list[tuple[str, tuple[int, ...]]]:
    """Return what a verified row leaves for its commit."""
    heads = (spec.num_heads, spec.head_dim)
    inputs = ("bfloat16", (spec.channels,))
    return [
        ("bfloat16", heads),
        ("bfloat16", heads),
        (spec.gate_dtype, heads),
        (spec.gate_dtype, heads[:1]),
        inputs,
    ]


def packed_records(records: Array, *fields: Array) -> Array:
    """Return the records with the fields ``[N, Q, …]`` of N sequences as bytes, one field behind the other."""
    count = min(fields[0].shape[0], records.shape[0])
    found = [jax.lax.bitcast_convert_type(field[:count], jnp.uint8).reshape(count, -1) for field in fields]
    whole = jnp.concatenate(found, axis=1)
    return records.at[:count, : whole.shape[1]].set(whole)


def unpacked(spec: KDASpec, records: Array) -> list[Array]:
    """Return k, v, gate, beta and raw inputs of records, ``[N, Q, …]``."""
    count, room, at, found = records.shape[0], records.shape[1] // row_bytes(spec), 0, []
    for kind, shape in record_fields(spec):
        size = jnp.dtype(kind).itemsize
        end = at + room * size * math.prod(shape)
        data = records[:, at:end].reshape(count, room, *shape, size)
        found.append(jax.lax.bitcast_convert_type(data, jnp.dtype(kind)))
        at = end
    return found


def kda_commit(spec: KDASpec, given: Given, mode: Mode) -> list[Array]:
    """Return the conv states of all layers, then their states, advanced by the accepted rows."""
    if not given["state_ids"].shape[0]:
        return [*given["conv_states"], *given["states"]]
    layers = [_commit(spec, given, layer, mode) for layer in range(spec.num_layers)]
    return [conv for conv, _ in layers] + [state for _, state in layers]


def _commit(spec: KDASpec, given: Given, layer: int, mode: Mode) -> tuple[Array, Array]:
    pool, conv = given["states"][layer], given["conv_states"][layer]
    ids, records = given["state_ids"], given["records"][layer]
    missing = max(0, ids.shape[0] - records.shape[0])  # N is padded, a buffer of the caller's is not
    k, v, g, raw_beta, x = unpacked(spec, jnp.pad(records, ((0, missing), (0, 0)))[: ids.shape[0]])
    slot = in_range(ids, pool.shape[0])
    accepted = jnp.where(slot >= 0, jnp.clip(given["accepted"], 0, x.shape[1]), 0)
    work = committed(spec, given, slot, accepted, pool.shape[0])
    names = {"A_log": "A_logs", "dt_bias": "dt_biases"}
    parameters = {name: given[many][layer] for name, many in names.items() if many in given}
    rows = {"k": k, "v": v, **gated(spec, g, raw_beta, parameters)}
    _, pool = recurrence.advance(spec, work, rows, pool, mode)
    joined = jnp.concatenate([history(spec, conv, slot), x], axis=1)
    wide = by_width(spec, conv)
    for target, count in ((work.target, accepted), (work.saved, work.after)):
        wide = put(wide, target, window(joined, count))
    return by_width(spec, wide), pool


def committed(spec: KDASpec, given: Given, slot: Array, accepted: Array, slots: int) -> Work:
    """Return the work of a commit; nothing where no row was accepted."""
    source = jnp.where(accepted > 0, slot, -1)
    target = in_range(given.get("out_ids", given["state_ids"]), slots)
    none = jnp.full_like(slot, -1)
    work = Work(source, accepted, jnp.where(accepted > 0, target, -1), saved=none, after=none)
    if not spec.checkpoints:
        return work
    count = given["checkpoint_lens"]
    ids = in_range(given["checkpoint_ids"], slots)
    stored = (accepted > 0) & (count >= 0) & (count <= accepted) & (ids >= 0)
    return work._replace(saved=jnp.where(stored, ids, -1), after=jnp.where(stored, count, -1))


def window(inputs: Array, count: Array) -> Array:
    """Return the 3 inputs before place ``count`` of sequences ``[N, 3 + Q, C]`` whose first 3 are their past."""
    place = jnp.maximum(count, 0)[:, None] + jnp.arange(3, dtype=jnp.int32)
    return jnp.take_along_axis(inputs, place[..., None], axis=1)
