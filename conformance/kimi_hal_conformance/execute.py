"""Run one case on one implementation, in this process, and judge it."""

from __future__ import annotations

import dataclasses
import time
import traceback
from collections.abc import Sequence
from typing import Any

import torch

from kimi_hal import ops
from kimi_hal.errors import SelectionError
from kimi_hal.ops.spec import DCP, Record
from kimi_hal.parallel.groups import LoopbackGroup
from kimi_hal_conformance.calls import Called, Subject
from kimi_hal_conformance.case import Case, generator
from kimi_hal_conformance.judges import judge
from kimi_hal_conformance.levels import REPRODUCIBLE, of
from kimi_hal_conformance.oracle import Question, answer
from kimi_hal_conformance.promises import Kept, kept
from kimi_hal_conformance.roundings import inner
from kimi_hal_conformance.scripts import call
from kimi_hal_conformance.sparse import CannotTryError
from kimi_hal_conformance.trial import Trial
from kimi_hal_conformance.verdict import FAILED, NOT_RUN, PASSED, REFUSED, Measure, Verdict

#: Seconds that a rank of a loopback group may keep the others waiting; a case has a limit of its own.
RANK_TIMEOUT = 600.0


def run_case(case: Case, subject: Subject, seed: int, repeats: int = 0) -> Verdict:
    """Plan, run between canaries, then ask the oracle; return the verdict. Exceptions become verdicts.

    What is right is called ``repeats`` times more where determinism is declared: ``promises.py``.
    """
    start = time.perf_counter()
    measures: Sequence[Measure] = ()
    output, level, promises = "", of(case), Kept()
    try:
        problems, measures = try_case(case, subject, seed)
        if not problems:
            promises = kept(case, subject, seed, repeats)
            problems = list(promises.problems)
            level = REPRODUCIBLE if problems else level
        status = FAILED if problems else PASSED
    except KeyboardInterrupt:
        raise
    except CannotTryError as error:  # before anything was called
        status, problems = NOT_RUN, [str(error)]
    except BaseException as error:  # whatever a vendor's kernel raises, SystemExit too, is its verdict
        refusal = refused(error, subject.implementation)
        status = REFUSED if refusal else FAILED
        problems = list(refusal) or [described(error)]
        output = "" if refusal else "".join(traceback.format_exception(error))
    return Verdict(
        case=case.id,
        operator=case.operator,
        implementation=subject.implementation,
        status=status,
        problems=tuple(problems),
        measures=tuple(measures),
        seconds=time.perf_counter() - start,
        seed=seed,
        fault=case.fault,
        output=output,
        level=level,
        promises=promises.tried,
    )


def refused(error: BaseException, implementation: str) -> tuple[str, ...]:
    """Return the reasons why an implementation does not claim a Spec; empty if the error is another.

    A rank's error stands behind the group's, and that of a composite's part behind the composite's.
    """
    inmost = error
    while inmost.__cause__ is not None:
        inmost = inmost.__cause__
    if not isinstance(inmost, SelectionError):
        return ()
    backend = implementation.partition(".")[0]
    mine = {name: why for name, why in inmost.refusals.items() if name.partition(".")[0] == backend}
    return tuple(f"{name}: {reason}" for name, reasons in mine.items() for reason in reasons)


def described(error: BaseException) -> str:
    """Say what was raised, and by which rank's own error where ranks meet."""
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    cause = error.__cause__
    return f"{text} (from {described(cause)})" if cause and str(cause) not in text else text


def try_case(case: Case, subject: Subject, seed: int) -> tuple[list[str], list[Measure]]:
    """Return the problems and measures of a case on one rank, or on each rank of a loopback group.

    Every rank has run before any asks the oracle: freed memory cannot hold the answer.
    """
    operands = case.make(generator(case, seed))
    op = ops.get(case.operator)
    if not case.ranks:
        question = Question(op, case.spec, case.limits, operands, sparse=case.sparse)
        return judged(question, called(question, subject))
    specs = case.rank_specs or [at_rank(case.spec, rank) for rank in range(case.ranks)]
    given = operands["ranks"]
    questions = [Question(op, spec, case.limits, own) for spec, own in zip(specs, given, strict=True)]
    calls = _on_ranks(questions, lambda q: called(q, subject))
    found = _on_ranks(questions, lambda q: judged(q, calls[q.group.rank()]))
    problems = [f"rank {rank}: {p}" for rank, (problems, _) in enumerate(found) for p in problems]
    return problems, [measure for _, measures in found for measure in measures]


def _on_ranks(questions: Sequence[Question], fn: Any) -> list[Any]:
    def one(group: LoopbackGroup) -> Any:
        return fn(dataclasses.replace(questions[group.rank()], group=group))

    return LoopbackGroup.run(len(questions), one, timeout=RANK_TIMEOUT)


def at_rank(spec: Any, rank: int) -> Any:
    """Return a Spec with the rank in every DCP inside it."""
    if isinstance(spec, DCP):
        return dataclasses.replace(spec, rank=rank)
    inside = {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec)}
    changed = {name: at_rank(value, rank) for name, value in inside.items() if isinstance(value, Record)}
    return dataclasses.replace(spec, **changed)


def called(question: Question, subject: Subject) -> list[Called]:
    """Call into given buffers and, where there are outputs, without."""
    ways = (True, False) if question.op.outs or question.op.listed else (True,)
    return [call(question, subject, given) for given in ways]


def judged(question: Question, calls: Sequence[Called]) -> tuple[list[str], list[Measure]]:
    """Judge each call against the oracle; return all problems, and the measures of the first."""
    exact, reference = (answer(question, dtype) for dtype in (torch.float64, torch.float32))
    rounded = inner(question)
    problems: list[str] = []
    kept: list[Measure] = []
    for done in calls:
        problems += done.problems
        if done.answer is None:
            continue
        measures = list(judge(question.op.name)(Trial(question, done.answer, exact, reference, rounded)))
        problems += [f"{m.tensor}: {m.problem}" for m in measures if m.problem]
        kept = kept or measures
    return list(dict.fromkeys(problems)), kept
