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
#: It ran and is right, and is not yet what the level asks: only of level 6, which is no verdict.
BELOW = "not_reached"
RAN = (PASSED, WAIVED, *AGAINST)
#: What a verdict tries beside the values (``promises.py``).
DETERMINISTIC, BATCH_INVARIANT, CAPTURE, SHARDS = "deterministic", "batch_invariant", "capture", "shards"
LASTING, CHECKPOINT_EXACT = "lasting", "checkpoint_exact"
#: Why nothing speaks for a level of promises where cases ran and none says why.
ABOUT = {
    DETERMINISTIC: "no case that passed was repeated",
    CAPTURE: "calls are captured from the quick profile on",
}
#: What level 6 is about, and the fraction of the roofline that it needs: then no kernel is twice as fast.
SPEED, NEEDED = "speed", 0.5
#: Which level a promise speaks for; relations that are not here must hold of every kernel and are level 2.
SPEAKS = {
    DETERMINISTIC: REPRODUCIBLE,
    BATCH_INVARIANT: REPRODUCIBLE,
    CHECKPOINT_EXACT: REPRODUCIBLE,
    "permutation_bits": REPRODUCIBLE,
    "split_bits": REPRODUCIBLE,
    CAPTURE: CAPTURABLE,
    SHARDS: DISTRIBUTED,
}


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
    case = cases.find(case_id)
    return of(case) if case else 0


def of_promise(name: str) -> int:
    """Return the level that a promise speaks for."""
    return SPEAKS.get(name, ROBUST)


def _edge(case: Case) -> bool:
    return "/edges/" in case.id


def standing(operator: str, name: str, verdicts: Sequence[Verdict]) -> Standing:
    """Return where an implementation of an operator stands, by all verdicts on it."""
    steps = tuple(_step(level, operator, verdicts) for level in NAMES)
    reached = len(list(takewhile(lambda s: s.state == REACHED, steps)))
    return Standing(
        name=name,
        operator=operator,
        level=reached,
        stops=_said(steps[reached]) if reached < len(steps) else "nothing: every level is reached",
        steps=steps,
    )


def _said(stop: Step) -> str:
    return f"level {stop.level}, {stop.name}: {stop.why}"


def _step(level: int, operator: str, verdicts: Sequence[Verdict]) -> Step:
    def step(state: str, why: str = "") -> Step:
        return Step(level=level, name=NAMES[level], state=state, why=why)

    if level == FAST:
        return step(*_speed(verdicts))
    ran = [(v, spoken(v)[level]) for v in verdicts if level in spoken(v)]
    failed = [v for v, right in ran if not right]
    if failed:
        waived = " (waived)" if all(v.status == WAIVED for v in failed) else ""
        return step(STOPPED, f"{len(failed)} of {len(ran)} failed{waived}, the first: {failed[0].case}")
    if ran:
        return step(REACHED)
    return step(UNTESTED, _why_untested(level, operator, verdicts))


def spoken(verdict: Verdict) -> dict[int, bool]:
    """Return what a verdict says of which levels: right or not.

    A promise that is broken says nothing against the values, which were right before it was tried.
    """
    case, passed = cases.find(verdict.case), verdict.status == PASSED
    if verdict.status not in RAN or case is None:
        return {}
    said = {of(case): True} | {of_promise(name): True for name in verdict.promises}
    if not passed:
        said[verdict.level or of(case)] = False
    if case.ranks:
        said[DISTRIBUTED] = passed or said[of(case)]
    return said


def _speed(verdicts: Sequence[Verdict]) -> tuple[str, str]:
    """Return how level 6 stands: by the operator's one call that is timed (``speed/shapes.py``)."""
    found = next((v.speed for v in verdicts if v.speed is not None), None)
    if found is None:
        why = next((v.untried[SPEED] for v in verdicts if SPEED in v.untried), "nothing was timed")
        return UNTESTED, f"not tested: {why}"
    said = f"{found.fraction:.2f} of the device's measured roofline"
    return (REACHED, said) if found.fraction >= NEEDED else (BELOW, f"{said}, needs {NEEDED:g}")


def _why_untested(level: int, operator: str, verdicts: Sequence[Verdict]) -> str:
    about = {REPRODUCIBLE: DETERMINISTIC, CAPTURABLE: CAPTURE}.get(level)
    if why := next((v.untried[about] for v in verdicts if about in v.untried), "") if about else "":
        return f"not tested: {why}"
    if about and any(v.status in RAN for v in verdicts):
        return f"not tested in this run: {ABOUT[about]}"
    known = [c for c in cases.CASES.values() if c.operator == operator]
    mine = {c.id for c in known if (c.ranks if level == DISTRIBUTED else of(c) == level)}
    if any(v.status == REFUSED and v.case in mine for v in verdicts):
        return "not tested: every case of it is refused"
    if level not in (REPRODUCIBLE, CAPTURABLE) and not mine:
        return f"not tested by this suite version: it has no such case of {operator}"
    missing = sorted((v for v in verdicts if v.status == NOT_RUN), key=lambda v: v.case not in mine)
    return f"not tested in this run: {missing[0].problems[0]}" if missing else "not tested in this run"


def lines(standings: Sequence[Standing]) -> Iterator[str]:
    """Yield a line an implementation: the level reached, and what stops it from the next."""
    wide = max((len(f"{s.operator} {s.name}") for s in standings), default=0)
    for found in standings:
        name = f"{found.operator} {found.name}".ljust(wide)
        yield f"level {found.level} of {len(NAMES)}  {name}  next: {found.stops}"
