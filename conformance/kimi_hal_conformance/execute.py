"""Run one case on one implementation, in this process, and judge it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from kimi_hal import ops
from kimi_hal.errors import SelectionError
from kimi_hal_conformance import oracle_device
from kimi_hal_conformance.calls import Called, Subject
from kimi_hal_conformance.case import Case, drawn
from kimi_hal_conformance.judging import judged
from kimi_hal_conformance.levels import of
from kimi_hal_conformance.oracle import Question
from kimi_hal_conformance.promises import NONE, Effort, Kept, kept
from kimi_hal_conformance.raised import causes, described, traced
from kimi_hal_conformance.ranks import differing, on_ranks, questions
from kimi_hal_conformance.rig import OnePlan
from kimi_hal_conformance.scripts import call
from kimi_hal_conformance.sparse import CannotTryError
from kimi_hal_conformance.surroundings import Surroundings
from kimi_hal_conformance.verdict import FAILED, NOT_RUN, PASSED, REFUSED, Measure, Verdict


def run_case(case: Case, subject: Subject, seed: int, effort: Effort = NONE) -> Verdict:
    """Plan, run between canaries, then ask the oracle; return the verdict. Exceptions become verdicts.

    Of what is right more is tried: ``promises.py``.
    """
    start = time.perf_counter()
    measures: Sequence[Measure] = ()
    output, level, promises = "", of(case), Kept()
    try:
        problems, measures, last = try_case(case, subject, seed)
        if not problems:
            before = Surroundings.now()
            promises = kept(case, subject, seed, effort, last)
            problems = [*promises.problems, *before.restored("a later call")]
            level = promises.level or level
        status = FAILED if problems else PASSED
    except KeyboardInterrupt:
        raise
    except CannotTryError as error:  # before anything was called
        status, problems = NOT_RUN, [str(error)]
    except BaseException as error:  # whatever a vendor's kernel raises, SystemExit too, is its verdict
        refusal = refused(error, subject.implementation)
        status = REFUSED if refusal else FAILED
        problems = list(refusal) or [described(error)]
        output = "" if refusal else traced(error)
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
        untried=dict(promises.untried),
    )


def refused(error: BaseException, implementation: str) -> tuple[str, ...]:
    """Return the reasons why an implementation does not claim a Spec; empty if the error is another.

    A rank's error stands behind the group's, and that of a composite's part behind the composite's.
    """
    inmost = causes(error)[-1]
    if not isinstance(inmost, SelectionError):
        return ()
    backend = implementation.partition(".")[0]
    mine = {name: why for name, why in inmost.refusals.items() if name.partition(".")[0] == backend}
    return tuple(f"{name}: {reason}" for name, reasons in mine.items() for reason in reasons)


def try_case(case: Case, subject: Subject, seed: int) -> tuple[list[str], list[Measure], list[Called]]:
    """Return the problems, measures and last call of a case on one rank, or on each rank of a loopback group.

    Every rank has run before any asks the oracle: freed memory cannot hold the answer.
    """
    operands = drawn(case, seed)
    op, before = ops.get(case.operator), Surroundings.now()
    if not case.ranks:
        oracle = oracle_device.place(subject.device)
        question = Question(op, case.spec, case.limits, operands, sparse=case.sparse, oracle=oracle)
        done = called(question, subject)
        changed = before.restored()
        problems, measures = judged(question, done)
        return [*changed, *problems], measures, done[:1]
    asked = questions(case, operands)
    calls = on_ranks(asked, lambda q: called(q, subject))
    changed = before.restored()
    found = on_ranks(asked, lambda q: judged(q, calls[q.group.rank()]))
    problems = [f"rank {rank}: {p}" for rank, (problems, _) in enumerate(found) for p in problems]
    measures = [measure for _, own in found for measure in own]
    between = differing(case.operator, [done[0].answer for done in calls])
    return [*changed, *problems, *between], measures, [done[0] for done in calls]


def called(question: Question, subject: Subject) -> list[Called]:
    """Call without buffers for the outputs, where there are any, then into given ones, by one plan; the last first.

    Later calls can be compared with the last: what it leaves unspecified is poison, the same in every call.
    """
    ways, one = (False, True) if question.op.outs or question.op.listed else (True,), OnePlan.of(subject)
    done = [call(question, one, given) for given in ways]  # the first results are held meanwhile
    return [replace(found, held={}) for found in reversed(done)]
