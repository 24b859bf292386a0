"""Cases of one implementation on several processes of one device, and the timing that is made up for afterwards."""

from __future__ import annotations

import pytest

from kimi_hal_conformance import resume, suite
from kimi_hal_conformance.messages import Batch
from kimi_hal_conformance.request import Request
from kimi_hal_conformance.schedule import share_out
from kimi_hal_conformance.verdict import FAILED, PASSED, REFUSED, Speed, Verdict

CASES = tuple(f"kda_gate/tp8/rows{rows}" for rows in (0, 1))
BATCH = Batch(
    implementation="acme.fast",
    device="cuda",
    hooks="acme:Device",
    cases=tuple("abcdefg"),
    seed=0,
    limit=60.0,
    relations=16,
)


def verdict(case: str, status: str, speed: Speed | None = None) -> Verdict:
    return Verdict(
        case=case,
        operator="kda_gate",
        implementation="acme.fast",
        status=status,
        problems=(),
        seed=0,
        speed=speed,
    )


def test_every_case_is_in_one_part() -> None:
    assert [part.cases for part in share_out(BATCH, 3)] == [("a", "d", "g"), ("b", "e"), ("c", "f")]


def test_relations_are_shared_out_too() -> None:
    assert [part.relations for part in share_out(BATCH, 3)] == [6, 6, 6]


def test_the_first_part_times_the_operator() -> None:
    assert [part.untimed for part in share_out(BATCH, 2)] == ["", "another process was to time it"]


def test_there_are_no_more_parts_than_cases() -> None:
    assert len(share_out(BATCH, 100)) == len(BATCH.cases)


def test_verdicts_of_parts_stand_in_the_order_of_the_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "on_host", lambda loaded, request: False)
    batches = []
    monkeypatch.setattr(
        suite, "share_out", lambda whole, n: batches.extend(found := share_out(whole, n)) or found
    )
    report = suite.run(Request("reference", only=CASES, lanes=2))
    assert len(batches) == len(CASES)
    assert [(v.case, v.status) for v in report.verdicts] == [(case, PASSED) for case in CASES]


def test_one_lane_shares_nothing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "on_host", lambda loaded, request: False)
    monkeypatch.delattr(suite, "share_out")
    assert suite.run(Request("reference", only=CASES, lanes=1)).ok


def test_what_was_never_timed_is_tried_once_more() -> None:
    before = {c: verdict(c, s) for c, s in (("a", REFUSED), ("b", PASSED), ("c", PASSED))}
    assert list(resume.to_time(before)) == ["a", "c"]


def test_what_was_timed_is_kept() -> None:
    speed = Speed(seconds=1e-5, bytes=1, operations=1, bandwidth=1e12, rate=1e14, graph=True, call="one row")
    before = {"a": verdict("a", PASSED), "b": verdict("b", PASSED, speed)}
    assert resume.to_time(before) == before


def test_where_nothing_passed_nothing_is_tried_for_its_time() -> None:
    before = {"a": verdict("a", REFUSED), "b": verdict("b", FAILED)}
    assert resume.to_time(before) == before
