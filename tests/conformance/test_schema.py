"""The JSON report's schema: what stands at its top, what it says of each implementation, and that it is published."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
import pytest
from conformance_runs import report

from kimi_hal_conformance.cases import load
from kimi_hal_conformance.schema import published, read
from kimi_hal_conformance.verdict import (
    CRASHED,
    FAILED,
    HUNG,
    NOT_RUN,
    PASSED,
    REFUSED,
    WAIVED,
    OnTrial,
    Verdict,
    Waiver,
)

load()
FOLDER = Path(__file__).parents[2] / "docs" / "schema"
STALE = Waiver(
    case="kda_gate/*",
    reason="known",
    link="ACME-7",
    expires=date(2026, 1, 1),
    suite="0.1.0",
    problem="it expired on 2026-01-01",
)


def verdict(status: str, case: str = "kda_gate/tp8/rows1", **fields: Any) -> Verdict:
    problems = () if status == PASSED else ("some reason",)
    operator = case.partition("/")[0]
    given = {"implementation": "acme.fast", "problems": problems, **fields}
    return Verdict(case=case, operator=operator, status=status, **given)


def test_the_published_schemas_are_the_ones_that_are_written() -> None:
    found = published()
    assert {path.name: path.read_bytes() for path in FOLDER.glob("*.json")} == found, (
        "write them anew: python -m kimi_hal_conformance.schema docs/schema"
    )


def test_the_top_of_a_report_has_what_a_reader_looks_for() -> None:
    data = json.loads(msgspec.json.encode(report(verdict(PASSED))))
    assert list(data)[:6] == [
        "schema",
        "suite_version",
        "backend",
        "environment",
        "verdict",
        "implementations",
    ]
    assert data.keys() >= {"not_implemented", "cases", "waivers"}
    assert data["environment"].keys() >= {
        "execution",
        "profile",
        "seed",
        "repeats",
        "versions",
        "devices",
        "python",
        "platform",
    }


def test_an_implementation_is_counted_by_status_and_a_lost_process_is_a_failure() -> None:
    statuses = (PASSED, FAILED, CRASHED, HUNG, WAIVED, REFUSED, NOT_RUN, PASSED)
    about = OnTrial(operator="kda_gate", implementation="acme.fast", version="1.5", source_hash="ab")
    (found,) = report(*map(verdict, statuses), on_trial=(about,)).implementations
    assert (found.name, found.operator, found.version, found.source_hash) == (
        "acme.fast",
        "kda_gate",
        "1.5",
        "ab",
    )
    assert (found.passed, found.failed, found.waived, found.refused, found.not_run) == (2, 3, 1, 1, 1)
    assert [f.status for f in found.failures] == [FAILED, CRASHED, HUNG]
    assert found.level == 0
    assert found.stops.startswith("level 1, correct: 4 of 6 failed")


def test_a_failure_has_its_input_and_its_replay() -> None:
    case = "kda_gate/tp8/rows9"
    given = {"smallest": f"{case}, row 3 of 9", "input": "raw_g bfloat16[1, 12, 128]", "replay": "kimi-hal …"}
    (found,) = report(verdict(FAILED, case, **given)).implementations
    (failure,) = json.loads(msgspec.json.encode(found.failures))
    assert failure == {"case": case, "status": FAILED, "problems": ["some reason"], **given}


def test_an_implementation_without_a_verdict_stands_with_zeros() -> None:
    about = OnTrial(operator="kda_gate", implementation="acme.idle", version="", source_hash="")
    (found,) = report(on_trial=(about,)).implementations
    assert (found.passed, found.failed, found.not_run, found.level) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("statuses", "waivers", "interrupted", "word"),
    [
        ((PASSED, REFUSED, NOT_RUN, WAIVED), (), False, "conforms"),
        ((PASSED, HUNG), (), False, "does_not_conform"),
        ((PASSED,), (STALE,), False, "does_not_conform"),
        ((WAIVED, NOT_RUN), (), False, "nothing_passed"),
        ((REFUSED, NOT_RUN), (), False, "nothing_ran"),
        ((), (), False, "nothing_ran"),
        ((PASSED, NOT_RUN), (), True, "interrupted"),
    ],
)
def test_a_run_has_one_word(
    statuses: tuple[str, ...], waivers: tuple[Waiver, ...], interrupted: bool, word: str
) -> None:
    found = report(*map(verdict, statuses), waivers=waivers, interrupted=interrupted)
    assert found.verdict == word
    assert found.ok is (word == "conforms")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"schema_version": 2, "verdicts": []},
            "this report has schema version 2, this suite reads 3; "
            "read it with the suite that wrote it, or run the backend again",
        ),
        (
            {"schema": 4},
            "this report has schema version 4, this suite reads 3; "
            "read it with the suite that wrote it, or run the backend again",
        ),
        (
            {"schema": "3"},
            "this report has schema version '3', this suite reads 3; "
            "read it with the suite that wrote it, or run the backend again",
        ),
        ({}, "this is no report: it has no schema"),
        ([3], "this is no report: it has no schema"),
        (
            {"schema": 3, "mutants": []},
            "this is no report of a backend: `kimi-hal conformance prove` wrote it",
        ),
    ],
)
def test_what_is_no_report_of_this_schema_gets_a_sentence(data: object, message: str) -> None:
    with pytest.raises(ValueError, match="report") as error:
        read(json.dumps(data).encode())
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"verdict": "great"},
            "'great' is no verdict; there are conforms, does_not_conform, nothing_passed, nothing_ran, interrupted",
        ),
        (
            {"cases": [{"case": "c", "operator": "o", "implementation": "a.b", "status": "fine"}]},
            "'fine' is no status; there are passed, failed, crashed, hung, waived, refused, not_run",
        ),
    ],
)
def test_a_word_that_no_report_has_gets_a_sentence(wrong: dict[str, object], message: str) -> None:
    data = json.loads(msgspec.json.encode(report(verdict(PASSED)))) | wrong
    with pytest.raises(ValueError, match="is no report") as error:
        read(json.dumps(data).encode())
    assert str(error.value) == f"this is no report: {message}"
