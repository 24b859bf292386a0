"""Judge calls against the oracle."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kimi_hal_conformance.calls import Called
from kimi_hal_conformance.classes import derived
from kimi_hal_conformance.formulas import others
from kimi_hal_conformance.judges import judge
from kimi_hal_conformance.oracle import Answer, Question, answer
from kimi_hal_conformance.oracle_device import disagreement
from kimi_hal_conformance.poison import same_bits
from kimi_hal_conformance.roundings import inner
from kimi_hal_conformance.trial import PLAIN, Trial
from kimi_hal_conformance.verdict import Measure


def judged(question: Question, calls: Sequence[Called]) -> tuple[list[str], list[Measure]]:
    """Judge each call against the oracle; return all problems, and the measures of the first."""
    told = disagreement(question)
    exact, reference = (answer(question, dtype) for dtype in (torch.float64, torch.float32))
    rounded = inner(question)
    declared = next((done.declared for done in calls if done.answer is not None), PLAIN)
    classes = derived(question, declared.numerics)
    ways = others(question)
    problems = told
    kept: list[Measure] = []
    seen: list[Answer] = []
    for done in calls:
        problems += done.problems
        if done.answer is None or any(alike(done.answer, other) for other in seen):
            continue
        seen.append(done.answer)
        trial = Trial(question, done.answer, exact, reference, rounded, declared, classes, ways)
        measures = list(judge(question.op.name, declared)(trial))
        problems += [f"{m.tensor}: {m.problem}" for m in measures if m.problem]
        kept = kept or measures
    return list(dict.fromkeys(problems)), kept


def alike(one: Answer, other: Answer) -> bool:
    """Tell whether two answers have the same bits, so that one verdict holds for both."""
    pairs = ((one.outputs, other.outputs), (one.mutated, other.mutated))
    return all(
        mine.keys() == theirs.keys() and all(same_bits(mine[name], theirs[name]) for name in mine)
        for mine, theirs in pairs
    )


def objections(question: Question, done: Called) -> list[str]:
    """Return what is wrong with one call, its values included."""
    return judged(question, [done])[0]
