"""Verdicts as they stand in a report: each with its replay, and one for whatever was left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from kimi_hal_conformance import levels
from kimi_hal_conformance.claims import told as claims
from kimi_hal_conformance.integrity import Integrity
from kimi_hal_conformance.request import REPEATS_OF_NAMED, Request
from kimi_hal_conformance.schedule import Schedule
from kimi_hal_conformance.verdict import AGAINST, FAILED, NOT_RUN, REFUSED, Verdict

NOT_REACHED = "the run was interrupted before this case"
#: How every replay begins.
COMMAND = "kimi-hal conformance replay"
UNTESTED = "it refuses every case: what it claims is not tested, and no claim stands without a test"


def joined(schedule: Schedule, known: Mapping[str, Verdict], answers: Sequence[Verdict]) -> list[Verdict]:
    """Return a verdict for each case of a schedule, in order, also where an interrupted run did not reach it."""
    found = {**known, **{v.case: v for v in answers}}
    return [found.get(c.id) or _said(schedule, c.id, NOT_RUN, NOT_REACHED) for c in schedule.cases]


def concluded(schedule: Schedule, answers: Sequence[Verdict], request: Request) -> Iterator[Verdict]:
    """Yield the verdicts on an implementation, with the command that replays each, and on what it claims."""
    for verdict in answers:
        yield _with_replay(claims.verdict(verdict, schedule.claims.made), request)
    yield from claims.beside(schedule.claims, schedule.implementation.operator, schedule.full_name)
    for case, reason in schedule.left_out:
        yield _said(schedule, case, NOT_RUN, reason)
    if request.only or not schedule.cases:
        return
    if all(verdict.status == REFUSED for verdict in answers):
        yield _said(schedule, f"{schedule.implementation.operator}/*", FAILED, UNTESTED)


def disproven(verdicts: Sequence[Verdict], judge: Integrity) -> list[Verdict]:
    """Return verdicts as they are, but all that ran as failed if this process is not what it was.

    Args:
        verdicts: as they came from other processes.
        judge: this process's as it was before it imported the plugin.
    """
    tampered = judge.problems()
    if not tampered:
        return list(verdicts)
    return [
        v
        if v.status == NOT_RUN
        else msgspec.structs.replace(v, status=FAILED, problems=(*tampered, *v.problems))
        for v in verdicts
    ]


def _said(schedule: Schedule, case: str, status: str, problem: str) -> Verdict:
    return Verdict(
        case=case,
        operator=schedule.implementation.operator,
        implementation=schedule.full_name,
        status=status,
        problems=(problem,),
        level=levels.of_id(case),
    )


def _with_replay(verdict: Verdict, request: Request) -> Verdict:
    level = verdict.level or levels.of_id(verdict.case)
    return msgspec.structs.replace(verdict, replay=replay(verdict, request), level=level)


def replay(verdict: Verdict, request: Request) -> str:
    """Return the command that runs one case of one implementation again.

    How often it is repeated matters for what failed alone.
    """
    repeats = max(request.chosen_repeats, REPEATS_OF_NAMED) if verdict.status in AGAINST else REPEATS_OF_NAMED
    options = {
        "backend": request.backend,
        "execution": request.execution,
        "implementation": verdict.implementation,
        "seed": verdict.seed,
        "repeats": repeats,
    }
    defaults = {"execution": "native", "seed": 0, "repeats": REPEATS_OF_NAMED}
    given = [f"--{name} {value}" for name, value in options.items() if defaults.get(name) != value]
    return " ".join((COMMAND, verdict.case, *given))
