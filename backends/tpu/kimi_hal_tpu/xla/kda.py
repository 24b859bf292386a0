"""Kimi Delta Attention as traced programs: states are ``[…, H, V, K]``, as the pool holds them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kimi_hal.ops.kda import KDASpec
from kimi_hal.reference import recurrence
from kimi_hal.reference.pointwise import l2_normalized, sigmoid, silu
from kimi_hal_tpu.xla import order
from kimi_hal_tpu.xla.sequences import Sequences, in_range

Given = Mapping[str, Any]
F32 = torch.float32


def kda_gate(spec: KDASpec, given: Given) -> tuple[Tensor, Tensor]:
    """Return the natural-log decay and beta."""
    g = recurrence.gate(spec, given["raw_g"], given["A_log"], given["dt_bias"], F32)
    return g, sigmoid(given["raw_beta"].float())


def kda_conv(spec: KDASpec, given: Given) -> tuple[Tensor, Tensor]:
    """Return the convolved rows, and the conv state with the last inputs of each sequence."""
    x, pool = given["x"], by_width(spec, given["conv_state"])
    runs = Sequences.cut(given["cu_seqlens"], given["state_ids"], x.shape[0], pool.shape[0])
    past = history(pool, runs.slot, given.get("has_initial_state"))
    y = convolved(x, past, runs, given["weight"])
    pool = order.put(pool, torch.where(runs.length > 0, runs.slot, -1), window(x, past, runs, runs.length))
    saved, count = runs.stops(pool.shape[0], given.get("checkpoint_ids"), given.get("checkpoint_offsets"))
    if spec.checkpoints:
        pool = order.put(pool, saved, window(x, past, runs, count.clamp(min=0)))
    return y, by_width(spec, pool)


def by_width(spec: KDASpec, conv_state: Tensor) -> Tensor:
    """Turn a conv state to ``[slots, 3, C]``, or back."""
    return conv_state if spec.conv_layout == "width_channel" else conv_state.transpose(1, 2)


def history(pool: Tensor, slot: Tensor, has_initial_state: Tensor | None = None) -> Tensor:
    """Return the inputs before each sequence, ``[N, 3, C]``, zero where it starts anew or is padding."""
    kept = slot >= 0
    if has_initial_state is not None:
        kept = kept & has_initial_state.bool()
    return torch.where(kept[:, None, None], pool[slot.clamp(min=0)], 0.0).to(pool.dtype)


def convolved(x: Tensor, past: Tensor, runs: Sequences, weight: Tensor) -> Tensor:
    """Return ``SiLU(conv(x))`` in float32, zero in rows of no sequence."""
    total = torch.zeros_like(x, dtype=F32)
    taps = weight.float().unbind(1)
    row = torch.arange(x.shape[0], device=x.device)
    for j, tap in enumerate(taps):
        back = len(taps) - 1 - j
        place = runs.place - back
        before = past[runs.owner, (place + past.shape[1]).clamp(0, past.shape[1] - 1)]
        found = torch.where((place >= 0)[:, None], x[(row - back).clamp(min=0)], before.to(x.dtype))
        total = total + tap * found.float()
    return torch.where(runs.live[:, None], silu(total), 0.0)


def window(x: Tensor, past: Tensor, runs: Sequences, count: Tensor) -> Tensor:
    """Return the last 3 inputs before place ``count`` of each sequence, ``[N, 3, C]``."""
    width = past.shape[1]
    rows = []
    for back in range(width, 0, -1):
        place = count - back
        old = past.gather(1, (place + width).clamp(0, width - 1)[:, None, None].expand(-1, 1, past.shape[2]))[
            :, 0
        ]
        new = x[(runs.start + place).clamp(0, x.shape[0] - 1)]
        rows.append(torch.where((place >= 0)[:, None], new.to(past.dtype), old))
    return torch.stack(rows, dim=1)


@dataclass(frozen=True)
class Steps:
    """Operands of rows, ready for the recurrence, in float32: ``[…, H, ·]``, beta ``[…, H]``."""

    q: Tensor
    k: Tensor
    v: Tensor
    fade: Tensor
    beta: Tensor

    @classmethod
    def of(
        cls, spec: KDASpec, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Any, dt_bias: Any
    ) -> Steps:
        """Normalise q and k, finish gate and beta."""
        q, beta = q.float(), beta.float()
        q = (l2_normalized(q) if spec.qk_norm else q) * spec.scale
        beta = sigmoid(beta) if spec.gate == "raw" else beta
        fade = recurrence.decay(spec, g, A_log, dt_bias, F32)
        return cls(q, recurrence.key(spec, k, F32), v.float(), fade, beta)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the operands as a tuple."""
        return self.q, self.k, self.v, self.fade, self.beta


def step(
    states: Tensor, q: Tensor, k: Tensor, v: Tensor, fade: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Advance states ``[…, H, V, K]`` by one row each; returns them and the rows' outputs."""
    states = states * fade[..., None, :]
    u = beta[..., None] * (v - (states * k[..., None, :]).sum(dim=-1))
    states = states + u[..., None] * k[..., None, :]
    return states, (states * q[..., None, :]).sum(dim=-1)


def kda_decode(spec: KDASpec, given: Given) -> tuple[Tensor, Tensor]:
    """Return the rows' outputs, and the pool with each live slot advanced once."""
    pool = given["state"]
    slot = in_range(given["state_ids"], pool.shape[0])
    rows = operands(spec, given)
    states, out = step(pool[slot.clamp(min=0)], *rows.tensors())
    return torch.where((slot >= 0)[:, None, None], out, 0.0), order.put(pool, slot, states)


def operands(spec: KDASpec, given: Given) -> Steps:
    """Return a call's rows, ready for the recurrence."""
    names = ("q", "k", "v", "raw_g", "raw_beta")
    return Steps.of(spec, *(given[n] for n in names), given.get("A_log"), given.get("dt_bias"))


def kda_prefill(spec: KDASpec, given: Given) -> tuple[Tensor, Tensor]:
    """Return the rows' outputs, and the pool with each sequence's last state and checkpoint.

    One loop over the rows in order carries the state of the sequence at hand: a program of one step, whatever
    the number of rows.
    """
    from torch_xla.experimental.scan import scan

    pool, count = given["state"], given["q"].shape[0]
    runs = Sequences.cut(given["cu_seqlens"], given["state_ids"], count, pool.shape[0])
    starts = pool[runs.slot.clamp(min=0)]
    if given.get("has_initial_state") is not None:
        starts = torch.where(given["has_initial_state"].bool()[:, None, None, None], starts, 0.0)
    saved, after = runs.stops(pool.shape[0], given.get("checkpoint_ids"), given.get("checkpoint_offsets"))
    rows = operands(spec, given).tensors()
    first = (runs.place == 0).float()
    stop = (runs.live & (runs.place + 1 == after[runs.owner])).float()
    xs = (*rows, runs.owner, first, runs.live.float(), stop)

    def one(carry: tuple[Tensor, ...], row: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Tensor]:
        state, ends, marks = carry
        q, k, v, fade, beta, owner, begins, live, due = row
        state = torch.where(begins > 0, torch.index_select(ends, 0, owner.reshape(1))[0], state)
        new, out = step(state, q, k, v, fade, beta)
        state = torch.where(live > 0, new, state)
        mine = torch.arange(ends.shape[0], device=ends.device) == owner
        written = (mine & (live > 0))[:, None, None, None]
        ends = torch.where(written, state[None], ends)
        marks = torch.where(written & (due > 0), state[None], marks)
        return (state, ends, marks), torch.where(live > 0, out, 0.0)

    (_, ends, marks), out = scan(one, (torch.zeros_like(starts[0]), starts, starts), xs)
    pool = order.put(pool, torch.where(runs.length > 0, runs.slot, -1), ends)
    return out, order.put(pool, saved, marks) if spec.checkpoints else pool


def kda_verify(spec: KDASpec, given: Given) -> tuple[Tensor, Tensor]:
    """Return the outputs of speculated rows, and the records from which a commit decodes them again."""
    x, records = given["x"], given["records"]
    pool, conv = given["state"], by_width(spec, given["conv_state"])
    runs = Sequences.cut(given["cu_seqlens"], given["state_ids"], x.shape[0], pool.shape[0])
    y = convolved(x, history(conv, runs.slot), runs, given["weight"]).bfloat16()
    H, D = spec.num_heads, spec.head_dim
    q, k, v = (part.reshape(-1, H, D) for part in y.split(H * D, dim=1))
    rows = Steps.of(
        spec, q, k, v, given["raw_g"], given["raw_beta"], given.get("A_log"), given.get("dt_bias")
    )
    room = int(records.shape[1]) // row_bytes(spec)
    picked = (runs.start[:, None] + torch.arange(room, device=x.device)).clamp(0, x.shape[0] - 1)
    out = torch.zeros_like(rows.v)
    states = pool[runs.slot.clamp(min=0)]
    for t in range(room):
        states, o = step(states, *(operand[picked[:, t]] for operand in rows.tensors()))
        live = t < runs.length
        out = order.put(out, torch.where(live, picked[:, t], -1), o)
    fields = (k, v, given["raw_g"], given["raw_beta"], x)
    packed = [field[picked].flatten(1).view(torch.uint8) for field in fields]
    whole = torch.cat(packed, dim=1)
    count = whole.shape[0]
    written = torch.cat([whole[: records.shape[0]], records[:count, whole.shape[1] :]], dim=1)
    return out, torch.cat([written, records[count:]], dim=0)


def row_bytes(spec: KDASpec) -> int:
    """Return the record bytes of one verified row: k, v, the gate and beta as given, and the raw inputs."""
    return sum(kind.itemsize * math.prod(shape) for kind, shape in record_fields(spec))


def record_fields(spec: KDASpec) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """Return what a verified row leaves for its commit."""
    gate, heads = getattr(torch, spec.gate_dtype), (spec.num_heads, spec.head_dim)
    bf16 = torch.bfloat16
    return [(bf16, heads), (bf16, heads), (gate, heads), (gate, heads[:1]), (bf16, (spec.channels,))]


def kda_commit(spec: KDASpec, given: Given) -> list[Tensor]:
    """Return the conv states of all layers, then their states, advanced by the accepted rows."""
    layers = [_commit(spec, given, layer) for layer in range(spec.num_layers)]
    return [conv for conv, _ in layers] + [state for _, state in layers]


def _commit(spec: KDASpec, given: Given, layer: int) -> tuple[Tensor, Tensor]:
    pool, conv = given["states"][layer], by_width(spec, given["conv_states"][layer])
    slots = pool.shape[0]
    slot = in_range(given["state_ids"], slots)
    k, v, g, beta, x = unpacked(spec, given["records"][layer][: slot.shape[0]])
    room = x.shape[1]
    accepted = torch.where(slot >= 0, given["accepted"].long().clamp(0, room), 0)
    gates = [given[name][layer] if given.get(name) is not None else None for name in ("A_logs", "dt_biases")]
    rows = Steps.of(spec, k, k, v, g, beta, *gates)
    after, saved = checkpoints(spec, given, accepted, slots)
    states = pool[slot.clamp(min=0)]
    marks = states
    for t in range(room):
        new, _ = step(states, *(operand[:, t] for operand in rows.tensors()))
        states = torch.where((t < accepted)[:, None, None, None], new, states)
        marks = torch.where((t < after)[:, None, None, None], states, marks)
    target = torch.where(accepted > 0, in_range(given.get("out_ids", given["state_ids"]), slots), -1)
    past = history(conv, slot)
    conv_end, conv_mark = (record_window(x, past, count) for count in (accepted, after.clamp(min=0)))
    conv, pool = order.put(conv, target, conv_end), order.put(pool, target, states)
    if spec.checkpoints:
        conv, pool = order.put(conv, saved, conv_mark), order.put(pool, saved, marks)
    return by_width(spec, conv), pool


def checkpoints(spec: KDASpec, given: Given, accepted: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """Return after how many rows each checkpoint is taken, and its slot; −1 where there is none."""
    none = torch.full_like(accepted, -1)
    if not spec.checkpoints:
        return none, none
    count = given["checkpoint_lens"].long()
    stored = (accepted > 0) & (count >= 0) & (count <= accepted)
    return torch.where(stored, count, -1), torch.where(stored, in_range(given["checkpoint_ids"], slots), -1)


def unpacked(spec: KDASpec, records: Tensor) -> list[Tensor]:
    """Return k, v, gate, beta and raw inputs of records, ``[N, Q, …]``."""
    room, at, found = records.shape[1] // row_bytes(spec), 0, []
    for kind, shape in record_fields(spec):
        size = room * kind.itemsize * math.prod(shape)
        found.append(records[:, at : at + size].view(kind).reshape(records.shape[0], room, *shape))
        at += size
    return found


def record_window(x: Tensor, past: Tensor, count: Tensor) -> Tensor:
    """Return the last 3 inputs before place ``count`` of each record's rows ``[N, Q, C]``."""
    width, channels = past.shape[1], past.shape[2]
    everything = torch.cat([past.to(x.dtype), x], dim=1)
    place = count[:, None] + torch.arange(width, device=x.device)
    return everything.gather(1, place[..., None].expand(-1, -1, channels)).to(past.dtype)
