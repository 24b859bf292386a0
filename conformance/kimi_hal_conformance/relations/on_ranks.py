"""No call of a group may know of another: one plan on each rank, the same addresses, new data, other sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kimi_hal_conformance.calls import Called, Subject
from kimi_hal_conformance.case import Case, drawn
from kimi_hal_conformance.judging import objections
from kimi_hal_conformance.oracle import Question
from kimi_hal_conformance.ranks import on_ranks, questions
from kimi_hal_conformance.relations import variants
from kimi_hal_conformance.relations.ground import unequal
from kimi_hal_conformance.relations.lasting import later
from kimi_hal_conformance.relations.purity import BEFORE
from kimi_hal_conformance.rig import OnePlan, Rig, with_operands
from kimi_hal_conformance.scripts import call

NAME = "purity_on_ranks"
Answered = tuple[Question, Called, Called]


def applies(case: Case, seed: int) -> bool:
    """Tell whether a case has ranks, and rows on each that can be halved."""
    return bool(case.ranks) and all(half(q) is not None for q in questions(case, drawn(case, seed)))


def half(question: Question) -> dict[str, Any] | None:
    """Return the operands of the first half of a rank's rows; ``None`` where they cannot be cut."""
    operands, operator = dict(question.operands), question.op.name
    if operator != "all_gather":
        rows = variants.total(operator, operands)
        return variants.taken(operator, operands, range(rows // 2)) if _cut(rows, operands) else None
    spec: Any = question.spec
    run = spec.dcp.interleave  # of rows in token order a rank gives whole runs
    rows = operands["x"].shape[0] // (2 * run) * run
    return operands | {"x": operands["x"][:rows]} if rows and operands.get("total") is None else None


def _cut(rows: int, operands: Mapping[str, Any]) -> bool:
    return rows > 1 and "num_tokens" not in operands


def problems(case: Case, subject: Subject, seed: int) -> Iterator[str]:
    """Call one plan on each rank for sizes A, B, A, B, A, then for B, A without given buffers.

    Every call must be what it is in new memory by a new plan.

    All ranks make every call, whatever came of the one before on one of them: else the others would wait for it.
    """
    first = drawn(case, seed)
    others = [question.operands for question in questions(case, later(case, first, seed))]
    found = on_ranks(questions(case, first), lambda q: answered(q, others[q.group.rank()], subject))
    for number, calls in enumerate(zip(*found, strict=True), 1):
        after = f"call {number} of one plan on each rank, new data at the same addresses"
        told = [(rank, problem) for rank, one in enumerate(calls) for problem in one[1].problems]
        if not told and all(one[1].answer is not None for one in calls):
            told = list(_differing(calls))
        yield from (f"{after}: rank {rank}: {problem}" for rank, problem in told)
        if told:
            return


def answered(question: Question, other: Mapping[str, Any], subject: Subject) -> list[Answered]:
    """Return a rank's calls: each question, what one plan gave at used addresses, and a new one in new memory."""
    kept = variants.with_weights_of(question.operands, other)
    new = with_operands(question, variants.rescaled(question.operands, kept))
    small, small_new = (with_operands(q, half(q) or q.operands) for q in (question, new))
    plan = OnePlan.of(subject)
    large, little = Rig(question, plan), Rig(small, plan)
    rounds = ((large, question), (little, small), (large, new), (little, small_new), (large, question))
    answers = [(asked, rig.answer(asked, held)) for (rig, asked), held in zip(rounds, BEFORE, strict=True)]
    answers += [(asked, call(asked, plan, given=False)) for asked in (small, question)]
    return [(asked, got, call(asked, subject, given=True)) for asked, got in answers]


def _differing(calls: Sequence[Answered]) -> Iterator[tuple[int, str]]:
    """Yield what is not the same bits on which rank, or wrong where no bits are declared."""
    if calls[0][1].promised.deterministic:
        for rank, (question, got, wanted) in enumerate(calls):
            yield from (
                (rank, f"{name} has other bits than in new memory") for name in unequal(got, wanted, question)
            )
        return
    told = on_ranks([q for q, _, _ in calls], lambda q: list(objections(q, calls[q.group.rank()][1])))
    yield from ((rank, problem) for rank, own in enumerate(told) for problem in own)
