"""Results of calls without given buffers are the caller's to keep: no later call writes or hands them out again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kimi_hal import ops
from kimi_hal_conformance.calls import Called, Subject
from kimi_hal_conformance.case import Case, drawn, generator
from kimi_hal_conformance.forms import storage
from kimi_hal_conformance.oracle import Question
from kimi_hal_conformance.poison import same_bits
from kimi_hal_conformance.ranks import on_ranks, questions
from kimi_hal_conformance.relations import variants
from kimi_hal_conformance.relations.ground import UntriedError
from kimi_hal_conformance.rig import OnePlan, with_operands
from kimi_hal_conformance.scripts import call


@dataclass(frozen=True)
class Held:
    """The results of one call as it returned them, none of them freed, and what they held then."""

    results: Mapping[str, Tensor]
    values: Mapping[str, Tensor]

    @classmethod
    def of(cls, done: Called) -> Held:
        """Keep a call's own tensors, and copies of what is in them."""
        return cls(done.held, {name: out.to("cpu", copy=True) for name, out in done.held.items()})


def applies(case: Case) -> bool:
    """Tell whether the operator gives tensors."""
    op = ops.get(case.operator)
    return bool(op.outs or op.listed)


def problems(case: Case, subject: Subject, seed: int) -> Iterator[str]:
    """Call one plan for data A, B and A without given buffers, and look at what the earlier calls had returned.

    Raises:
        UntriedError: no result has an element, so nothing can be lost.
    """
    first = drawn(case, seed)
    other = later(case, first, seed)
    if case.ranks:
        theirs = [question.operands for question in questions(case, other)]
        found = on_ranks(questions(case, first), lambda q: _calls(q, theirs[q.group.rank()], subject))
    else:
        question = Question(ops.get(case.operator), case.spec, case.limits, first)
        found = [_calls(question, other, subject)]
    if not any(out.numel() for calls in found for held in calls for out in held.results.values()):
        raise UntriedError("no result has an element")
    for rank, calls in enumerate(found):
        which = f"rank {rank}: " if case.ranks else ""
        yield from (f"{which}{problem}" for problem in lost(calls))


def later(case: Case, first: Mapping[str, Any], seed: int) -> Mapping[str, Any]:
    """Return operands of another seed where they have the same shapes, else the same ones."""
    other = variants.with_weights_of(first, case.make(generator(case, seed + 1)))
    return other if variants.alike(first, other) else first


def _calls(question: Question, other: Mapping[str, Any], subject: Subject) -> list[Held]:
    """Make the calls, holding what each returns until the last is done."""
    plan = OnePlan.of(subject)
    return [
        Held.of(call(asked, plan, given=False))
        for asked in (question, with_operands(question, other), question)
    ]


def lost(calls: Sequence[Held]) -> Iterator[str]:
    """Yield which results were handed out again, else which hold other values now than when they were returned."""
    owners: dict[int, str] = {}
    shared = False
    for number, held in enumerate(calls, 1):
        for name, out in held.results.items():
            mine, home = f"{name} of call {number}", storage(out) if out.numel() else 0
            owner = owners.setdefault(home, mine) if home else mine
            if owner != mine and not owner.endswith(f" of call {number}"):
                shared = True
                yield f"without given buffers, {mine} is in the memory of {owner}, which its caller still holds"
    if shared:
        return
    for number, held in enumerate(calls, 1):
        for name, out in held.results.items():
            if not same_bits(out.cpu(), held.values[name]):
                yield f"{name} of call {number}, made without given buffers, was overwritten by a later call"
