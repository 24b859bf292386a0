"""Levels: how far an implementation of an operator got, and what stops it from the next.

A level is reached only by what ran: what a run left out, and what this suite does not test, is not tested.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile

from kimi_hal_conformance import case as cases
from kimi_hal_conformance.case import Case
from kimi_hal_conformance.verdict import (
    AGAINST,
    NOT_RUN,
    PASSED,
    REFUSED,
    WAIVED,
    Standing,
    Step,
    Verdict,
)

CORRECT, ROBUST, REPRODUCIBLE, CAPTURABLE, DISTRIBUTED, FAST = range(1, 7)
NAMES = {
    CORRECT: "correct",
    ROBUST: "robust",
    REPRODUCIBLE: "reproducible",
    CAPTURABLE: "capturable",
    DISTRIBUTED: "distributed",
    FAST: "fast",
}
#: How a step stands.
REACHED, STOPPED, UNTESTED = "reached", "failed", "not_tested"
#: What no case of this suite tries.
NOT_TRIED = (CAPTURABLE, FAST)
RAN = (PASSED, WAIVED, *AGAINST)


def of(case: Case) -> int:
    """Return the level that a case speaks for.

    Ranks are level 5 where the operator also has cases without them; for one that means nothing without a
    group they are its correctness. A fault of the field is level 2 like any edge, unless the operator's plain
    cases all reproduce one.
    """
    mine = [c for c in cases.CASES.values() if c.operator == case.operator]
    if case.ranks and not all(c.ranks for c in mine):
        return DISTRIBUTED
    edge = _edge(case) or (case.fault and not all(c.fault or _edge(c) for c in mine))
    return ROBUST if edge else CORRECT


def of_id(case_id: str) -> int:
    """Return a case's level, 0 for what is said of all cases of an operator."""
    return of(cases.CASES[case_id]) if case_id in cases.CASES else 0


def _edge(case: Case) -> bool:
    return "/edges/" in case.id


def standing(operator: str, name: str, verdicts: Sequence[Verdict]) -> Standing:
    """Return where an implementation of an operator stands, by all verdicts on it."""
    steps = tuple(_step(level, operator, verdicts) for level in NAMES)
    reached = len(list(takewhile(lambda s: s.state == REACHED, steps)))
    stop = steps[reached]  # the last is never reached: nothing tries it
    return Standing(
        name=name,
        operator=operator,
        level=reached,
        stops=f"level {stop.level}, {stop.name}: {stop.why}",
        steps=steps,
    )


def _step(level: int, operator: str, verdicts: Sequence[Verdict]) -> Step:
    def step(state: str, why: str = "") -> Step:
        return Step(level=level, name=NAMES[level], state=state, why=why)

    if level in NOT_TRIED:
        return step(UNTESTED, "not tested by this suite version")
    evidence = list(_evidence(level, verdicts))
    ran = [v for v in evidence if v.status in RAN]
    failed = [v for v in ran if v.status != PASSED]
    if failed:
        waived = " (waived)" if all(v.status == WAIVED for v in failed) else ""
        return step(STOPPED, f"{len(failed)} of {len(ran)} failed{waived}, the first: {failed[0].case}")
    if ran:
        return step(REACHED)
    return step(UNTESTED, _why_untested(level, operator, evidence, verdicts))


def _evidence(level: int, verdicts: Sequence[Verdict]) -> Iterator[Verdict]:
    """Yield the verdicts that speak for a level."""
    for verdict in verdicts:
        case = cases.CASES.get(verdict.case)
        if level == REPRODUCIBLE:
            speaks = bool(verdict.promises)
        elif level == DISTRIBUTED:
            speaks = case is not None and case.ranks > 0
        else:
            speaks = case is not None and of(case) == level and verdict.level != REPRODUCIBLE
        if speaks:
            yield verdict


def _why_untested(level: int, operator: str, evidence: Sequence[Verdict], verdicts: Sequence[Verdict]) -> str:
    if level == REPRODUCIBLE and any(v.status in RAN for v in verdicts):
        return "not tested: nothing was repeated, deterministic is not declared, or the cases have ranks"
    if any(v.status == REFUSED for v in evidence):
        return "not tested: every case of it is refused"
    left_out = next((v for v in (*evidence, *verdicts) if v.status == NOT_RUN), None)
    known = [c for c in cases.CASES.values() if c.operator == operator]
    exists = any(c.ranks if level == DISTRIBUTED else of(c) == level for c in known)
    if level != REPRODUCIBLE and not exists:
        return f"not tested by this suite version: it has no such case of {operator}"
    return f"not tested in this run: {left_out.problems[0]}" if left_out else "not tested in this run"


def lines(standings: Sequence[Standing]) -> Iterator[str]:
    """Yield a line an implementation: the level reached, and what stops it from the next."""
    wide = max((len(f"{s.operator} {s.name}") for s in standings), default=0)
    for found in standings:
        name = f"{found.operator} {found.name}".ljust(wide)
        yield f"level {found.level} of {len(NAMES)}  {name}  next: {found.stops}"
