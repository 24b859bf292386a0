"""Kimi Delta Attention in plain torch: the meaning of ``ops/kda.py``, in float32 or float64.

One definition, the token recurrence: a prefill in one call, in chunks and row by row, a decode, and a
verify with its commit give the same bits in float32, whatever else stands in the call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kimi_hal.errors import ContractError
from kimi_hal.ops.kda import KDASpec
from kimi_hal.reference import recurrence
from kimi_hal.reference.convolution import Inputs, convolve, history, store
from kimi_hal.reference.pointwise import sigmoid, tree_sum
from kimi_hal.reference.records import Records, room
from kimi_hal.reference.recurrence import Tokens, load, save, together, walk
from kimi_hal.reference.sequences import Sequences, in_range
from kimi_hal.reference.sizes import records_bytes

#: Elements of a gate finished at once.
ELEMENTS = 1 << 24


def kda_conv(
    spec: KDASpec,
    x: Tensor,
    weight: Tensor,
    conv_state: Tensor,
    state_ids: Tensor,
    cu_seqlens: Tensor,
    has_initial_state: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    checkpoint_ids: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Convolve, then store the last inputs of each sequence; stored inputs keep their bits."""
    slots = conv_state.shape[0]
    runs = Sequences.cut(cu_seqlens, state_ids, x.shape[0], slots)
    fresh = None if has_initial_state is None else ~has_initial_state
    inputs = Inputs(x, history(spec, conv_state, runs.slot, fresh), runs)
    y = convolve(spec, inputs, weight, dtype)
    saved, count = runs.stops(slots, checkpoint_ids, checkpoint_offsets)
    for slot, end in ((runs.slot.where(runs.length > 0, -1), runs.length), (saved, count)):
        kept = (slot >= 0).nonzero().flatten()
        store(spec, conv_state, slot[kept], inputs.window(kept, end[kept]))
    return y


def kda_gate(
    spec: KDASpec,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Finish gates some rows at a time."""
    g = raw_g.new_empty(raw_g.shape, dtype=dtype)
    step = max(1, ELEMENTS // (spec.num_heads * spec.head_dim))
    for first in range(0, raw_g.shape[0], step):
        some = slice(first, first + step)
        g[some] = recurrence.gate(spec, raw_g[some], A_log, dt_bias, dtype)
    return g, sigmoid(raw_beta.to(dtype))


def kda_prefill(
    spec: KDASpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    state: Tensor,
    state_ids: Tensor,
    cu_seqlens: Tensor,
    has_initial_state: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    checkpoint_ids: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Run the recurrence over sequences of similar lengths together; states are rounded once, when stored."""
    slots = state.shape[0]
    runs = Sequences.cut(cu_seqlens, state_ids, q.shape[0], slots)
    tokens = Tokens(spec, q, k, v, raw_g, raw_beta, A_log, dt_bias)
    fresh = None if has_initial_state is None else ~has_initial_state
    stops = runs.stops(slots, checkpoint_ids, checkpoint_offsets)
    return _advance(tokens, runs, state, fresh, stops, dtype)


def _advance(
    tokens: Tokens,
    runs: Sequences,
    state: Tensor,
    fresh: Tensor | None,
    stops: tuple[Tensor, Tensor],
    dtype: torch.dtype,
) -> Tensor:
    """Advance every sequence in its slot; returns ``o [T, H, V]``, zero in rows of no sequence."""
    o = tokens.v.new_zeros(tokens.v.shape, dtype=dtype)
    for part in runs.batches(together(state)):
        start, length, slot = runs.start[part], runs.length[part], runs.slot[part]
        saved, count = stops[0][part], stops[1][part]
        due = set(count.tolist())
        states = load(state, slot, dtype, None if fresh is None else fresh[part])
        if 0 in due:
            save(state, saved.where(count == 0, -1), states)
        for t, live, _, out in walk(tokens, start, length, states, dtype):
            o[start[:live] + t] = out
            if t + 1 in due:
                save(state, saved.where(count == t + 1, -1), states)
        save(state, slot.where(length > 0, -1), states)
    return o


def kda_decode(
    spec: KDASpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    state: Tensor,
    state_ids: Tensor,
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Advance T sequences of one row each."""
    tokens = Tokens(spec, q, k, v, raw_g, raw_beta, A_log, dt_bias)
    runs = Sequences.single(state_ids, state.shape[0])
    return _advance(tokens, runs, state, None, runs.stops(0, None, None), dtype)


def kda_verify(
    spec: KDASpec,
    x: Tensor,
    weight: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    conv_state: Tensor,
    state: Tensor,
    state_ids: Tensor,
    cu_seqlens: Tensor,
    records: Tensor,
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Convolve and run the recurrence on copies of the states; records u in ``dtype``, k, g and x as given.

    Raises:
        ContractError: ``records`` has no room for the rows of a sequence.
    """
    runs = Sequences.cut(cu_seqlens, state_ids, x.shape[0], state.shape[0])
    _check_room(spec, records, runs, dtype)
    y = convolve(spec, Inputs(x, history(spec, conv_state, runs.slot), runs), weight, dtype)
    # kda_conv's output is bf16, and this operator is kda_conv and then kda_decode.
    q, k, v = y.to(torch.bfloat16).view(-1, 3, spec.num_heads, spec.head_dim).unbind(1)
    tokens = Tokens(spec, q, k, v, raw_g, raw_beta, A_log, dt_bias)
    o = v.new_zeros(v.shape, dtype=dtype)
    for part in runs.batches(together(state)):
        start, length = runs.start[part], runs.length[part]
        states = load(state, runs.slot[part], dtype)
        u = states.new_zeros((len(part), spec.num_heads, room(spec, records, dtype), spec.head_dim))
        for t, live, step_u, out in walk(tokens, start, length, states, dtype):
            o[start[:live] + t] = out
            u[:live, :, t] = step_u
        _recorded(tokens, x, u, start, length).write(records, part)
    return o


def _check_room(spec: KDASpec, records: Tensor, runs: Sequences, dtype: torch.dtype) -> None:
    longest = int(runs.length.max()) if len(runs.length) else 0
    if longest > room(spec, records, dtype):
        needed = records_bytes(spec, longest, dtype.itemsize)
        reason = f"records has {records.shape[1]} bytes a sequence, {longest} rows need {needed}"
        raise ContractError("kda_verify", [reason])


def _recorded(tokens: Tokens, x: Tensor, u: Tensor, start: Tensor, length: Tensor) -> Records:
    """Gather what was computed with into records; rows that a sequence does not have are zero."""
    place = torch.arange(u.shape[2], device=start.device)
    inside = place < length[:, None]
    rows = torch.where(inside, start[:, None] + place, 0)

    def gathered(operand: Tensor) -> Tensor:
        found = operand.new_zeros((*rows.shape, *operand.shape[1:]))
        found[inside] = operand[rows[inside]]
        return found

    k, g = (gathered(operand).transpose(1, 2) for operand in (tokens.k, tokens.raw_g))
    return Records(u, k, g, gathered(x))


def kda_commit(
    spec: KDASpec,
    conv_states: Sequence[Tensor],
    states: Sequence[Tensor],
    records: Sequence[Tensor],
    A_logs: Sequence[Tensor] | None,
    dt_biases: Sequence[Tensor] | None,
    state_ids: Tensor,
    accepted: Tensor,
    out_ids: Tensor | None = None,
    checkpoint_ids: Tensor | None = None,
    checkpoint_lens: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Repeat the state updates of the accepted rows from the records, with the operations of a decode."""
    for layer in range(spec.num_layers):
        state, buffer = states[layer], records[layer]
        slots = state.shape[0]
        slot = in_range(state_ids, slots).where(accepted > 0, -1)
        length = accepted.long().clamp(0, room(spec, buffer, dtype)).where(slot >= 0, 0)
        runs = Sequences(torch.zeros_like(length), length, slot)
        target = slot if out_ids is None else in_range(out_ids, slots).where(slot >= 0, -1)
        saved, count = runs.stops(slots, checkpoint_ids, checkpoint_lens)
        gate = (None, None) if A_logs is None or dt_biases is None else (A_logs[layer], dt_biases[layer])
        for part in runs.batches(together(state)):
            found = Records.read(spec, buffer, part, dtype)
            ends = ((saved[part], count[part]), (target[part], length[part]))
            _commit_inputs(spec, conv_states[layer], slot[part], found.x, ends)
            _commit_states(spec, state, slot[part], found, gate, ends, dtype)


Ends = tuple[tuple[Tensor, Tensor], ...]


def _commit_inputs(spec: KDASpec, conv_state: Tensor, slot: Tensor, x: Tensor, ends: Ends) -> None:
    """Store the conv state after ``count`` recorded inputs, for each (slot, count) of ``ends``."""
    past = history(spec, conv_state, slot)
    joined = torch.cat([past, x.to(past.dtype)], dim=1)
    back = torch.arange(past.shape[1], device=slot.device)
    for target, count in ends:
        window = joined[
            torch.arange(len(slot), device=slot.device)[:, None], count.clamp(min=0)[:, None] + back
        ]
        store(spec, conv_state, target, window)


def _commit_states(
    spec: KDASpec,
    state: Tensor,
    slot: Tensor,
    found: Records,
    gate: tuple[Tensor | None, Tensor | None],
    ends: Ends,
    dtype: torch.dtype,
) -> None:
    """Replay recorded corrections; store the state after ``count`` rows, for each (slot, count)."""
    states = load(state, slot, dtype)
    # Gates are [n, H, Q, K] in the records; their parameters belong to H, which must stand before K.
    fade = recurrence.decay(spec, found.g.transpose(1, 2), *gate, dtype).transpose(1, 2)
    (saved, count), (target, length) = ends
    due = set(count.tolist())
    if 0 in due:
        save(state, saved.where(count == 0, -1), states)
    for t, _ in recurrence.replay(recurrence.key(spec, found.k, dtype), fade, found.u, length, states):
        if t + 1 in due:
            save(state, saved.where(count == t + 1, -1), states)
    save(state, target, states)


def gated_rms_norm(
    x: Tensor, weight: Tensor, gate: Tensor, eps: float, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return ``x · rsqrt(mean(x²) + eps) · weight · sigmoid(gate)`` over the last dimension, in ``dtype``.

    Args:
        x: ``[..., D]``.
        weight: ``[D]``.
        gate: ``[..., D]``, before its sigmoid.
        eps: added to the mean of squares.
        dtype: of the computation and of the result.

    Source: HF ``FusedRMSNormGated`` with ``activation="sigmoid"``.
    """
    wide = x.to(dtype)
    mean = tree_sum(wide * wide, -1) / x.shape[-1]
    return wide * torch.rsqrt(mean + eps)[..., None] * weight.to(dtype) * sigmoid(gate.to(dtype))
