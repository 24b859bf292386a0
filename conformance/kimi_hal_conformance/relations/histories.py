"""States: cut, gone on with token by token, and used again, a sequence has the one result."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from kimi_hal import ops
from kimi_hal_conformance.calls import Called
from kimi_hal_conformance.judging import objections
from kimi_hal_conformance.oracle import Question
from kimi_hal_conformance.relations import variants
from kimi_hal_conformance.relations.ground import Ground
from kimi_hal_conformance.relations.rows import carried, in_order, together
from kimi_hal_conformance.rig import OnePlan, Rig, with_operands
from kimi_hal_conformance.shrink import places


def chunks(ground: Ground) -> Iterator[str]:
    """Cut every sequence in two and go on from the state that the first part left: together they are the one call."""
    operands, name = ground.operands, ground.case.operator
    number = variants.count(name, operands)
    whole = with_operands(ground.question, variants.taken(name, operands, range(number)))
    ends, lengths = operands["cu_seqlens"].tolist(), operands["cu_seqlens"].diff()
    places = torch.arange(1, number + 1)
    cuts = torch.minimum((lengths * places // (number + 1)).clamp(min=1), lengths)
    plan = OnePlan.of(ground.subject)
    parts = [[*range(a, a + c)] for a, c in zip(ends, cuts.tolist(), strict=False)]
    rest = [[*range(a + c, b)] for a, b, c in zip(ends, ends[1:], cuts.tolist(), strict=False)]
    before = with_operands(whole, of_rows(name, operands, parts))
    first = Rig(before, plan).answer(before)
    if first.answer is None:
        yield from (f"in two chunks: {problem}" for problem in first.problems)
        return
    going_on = {"has_initial_state": torch.ones(number, dtype=torch.bool)}
    after = with_operands(whole, carried(of_rows(name, operands, rest), first) | going_on)
    joined = together(whole, [first, Rig(after, plan).answer(after)])
    if joined.answer is not None:
        joined = in_order(whole, joined, _back(parts + rest))
    yield from (f"in two chunks: {problem}" for problem in objections(whole, joined))


def continues(ground: Ground) -> bool:
    """Tell whether sequences can be gone on with, and no checkpoint is stored on the way."""
    ours = ground.case.operator in ("kda_conv", "kda_prefill")
    return (
        ours and ground.operands.get("checkpoint_ids") is None and int(ground.operands["cu_seqlens"][-1]) > 0
    )


def steps(ground: Ground) -> Iterator[str]:
    """Decode three tokens of every row one after another: together they are one prefill of three-token sequences."""
    tokens = [ground.operands, ground.other.operands, ground.operands]
    plan, state = OnePlan.of(ground.subject), ground.operands["state"]
    found: list[Called] = []
    for own in tokens:
        question = with_operands(ground.question, {**own, **_standing(ground), "state": state})
        found.append(Rig(question, plan).answer(question))
        if (answer := found[-1].answer) is None:
            yield from (f"token by token: {problem}" for problem in found[-1].problems)
            return
        state = answer.mutated["state"]
    whole, rows = _prefill(ground, tokens), ground.operands["q"].shape[0]
    by_token = torch.arange(len(tokens) * rows).view(len(tokens), rows).T.flatten().tolist()
    joined = in_order(whole, together(whole, found), by_token)
    yield from (f"token by token: {problem}" for problem in objections(whole, joined))


def reuse(ground: Ground) -> Iterator[str]:
    """Give every slot to another sequence that starts anew, over whatever the last one left: NaN here."""
    rig = Rig(ground.question, OnePlan.of(ground.subject))
    left = rig.answer(ground.question)
    pool = next(n for n in ("state", "conv_state") if n in ground.operands)
    state = ground.operands[pool].clone()
    ids = ground.operands["state_ids"]
    slots = ids[(ids >= 0) & (ids < state.shape[0])].unique().long()
    state[slots] = float("nan")
    new = {pool: state, "has_initial_state": torch.zeros(ids.numel(), dtype=torch.bool)}
    question = with_operands(ground.other, {**ground.other.operands, **new})
    told = [*left.problems, *objections(question, rig.answer(question))]
    yield from (f"a slot is used again: {problem}" for problem in told)


def starts_anew(ground: Ground) -> bool:
    """Tell whether the call says which sequences start anew, and stores no checkpoint."""
    given = ground.operands
    return given.get("has_initial_state") is not None and given.get("checkpoint_ids") is None


def of_rows(name: str, operands: Mapping[str, Any], rows: list[list[int]]) -> dict[str, Any]:
    """Return the operands of some rows of every sequence."""
    kept = dict(operands)
    chosen = [row for own in rows for row in own]
    for arg in (n for n, at in places(name).items() if "T" in at):
        if isinstance(operands.get(arg), Tensor):
            kept[arg] = operands[arg][chosen]
    kept["cu_seqlens"] = variants.ends_of(torch.tensor([len(own) for own in rows], dtype=torch.int32))
    return kept


def _back(rows: list[list[int]]) -> list[int]:
    """Return where each row of the whole call stands in the parts."""
    order = [row for own in rows for row in own]
    return torch.tensor(order, dtype=torch.int64).argsort().tolist()


def _standing(ground: Ground) -> dict[str, Any]:
    """Return what is a sequence's, and not a token's own."""
    return {name: ground.operands[name] for name in ("state_ids", "A_log", "dt_bias")}


def _prefill(ground: Ground, tokens: list[Mapping[str, Any]]) -> Question:
    """Return the call of ``kda_prefill`` over sequences that hold one row of each of these tokens."""
    rows = ground.operands["q"].shape[0]
    names = ("q", "k", "v", "raw_g", "raw_beta")
    per_token = {name: torch.stack([own[name] for own in tokens], dim=1).flatten(0, 1) for name in names}
    ends = torch.arange(rows + 1, dtype=torch.int32) * len(tokens)
    operands = per_token | _standing(ground) | {"state": ground.operands["state"], "cu_seqlens": ends}
    return dataclasses.replace(ground.question, op=ops.get("kda_prefill"), operands=operands)
