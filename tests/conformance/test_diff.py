"""What changed between two reports: worse, better, other; the exit status; and reports that cannot be compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from conformance_runs import environment, report

from kimi_hal_conformance.cases import load
from kimi_hal_conformance.changes import Change, changes
from kimi_hal_conformance.cli import cli
from kimi_hal_conformance.report import write_json
from kimi_hal_conformance.schema import Report
from kimi_hal_conformance.verdict import (
    CRASHED,
    FAILED,
    HUNG,
    NOT_RUN,
    PASSED,
    REFUSED,
    WAIVED,
    Measure,
    OnTrial,
    Verdict,
)

load()
CASE, OTHER = "kda_gate/tp8/rows1", "kda_gate/tp8/rows9"


def verdict(status: str, case: str = CASE, share: float | None = None, **fields: Any) -> Verdict:
    measures = () if share is None else (Measure(tensor="g_out", exact=False, norm=share, maximum=share / 2),)
    problems = () if status == PASSED else ("some reason",)
    given = {"implementation": "acme.fast", "problems": problems, "measures": measures, **fields}
    return Verdict(case=case, operator="kda_gate", status=status, **given)


def kinds(old: Report, new: Report) -> list[tuple[str, str]]:
    return [(c.effect, c.kind) for c in changes(old, new)]


def between(before: str | None, after: str | None) -> list[tuple[str, str]]:
    """Return what changed in one case, beside another that passes in both reports."""
    beside = verdict(PASSED, OTHER)
    old = report(beside, *([] if before is None else [verdict(before)]))
    new = report(beside, *([] if after is None else [verdict(after)]))
    return [found for found in kinds(old, new) if found[1] not in ("level", "verdict")]


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        (PASSED, FAILED, ("worse", "newly failing")),
        (PASSED, CRASHED, ("worse", "newly failing")),
        (REFUSED, HUNG, ("worse", "newly failing")),
        (None, FAILED, ("worse", "newly failing")),
        (WAIVED, FAILED, ("worse", "newly failing")),
        (PASSED, REFUSED, ("worse", "passes no more")),
        (PASSED, NOT_RUN, ("worse", "passes no more")),
        (PASSED, WAIVED, ("worse", "passes no more")),
        (PASSED, None, ("worse", "vanished")),
        (FAILED, PASSED, ("better", "newly passing")),
        (WAIVED, PASSED, ("better", "newly passing")),
        (FAILED, CRASHED, ("other", "fails otherwise")),
        (REFUSED, PASSED, ("other", "status")),
        (REFUSED, NOT_RUN, ("other", "status")),
        (NOT_RUN, None, ("other", "vanished")),
        (None, PASSED, ("other", "appeared")),
    ],
)
def test_a_case_got_worse_better_or_other(
    before: str | None, after: str | None, found: tuple[str, str]
) -> None:
    assert between(before, after) == [found]


@pytest.mark.parametrize("status", [PASSED, FAILED, REFUSED, NOT_RUN])
def test_what_is_as_it_was_is_no_change(status: str) -> None:
    assert between(status, status) == []


def test_a_case_that_another_suite_left_out_is_not_the_backends_fault() -> None:
    old, new = report(verdict(PASSED), verdict(PASSED, OTHER)), report(verdict(PASSED, OTHER))
    new = msgspec.structs.replace(new, suite_version="0.2.0")
    assert kinds(old, new) == [("other", "suite"), ("other", "vanished")]


def test_the_verdict_and_the_level_are_compared() -> None:
    good, bad = report(verdict(PASSED)), report(verdict(FAILED))
    assert list(changes(good, bad))[:2] == [
        Change("worse", "verdict", "acme", "conforms", "does_not_conform"),
        Change(
            "worse",
            "level",
            "kda_gate acme.fast",
            "1",
            f"0, next level 1, correct: 1 of 1 failed, the first: {CASE}",
        ),
    ]
    assert kinds(bad, good)[:2] == [("better", "verdict"), ("better", "level")]


def test_what_a_limited_run_was_not_asked_for_is_no_worse() -> None:
    slow = verdict(PASSED, implementation="acme.slow")
    new = report(verdict(PASSED, OTHER))
    new = msgspec.structs.replace(
        new,
        environment=msgspec.structs.replace(new.environment, limited_to=("acme.fast",)),
        implementations=tuple(msgspec.structs.replace(i, level=0) for i in new.implementations),
    )
    old = report(verdict(PASSED), verdict(PASSED, OTHER), slow)
    assert Change("other", "conditions", "limited_to", "", "acme.fast") in list(changes(old, new))
    assert {("other", "vanished"), ("other", "level")} <= {*kinds(old, new)}
    assert not [kind for kind in kinds(old, new) if kind[0] == "worse"]


def test_an_implementation_that_is_gone_is_worse_and_a_new_one_is_not() -> None:
    slow = verdict(PASSED, implementation="acme.slow")
    assert kinds(report(verdict(PASSED), slow), report(verdict(PASSED))) == [("worse", "vanished")]
    assert kinds(report(verdict(PASSED)), report(verdict(PASSED), slow)) == [("other", "appeared")]


def test_sources_versions_and_conditions_are_told_and_not_judged() -> None:
    def of(version: str, source_hash: str, **fields: Any) -> Report:
        about = OnTrial(
            operator="kda_gate", implementation="acme.fast", version=version, source_hash=source_hash
        )
        return report(verdict(PASSED), on_trial=(about,), environment=environment(**fields))

    found = list(changes(of("1.0", "ab"), of("1.1", "", profile="standard", versions={"torch": "2.9.0"})))
    assert found == [
        Change("other", "conditions", "profile", "quick", "standard"),
        Change("other", "version", "acme", "1.0", "absent"),
        Change("other", "version", "torch", "2.13.0", "2.9.0"),
        Change("other", "version", "kda_gate acme.fast", "1.0", "1.1"),
        Change("other", "sources", "kda_gate acme.fast", "ab", "not hashed"),
    ]


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        (0.2, 0.31, [("worse", "share of the budget")]),
        (0.31, 0.2, [("better", "share of the budget")]),
        (0.2, 0.29, []),
        (0.001, 0.04, []),
        (0.0, 0.06, [("worse", "share of the budget")]),
    ],
)
def test_a_share_of_a_budget_is_told_beyond_the_factor(
    before: float, after: float, found: list[tuple[str, str]]
) -> None:
    old, new = report(verdict(PASSED, share=before)), report(verdict(PASSED, share=after))
    assert kinds(old, new) == found


def test_shares_of_other_operands_are_not_compared() -> None:
    new = report(verdict(PASSED, share=0.9), environment=environment(seed=1))
    assert kinds(report(verdict(PASSED, share=0.2)), new) == [("other", "conditions")]


# --- the command ----------------------------------------------------------------------------------------


def diff(folder: Path, old: Report, new: Report, *options: str) -> Result:
    write_json(old, folder / "old.json")
    write_json(new, folder / "new.json")
    return CliRunner().invoke(cli, ["diff", str(folder / "old.json"), str(folder / "new.json"), *options])


def test_status_1_where_something_got_worse(tmp_path: Path) -> None:
    result = diff(tmp_path, report(verdict(PASSED)), report(verdict(FAILED)))
    assert result.exit_code == 1
    assert f"worse   newly failing: acme.fast {CASE}: passed → failed: some reason\n" in result.output
    assert result.output.splitlines()[-1] == "3 worse"


def test_status_0_where_nothing_did(tmp_path: Path) -> None:
    result = diff(tmp_path, report(verdict(FAILED)), report(verdict(PASSED)))
    assert result.exit_code == 0
    assert result.output.splitlines()[-1] == "3 better"
    result = diff(tmp_path, report(verdict(PASSED)), report(verdict(PASSED)))
    assert (result.exit_code, result.output) == (0, "nothing changed\n")


def test_the_factor_is_a_matter_of_taste(tmp_path: Path) -> None:
    old, new = report(verdict(PASSED, share=0.2)), report(verdict(PASSED, share=0.31))
    assert diff(tmp_path, old, new).exit_code == 1
    assert diff(tmp_path, old, new, "--factor", "2").exit_code == 0


@pytest.mark.parametrize("factor", ["nan", "inf", "1"])
def test_a_factor_that_could_tell_nothing_is_refused(tmp_path: Path, factor: str) -> None:
    result = diff(tmp_path, report(), report(), "--factor", factor)
    assert result.exit_code == 2
    said = f"Invalid value for '--factor': {float(factor)} is not in the range 1<x<=1000000.0."
    assert said in result.output


def test_a_report_of_another_schema_is_status_2(tmp_path: Path) -> None:
    new = msgspec.structs.replace(report(), schema=7)
    result = diff(tmp_path, report(), new)
    assert result.exit_code == 2
    assert "new.json: this report has schema version 7, this suite reads 3; read it with the suite" in (
        result.output.replace("\n", " ")
    )


def test_two_backends_are_status_2(tmp_path: Path) -> None:
    result = diff(tmp_path, report(), report(backend="other"))
    assert result.exit_code == 2
    assert "Error: the reports are of two backends, acme and other: nothing can be compared" in result.output
