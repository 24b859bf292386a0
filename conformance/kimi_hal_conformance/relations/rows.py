"""Rows stand for themselves: in another order and in two calls each has its own result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from kimi_hal_conformance.calls import Called
from kimi_hal_conformance.judging import objections
from kimi_hal_conformance.oracle import Answer, Question
from kimi_hal_conformance.relations import variants
from kimi_hal_conformance.relations.ground import Ground, invariant, unequal
from kimi_hal_conformance.rig import SCORES, OnePlan, Rig, with_operands


def permutation(ground: Ground) -> Iterator[str]:
    """Last row or sequence first, last request first: every row's result goes with it."""
    question = ground.turned(ground.question)
    found = Rig(question, OnePlan.of(ground.subject)).answer(question)
    numbers = variants.order(variants.count(ground.case.operator, ground.operands))
    rows = variants.rows_of(ground.case.operator, ground.operands, numbers, tail=True)
    yield from _held(ground, question, found, rows, "the rows backwards")


def split(ground: Ground, at: int | None = None) -> Iterator[str]:
    """Half of the rows or sequences in one call, the rest in another: together they are the one call.

    With ``at`` so many of them stand in the first call.
    """
    number, name = variants.count(ground.case.operator, ground.operands), ground.case.operator
    whole = with_operands(ground.question, variants.taken(name, ground.operands, range(number)))
    at = number // 2 if at is None else at
    plan, parts, done = OnePlan.of(ground.subject), (range(at), range(at, number)), whole
    found: list[Called] = []
    for part in parts:
        question = with_operands(whole, variants.taken(name, done.operands, part))
        found.append(Rig(question, plan).answer(question))
        if found[-1].answer is None:
            yield from (f"the rows in two calls: {problem}" for problem in found[-1].problems)
            return
        done = with_operands(whole, carried(done.operands, found[-1]))
    rows = variants.rows_of(name, ground.operands, range(number))
    yield from _held(ground, whole, together(whole, found), rows, "the rows in two calls")


def rearranges(ground: Ground) -> bool:
    """Tell whether the call has rows that stand for themselves."""
    return ground.divisible and all("T" in out.shape.split() for out in ground.question.op.outs)


def carried(operands: Mapping[str, Any], after: Called) -> dict[str, Any]:
    """Return operands with the pools and caches as a call has left them."""
    kept = dict(operands)
    assert after.answer is not None
    for name, tensor in after.answer.mutated.items():
        base = name.partition("[")[0]
        base = base if base in kept else base.removesuffix("s")
        if base in kept:
            kept[base] = tensor
    return kept


def together(question: Question, parts: list[Called]) -> Called:
    """Return the results of calls over parts of the rows as those of one call."""
    answers = [part.answer for part in parts if part.answer is not None]
    at = rows_at(question)
    outputs = {
        name: torch.cat([a.outputs[name] for a in answers], dim=at[name]) for name in answers[0].outputs
    }
    problems = tuple(p for part in parts for p in part.problems)
    return Called(Answer(outputs, answers[-1].mutated), problems, parts[-1].declared)


def rows_at(question: Question) -> dict[str, int]:
    """Return which dimension of each output has the rows."""
    return {SCORES: 0, **{out.keyword: out.shape.split().index("T") for out in question.op.outs}}


def in_order(question: Question, found: Called, rows: list[int]) -> Called:
    """Return results with their rows in another order."""
    assert found.answer is not None
    index = torch.tensor(rows, dtype=torch.int64)
    at = rows_at(question)
    outputs = {name: out.index_select(at[name], index) for name, out in found.answer.outputs.items()}
    return Called(Answer(outputs, found.answer.mutated), found.problems, found.declared)


def _held(ground: Ground, question: Question, got: Called, rows: list[int], how: str) -> Iterator[str]:
    """Hold a rearranged call to the bits of the case's own rows if they are declared, else to the oracle."""
    if got.answer is None or got.problems:
        yield from (f"{how}: {problem}" for problem in got.problems)
    elif not invariant(ground):
        yield from (f"{how}: {problem}" for problem in objections(question, got))
    else:
        wanted = in_order(ground.question, ground.first, rows)
        names = unequal(got, wanted, question)
        yield from (f"declared batch_invariant, but with {how} {name} has other bits" for name in names)
