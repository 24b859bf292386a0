"""A recurrent state in bfloat16, and chunk products in bfloat16, in every operator that runs the recurrence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kimi_hal.ops.kda import KDASpec
from kimi_hal.reference import composites, kda
from kimi_hal.reference.recurrence import Tokens, load, save, together, walk
from kimi_hal.reference.sequences import Sequences
from kimi_hal_conformance.classes import chunked
from kimi_hal_conformance.oracle import (
    Answer,
    Question,
    buffers,
    committed,
    copied,
    reference_weights,
)

F64 = torch.float64
#: ``kda_prefill`` with the roundings of a class.
Prefill = Callable[..., Tensor]


def bf16(x: Tensor) -> Tensor:
    """Round to bfloat16."""
    return x.to(torch.bfloat16).to(x.dtype)


def rounded_state(
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
    dtype: torch.dtype = F64,
) -> Tensor:
    """Run the recurrence with its state rounded when it is read and after each token."""
    tokens = Tokens(spec, q, k, v, raw_g, raw_beta, A_log, dt_bias)
    runs = Sequences.cut(cu_seqlens, state_ids, tokens.q.shape[0], state.shape[0])
    saved, count = runs.stops(state.shape[0], checkpoint_ids, checkpoint_offsets)
    o = tokens.v.new_zeros(tokens.v.shape, dtype=dtype)
    for part in runs.batches(together(state)):
        fresh = None if has_initial_state is None else ~has_initial_state[part]
        states = bf16(load(state, runs.slot[part], dtype, fresh))
        start, length, due = runs.start[part], runs.length[part], count[part]
        save(state, saved[part].where(due == 0, -1), states)
        for t, live, _, out in walk(tokens, start, length, states, dtype):
            o[start[:live] + t] = out
            states[:live] = bf16(states[:live])
            save(state, saved[part].where(due == t + 1, -1), states)
        save(state, runs.slot[part].where(length > 0, -1), states)
    return o


rounded_chunks: Prefill = partial(chunked.kda_prefill, dtype=F64, narrow=bf16)


def of(prefill: Prefill, dtype: torch.dtype = F64) -> Mapping[str, Callable[[Question], Sequence[Answer]]]:
    """Return the derivations of a class that rounds inside the recurrence, whose buffers are in ``dtype``."""
    if dtype != F64:
        return {"kda_prefill": lambda question: [_prefill(question, prefill, dtype)]}
    return {name: partial(_once, derive, prefill) for name, derive in DERIVED.items()}


def _once(
    derive: Callable[[Question, Prefill], Answer], prefill: Prefill, question: Question
) -> Sequence[Answer]:
    return [derive(question, prefill)]


def _prefill(question: Question, prefill: Prefill, dtype: torch.dtype = F64) -> Answer:
    spec: Any = question.spec
    operands = copied(question, dtype)
    out = prefill(spec, **operands)
    return Answer({"out": out}, buffers(question.op.mutated, operands))


def _decode(question: Question, prefill: Prefill) -> Answer:
    spec: Any = question.spec
    operands = copied(question, F64)
    out = prefill(spec, **operands, **{"cu_seqlens": _single(operands["state_ids"])})
    return Answer({"out": out}, buffers(question.op.mutated, operands))


def _single(state_ids: Tensor) -> Tensor:
    """Return the offsets of sequences of one row each."""
    return torch.arange(state_ids.numel() + 1, dtype=torch.int32)


def _verify(question: Question, prefill: Prefill) -> Answer:
    spec: Any = question.spec
    given = question.operands
    shared = {name: given[name] for name in ("state_ids", "cu_seqlens")}
    y = kda.kda_conv(spec, given["x"], given["weight"], given["conv_state"].clone(), **shared, dtype=F64)
    q, k, v = y.bfloat16().view(-1, 3, spec.num_heads, spec.head_dim).unbind(1)
    gate = {name: given.get(name) for name in ("raw_g", "raw_beta", "A_log", "dt_bias")}
    state = given["state"].to(F64, copy=True)
    return Answer({"out": prefill(spec, q=q, k=k, v=v, **gate, state=state, **shared)}, {})


def _commit(question: Question, prefill: Prefill) -> Answer:
    return committed(question, F64, prefill)


def _layer(question: Question, prefill: Prefill) -> Answer:
    spec: Any = question.spec
    parts = dict(composites.reference_parts("kda_layer_decode", spec, F64))

    def decode(*operands: Tensor) -> Tensor:
        return prefill(spec, *operands, _single(operands[-1]))

    parts["kda_decode"] = decode
    operands = copied(question, F64) | {"weights": reference_weights(question)}
    body = composites.compose_kda_layer_decode(spec, parts, F64)
    return Answer({"out": body(**operands)}, buffers(question.op.mutated, operands))


DERIVED: Mapping[str, Callable[[Question, Prefill], Answer]] = {
    "kda_prefill": _prefill,
    "kda_decode": _decode,
    "kda_verify": _verify,
    "kda_commit": _commit,
    "kda_layer_decode": _layer,
}
