"""Checkpoints: a run that goes on from one has the bits of the run that stored it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_hal_conformance.calls import Called
from kimi_hal_conformance.oracle import Answer, Question
from kimi_hal_conformance.poison import same_bits
from kimi_hal_conformance.relations.ground import Ground, UntriedError
from kimi_hal_conformance.relations.histories import of_rows
from kimi_hal_conformance.relations.rows import carried, rows_at
from kimi_hal_conformance.rig import OnePlan, Rig, with_operands


@dataclass(frozen=True)
class Stored:
    """One sequence whose state was stored on the way: its slots, and its rows behind the checkpoint."""

    sequence: int
    own: int
    kept: int
    rows: range


def resumes(ground: Ground) -> bool:
    """Tell whether a call stores checkpoints from which the run goes on to the bit."""
    ours = ground.case.operator in ("kda_conv", "kda_prefill") and ground.promised.checkpoint_exact
    given = (ground.operands.get(name) for name in ("checkpoint_ids", "checkpoint_offsets"))
    return ours and all(value is not None for value in given)


def resumed(ground: Ground) -> Iterator[str]:
    """Go on from the checkpoints that a call has stored: the rows behind them, and the states, have that call's bits.

    Raises:
        UntriedError: no checkpoint is followed by a row of its sequence.
    """
    stored = list(_stored(ground))
    if not stored:
        raise UntriedError("no checkpoint is followed by a row of its sequence")
    plan = OnePlan.of(ground.subject)
    first = Rig(ground.question, plan).answer(ground.question)
    if first.answer is None or first.problems:
        yield from (f"a call with checkpoints: {problem}" for problem in first.problems)
        return
    rest = _from_there(ground, stored, first)
    second = Rig(rest, plan).answer(rest)
    if second.answer is None or second.problems:
        yield from (f"from a checkpoint: {problem}" for problem in second.problems)
        return
    for what in _unequal(ground, stored, first.answer, second.answer):
        yield f"declared checkpoint_exact, but {what} has other bits from a checkpoint on"


def _pool(ground: Ground) -> str:
    return "state" if "state" in ground.operands else "conv_state"


def _stored(ground: Ground) -> Iterator[Stored]:
    """Yield the live sequences whose checkpoint has rows behind it."""
    given = ground.operands
    room, ends = range(given[_pool(ground)].shape[0]), given["cu_seqlens"].tolist()
    names = ("state_ids", "checkpoint_ids", "checkpoint_offsets")
    for n, (own, kept, before) in enumerate(zip(*(given[name].tolist() for name in names), strict=True)):
        rows = range(ends[n] + before, ends[n + 1])
        if own in room and kept in room and before >= 0 and rows:
            yield Stored(n, own, kept, rows)


def _from_there(ground: Ground, stored: list[Stored], first: Called) -> Question:
    """Return the call of the rows behind the checkpoints, which stores none."""
    numbers = {
        "state_ids": [s.kept for s in stored],
        "checkpoint_ids": [-1] * len(stored),
        "checkpoint_offsets": [0] * len(stored),
    }
    theirs: dict[str, Tensor] = {n: torch.tensor(value, dtype=torch.int32) for n, value in numbers.items()}
    theirs["has_initial_state"] = torch.ones(len(stored), dtype=torch.bool)
    rows = of_rows(ground.case.operator, ground.operands, [[*s.rows] for s in stored])
    return with_operands(ground.question, carried(rows, first) | theirs)


def _unequal(ground: Ground, stored: list[Stored], first: Answer, second: Answer) -> Iterator[str]:
    """Yield which rows, or states, of the two calls are not the same bits."""
    index = torch.tensor([row for s in stored for row in s.rows])
    for name, at in rows_at(ground.question).items():
        if name in first.outputs:
            rows = first.outputs[name].index_select(at, index)
            if not same_bits(rows.contiguous(), second.outputs[name].contiguous()):
                yield name
    pool = _pool(ground)
    for s in stored:
        states = first.mutated[pool][s.own], second.mutated[pool][s.kept]
        if not same_bits(*(state.contiguous() for state in states)):
            yield f"{pool} of sequence {s.sequence}"
