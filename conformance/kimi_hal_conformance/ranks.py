"""A case on each rank of a loopback group: the calls, and who makes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from kimi_hal import ops
from kimi_hal.ops.spec import DCP, Record
from kimi_hal.parallel.groups import LoopbackGroup
from kimi_hal_conformance.case import Case
from kimi_hal_conformance.oracle import Answer, Question
from kimi_hal_conformance.poison import same_bits

#: Seconds that a rank of a loopback group may keep the others waiting; a case has a limit of its own.
RANK_TIMEOUT = 600.0
#: Operators whose results are complete on every rank, and the same: what adds up adds in rank order.
COMPLETE = ("moe_layer",)
T = TypeVar("T")


def questions(case: Case, operands: Mapping[str, Any]) -> list[Question]:
    """Return the call of each rank."""
    specs = case.rank_specs or [at_rank(case.spec, rank) for rank in range(case.ranks)]
    op = ops.get(case.operator)
    return [Question(op, spec, case.limits, own) for spec, own in zip(specs, operands["ranks"], strict=True)]


def on_ranks(questions: Sequence[Question], fn: Callable[[Question], T]) -> list[T]:
    """Do something with each rank's call, in a thread a rank of one group."""

    def one(group: LoopbackGroup) -> T:
        return fn(dataclasses.replace(questions[group.rank()], group=group))

    return LoopbackGroup.run(len(questions), one, timeout=RANK_TIMEOUT)


def differing(operator: str, answers: Sequence[Answer | None]) -> Iterator[str]:
    """Yield the ranks that have other bits than the first where the contract promises every rank the same."""
    first, *others = answers
    if operator not in COMPLETE or first is None:
        return
    for rank, other in enumerate(others, start=1):
        for name, tensor in other.outputs.items() if other else ():
            if not same_bits(tensor, first.outputs[name]):
                yield f"{name} of rank {rank} has other bits than that of rank 0"


def at_rank(spec: Any, rank: int) -> Any:
    """Return a Spec with the rank in every DCP inside it."""
    if isinstance(spec, DCP):
        return dataclasses.replace(spec, rank=rank)
    inside = {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec)}
    changed = {name: at_rank(value, rank) for name, value in inside.items() if isinstance(value, Record)}
    return dataclasses.replace(spec, **changed)
