"""Levels: how far an implementation got, what stops it, and that nothing untested is claimed."""

from __future__ import annotations

import io
from typing import Any

import pytest
from conformance_runs import report
from rich.console import Console

from kimi_hal_conformance import levels, promises
from kimi_hal_conformance import report as output
from kimi_hal_conformance.case import CASES
from kimi_hal_conformance.cases import load
from kimi_hal_conformance.verdict import (
    CRASHED,
    FAILED,
    NOT_RUN,
    PASSED,
    REFUSED,
    WAIVED,
    Speed,
    Standing,
    Verdict,
)

load()
PLAIN, EDGE = "kda_gate/tp8/rows1", "kda_gate/edges/far/bounded"
BOTH = ("deterministic", "batch_invariant")
ALONE = next(c.id for c in CASES.values() if c.operator == "dsa_decode" and not c.ranks)
RANKS = next(c.id for c in CASES.values() if c.operator == "dsa_decode" and c.ranks)


def verdict(status: str, case: str = PLAIN, **fields: Any) -> Verdict:
    operator = case.partition("/")[0]
    given = {"level": levels.of_id(case), "problems": () if status == PASSED else ("some reason",)}
    return Verdict(
        case=case, operator=operator, implementation="acme.fast", status=status, **{**given, **fields}
    )


LEFT_OUT = verdict(NOT_RUN, "kda_gate/claims/left-out", problems=("claimed, but not tried in this profile",))


def standing(*verdicts: Verdict) -> Standing:
    return levels.standing(verdicts[0].operator, "acme.fast", verdicts)


# --- which level a case speaks for ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "level"),
    [(PLAIN, 1), ("kda_gate/odd/rows1", 2), (EDGE, 2), (ALONE, 1), (RANKS, 5), ("kda_gate/*", 0)],
)
def test_a_case_speaks_for_a_level(case: str, level: int) -> None:
    assert levels.of_id(case) == level


def test_ranks_are_the_correctness_of_an_operator_that_means_nothing_without_a_group() -> None:
    assert {levels.of(c) for c in CASES.values() if c.operator == "topk_merge"} == {1, 2}


def test_every_operator_has_a_case_of_level_1() -> None:
    correct = {c.operator for c in CASES.values() if levels.of(c) == 1}
    assert correct == {c.operator for c in CASES.values()}


# --- how far ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verdicts", "reached", "stops"),
    [
        ([verdict(FAILED)], 0, f"level 1, correct: 1 of 1 failed, the first: {PLAIN}"),
        ([verdict(REFUSED)], 0, "level 1, correct: not tested: every case of it is refused"),
        ([verdict(NOT_RUN, "kda_gate/*")], 0, "level 1, correct: not tested in this run: some reason"),
        ([verdict(PASSED)], 1, "level 2, robust: not tested in this run"),
        (
            [verdict(PASSED), verdict(CRASHED, EDGE)],
            1,
            f"level 2, robust: 1 of 1 failed, the first: {EDGE}",
        ),
        (
            [verdict(PASSED), verdict(WAIVED, EDGE)],
            1,
            f"level 2, robust: 1 of 1 failed (waived), the first: {EDGE}",
        ),
        (
            [verdict(PASSED), verdict(PASSED, EDGE)],
            2,
            "level 3, reproducible: not tested in this run: no case that passed was repeated",
        ),
        (
            [verdict(PASSED, untried={"deterministic": promises.NOT_DECLARED}), verdict(PASSED, EDGE)],
            2,
            "level 3, reproducible: not tested: deterministic is not declared",
        ),
        (
            [verdict(PASSED, untried={"deterministic": promises.NOT_REPEATED}), verdict(PASSED, EDGE)],
            2,
            "level 3, reproducible: not tested: nothing was repeated; --repeats 1 compares the bits of a second call",
        ),
        (
            [verdict(PASSED, promises=BOTH), verdict(PASSED, EDGE, promises=BOTH), LEFT_OUT],
            3,
            "level 4, capturable: not tested in this run: calls are captured from the quick profile on",
        ),
        (
            [verdict(PASSED), verdict(PASSED, EDGE), verdict(FAILED, level=3, promises=BOTH)],
            2,
            f"level 3, reproducible: 1 of 1 failed, the first: {PLAIN}",
        ),
        (
            [verdict(PASSED, promises=BOTH), verdict(PASSED, EDGE, promises=BOTH)],
            3,
            "level 4, capturable: not tested in this run: calls are captured from the quick profile on",
        ),
        (
            [
                verdict(PASSED, promises=BOTH, untried={"capture": "the device has no graphs"}),
                verdict(PASSED, EDGE),
            ],
            3,
            "level 4, capturable: not tested: the device has no graphs",
        ),
        (
            [verdict(PASSED, promises=(*BOTH, "capture")), verdict(PASSED, EDGE)],
            4,
            "level 5, distributed: not tested by this suite version: it has no such case of kda_gate",
        ),
        (
            [verdict(FAILED, level=4, promises=(*BOTH, "capture")), verdict(PASSED, EDGE)],
            3,
            f"level 4, capturable: 1 of 1 failed, the first: {PLAIN}",
        ),
        (
            [verdict(FAILED, level=2, promises=("deterministic", "purity")), verdict(PASSED, EDGE)],
            1,
            f"level 2, robust: 1 of 2 failed, the first: {PLAIN}",
        ),
    ],
)
def test_an_implementation_stands_where_the_first_level_stops_it(
    verdicts: list[Verdict], reached: int, stops: str
) -> None:
    found = standing(*verdicts)
    assert (found.level, found.stops) == (reached, stops)


def test_an_operator_without_a_case_of_a_level_is_not_tested_there() -> None:
    assert standing(verdict(PASSED)).steps[4].why == (
        "not tested by this suite version: it has no such case of kda_gate"
    )


def speed(seconds: float) -> Speed:
    """Return the timing of a call whose floor is 10 µs, of bytes."""
    return Speed(
        seconds=seconds,
        bytes=40_000_000,
        operations=10**9,
        bandwidth=4e12,
        rate=8e14,
        graph=True,
        call="",
    )


@pytest.mark.parametrize(
    ("seconds", "state", "why"),
    [
        (20e-6, "reached", "0.50 of the device's measured roofline"),
        (32e-6, "not_reached", "0.31 of the device's measured roofline, needs 0.5"),
    ],
)
def test_level_6_is_a_fraction_and_no_verdict(seconds: float, state: str, why: str) -> None:
    found = verdict(PASSED, speed=speed(seconds))
    step = standing(found).steps[5]
    assert (step.state, step.why, found.status) == (state, why, PASSED)


def test_what_was_not_timed_says_why() -> None:
    found = standing(verdict(PASSED, untried={"speed": "speed is measured on a device, natively"}))
    assert found.steps[5].why == "not tested: speed is measured on a device, natively"


def test_all_six_levels_can_be_reached() -> None:
    one = verdict(PASSED, ALONE, promises=(*BOTH, "purity", "capture"), speed=speed(10e-6))
    found = standing(one, verdict(PASSED, RANKS))
    assert (found.level, found.stops) == (6, "nothing: every level is reached")


def test_every_level_is_told_also_beyond_the_one_that_stops() -> None:
    steps = standing(verdict(PASSED, ALONE), verdict(PASSED, RANKS)).steps
    assert [s.name for s in steps] == list(levels.NAMES.values())
    assert [s.state for s in steps] == [
        "reached",
        "not_tested",
        "not_tested",
        "not_tested",
        "reached",
        "not_tested",
    ]


def test_levels_are_printed_behind_the_table() -> None:
    stream = io.StringIO()
    output.print_report(report(verdict(PASSED)), Console(file=stream, width=100, color_system=None))
    line = "level 1 of 6  kda_gate acme.fast  next: level 2, robust: not tested in this run"
    assert line in stream.getvalue().splitlines()
