"""The three forms of a report: JSON that can be read back, JUnit XML, and a table for a person."""

from __future__ import annotations

import io
import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import msgspec
import pytest
from conformance_runs import report
from rich.console import Console

from kimi_hal_conformance import report as output
from kimi_hal_conformance.schema import Report, read
from kimi_hal_conformance.verdict import (
    CRASHED,
    FAILED,
    HUNG,
    NOT_RUN,
    PASSED,
    REFUSED,
    Measure,
    Verdict,
)


def verdict(status: str, case: str = "kda_gate/tp8/rows1", **fields: Any) -> Verdict:
    given = {
        "case": case,
        "operator": case.partition("/")[0],
        "implementation": "acme.fast",
        "status": status,
    }
    problems = () if status == PASSED else ("some reason",)
    return Verdict(**{**given, "problems": problems, **fields})


MEASURES = (
    Measure(tensor="out", exact=False, norm=0.5, maximum=0.25, rounding=1e-3, accumulation=1e-7),
    Measure(
        tensor="lse_out", exact=False, norm=None, maximum=None, problem="NaN at 1 entries, expected at 0"
    ),
)
FULL = report(
    verdict(PASSED, measures=(MEASURES[0],), seconds=0.5),
    verdict(
        FAILED, "kda_gate/tp8/rows9", measures=MEASURES, problems=("a <tag> & \x1b[31m",), replay="kimi-hal …"
    ),
    verdict(CRASHED, "kda_decode/tp8/rows1", output="Fatal Python error: Aborted", fault=13),
    verdict(HUNG, "kda_decode/tp8/rows6"),
    verdict(REFUSED, "kda_decode/odd/rows6"),
    verdict(NOT_RUN, "moe_route/*"),
    not_implemented=("all_gather",),
)


def text(report: Report, width: int = 100) -> str:
    stream = io.StringIO()
    output.print_report(report, Console(file=stream, width=width, color_system=None))
    return stream.getvalue()


# --- what a run says ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statuses", "ok"),
    [
        ((PASSED,), True),
        ((PASSED, REFUSED, NOT_RUN), True),
        ((PASSED, FAILED), False),
        ((PASSED, CRASHED), False),
        ((PASSED, HUNG), False),
        ((REFUSED, NOT_RUN), False),
        ((), False),
    ],
)
def test_a_run_speaks_for_a_backend_if_something_passed_and_nothing_failed(
    statuses: tuple[str, ...], ok: bool
) -> None:
    assert report(*(verdict(s) for s in statuses)).ok is ok


# --- JSON -----------------------------------------------------------------------------------------------


def test_a_report_comes_back_from_json_as_it_was(tmp_path: Path) -> None:
    output.write_json(FULL, tmp_path / "report.json")
    assert read((tmp_path / "report.json").read_bytes()) == FULL


def test_json_is_for_any_reader(tmp_path: Path) -> None:
    output.write_json(FULL, tmp_path / "report.json")
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["schema"] == 3
    assert [v["status"] for v in data["cases"]] == [PASSED, FAILED, CRASHED, HUNG, REFUSED, NOT_RUN]
    assert data["cases"][1]["measures"][1]["norm"] is None
    assert data["cases"][2]["fault"] == 13


def test_a_report_of_another_schema_version_is_refused_by_a_sentence() -> None:
    newer = msgspec.json.encode(msgspec.structs.replace(FULL, schema=7))
    with pytest.raises(ValueError, match=r"^this report has schema version 7, this suite reads 3;") as error:
        read(newer)
    assert str(error.value).endswith("read it with the suite that wrote it, or run the backend again")


@pytest.mark.parametrize("data", [b"not json", b"[1, 2]", b"{}"])
def test_what_is_no_report_is_refused_by_a_sentence(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"^this is no report: "):
        read(data)


def test_a_field_that_a_later_suite_adds_is_passed_over() -> None:
    data = json.loads(msgspec.json.encode(FULL)) | {"level": 3}
    assert read(json.dumps(data).encode()) == FULL


# --- JUnit ----------------------------------------------------------------------------------------------


@pytest.fixture
def junit(tmp_path: Path) -> ET.Element:
    output.write_junit(FULL, tmp_path / "report.xml")
    return ET.parse(tmp_path / "report.xml").getroot()


def test_junit_counts_every_verdict(junit: ET.Element) -> None:
    (suite,) = junit.findall("testsuite")
    assert suite.get("name") == "acme.fast"
    counts = {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped", "time")}
    assert counts == {"tests": "6", "failures": "1", "errors": "2", "skipped": "2", "time": "0.500"}


def test_junit_names_operator_case_and_reason(junit: ET.Element) -> None:
    tests = junit.findall("testsuite/testcase")
    assert [t.get("name") for t in tests] == [v.case for v in FULL.verdicts]
    assert tests[0].get("classname") == "kda_gate"
    assert [[child.tag for child in t] for t in tests] == [
        [],
        ["failure"],
        ["error", "system-out"],
        ["error"],
        ["skipped"],
        ["skipped"],
    ]
    assert tests[3][0].get("message") == "hung: some reason"
    assert tests[1][0].text == "a <tag> & �[31m\nreplay: kimi-hal …"
    assert tests[2][1].text == "Fatal Python error: Aborted"


# --- the table ------------------------------------------------------------------------------------------


def test_the_table_has_a_line_for_each_implementation_of_an_operator() -> None:
    lines = text(FULL).splitlines()
    assert lines[1].split() == [
        "operator",
        "by",
        "passed",
        "failed",
        "refused",
        "not",
        "run",
        "worst",
        "seconds",
    ]
    assert lines[3].split() == ["kda_gate", "fast", "1", "1", "beyond", "0.5"]
    assert lines[4].split() == ["kda_decode", "fast", "2", "1", "0.0"]


def test_a_column_that_would_be_empty_is_left_out() -> None:
    lines = text(report(verdict(PASSED, measures=(MEASURES[0],)))).splitlines()
    assert lines[1].split() == ["operator", "by", "passed", "worst", "seconds"]
    assert lines[3].split() == ["kda_gate", "fast", "1", "0.50", "0.0"]


def test_every_problem_is_printed_with_its_replay() -> None:
    shown = text(FULL)
    assert "failed acme.fast kda_gate/tp8/rows9\n    a <tag> & \x1b[31m\n    replay: kimi-hal …\n" in shown
    assert (
        "crashed acme.fast kda_decode/tp8/rows1\n    some reason\n    | Fatal Python error: Aborted\n"
        in shown
    )


def test_what_many_say_alike_is_printed_once() -> None:
    claims = [f"kda_gate/claims/{i}" for i in range(4)]
    wrong = [
        verdict(FAILED, i, problems=(f"claimed (seed={i}), but the builder is missing",)) for i in claims
    ]
    plain = verdict(FAILED, "kda_gate/tp8/rows9", problems=("the builder is missing",), replay="kimi-hal …")
    other = verdict(FAILED, "kda_gate/tp8/rows1", problems=("another",))
    lines = text(report(plain, *wrong, other)).splitlines()
    at = lines.index("failed acme.fast kda_gate/tp8/rows9")
    assert lines[at + 1 : at + 6] == [
        "    the builder is missing",
        "    replay: kimi-hal …",
        "    and 4 others the same: kda_gate/claims/0, kda_gate/claims/1, kda_gate/claims/2, …",
        "failed acme.fast kda_gate/tp8/rows1",
        "    another",
    ]
    few = text(report(plain, *wrong[:2])).splitlines()
    assert sum(line.startswith("failed ") for line in few) == 3


def test_what_did_not_run_is_counted_by_reason() -> None:
    shown = text(FULL)
    assert "not run, 1: some reason" in shown
    assert "not implemented by acme: all_gather" in shown


@pytest.mark.parametrize(
    ("verdicts", "line"),
    [
        ((verdict(PASSED),), "acme (native, profile quick, 12 s) conforms, 1 of 1 operators: 1 passed"),
        (
            (verdict(PASSED), verdict(HUNG)),
            "acme (native, profile quick, 12 s) does NOT conform: 1 passed, 1 hung",
        ),
        ((verdict(NOT_RUN),), "acme (native, profile quick, 12 s) is NOT proven: nothing ran: 1 not run"),
        (
            (),
            "acme (native, profile quick, 12 s) is NOT proven: nothing ran: nothing fits what was asked for",
        ),
    ],
)
def test_the_last_line_says_what_the_run_proves(verdicts: tuple[Verdict, ...], line: str) -> None:
    assert text(report(*verdicts)).splitlines()[-1] == line


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ((), " conforms, 1 of 1 operators"),
        (("kda_gate",), ", kda_gate alone, conforms"),
        (tuple("abcde"), ", a, b, c, 2 more alone, conforms"),
    ],
)
def test_the_last_line_says_what_alone_was_asked_for(named: tuple[str, ...], said: str) -> None:
    environment = msgspec.structs.replace(FULL.environment, limited_to=named)
    found = msgspec.structs.replace(report(verdict(PASSED)), environment=environment)
    assert output.summary(found) == f"acme (native, profile quick, 12 s){said}: 1 passed"


def test_the_last_line_says_how_many_operators_it_speaks_for() -> None:
    tried = (verdict(PASSED), verdict(NOT_RUN, "moe_layer/*"), verdict(REFUSED, "kda_decode/odd/rows6"))
    found = report(*tried, not_implemented=("moe_route", "moe_experts"))
    assert output.summary(found) == (
        "acme (native, profile quick, 12 s) conforms, 1 of 5 operators: 1 passed, 1 refused, 1 not run"
    )


def test_discrete_results_are_exact_or_beyond() -> None:
    exact = Measure(tensor="out", exact=True)
    assert output.worst([verdict(PASSED, measures=(exact,))]) == "exact"
    assert output.worst([verdict(PASSED, measures=(exact, MEASURES[0]))]) == "0.50"
    assert output.worst([verdict(NOT_RUN)]) == ""


def test_junit_can_be_read_whatever_a_process_printed_or_a_name_holds(tmp_path: Path) -> None:
    odd = "\x00\ufffe\uffff\ud800"
    found = verdict(CRASHED, f"kda_gate/{odd}", output=odd, problems=(odd,), implementation=f"acme.{odd}")
    output.write_junit(report(found), tmp_path / "odd.xml")
    (suite,) = ET.parse(tmp_path / "odd.xml").getroot()
    assert suite.get("name") == "acme.����"
    assert suite[0].get("name") == "kda_gate/����"
    assert [element.text for element in suite[0]] == ["����", "����"]
