"""Waivers: what admits a failure, what is a failure itself, and what is said of a file that is wrong."""

from __future__ import annotations

import datetime
import io
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import conformance_runs
import msgspec
import pytest
from click.testing import CliRunner
from plugin_package import installed, write
from rich.console import Console

from kimi_hal.errors import KimiHalError
from kimi_hal_conformance import __version__, waivers
from kimi_hal_conformance import report as output
from kimi_hal_conformance.cases import load
from kimi_hal_conformance.cli import cli
from kimi_hal_conformance.schema import Report, read
from kimi_hal_conformance.verdict import (
    CRASHED,
    FAILED,
    HUNG,
    NOT_RUN,
    PASSED,
    REFUSED,
    WAIVED,
    Verdict,
    Waiver,
)

CASE = "kda_gate/odd/rows1"
LINK = "https://example.com/issues/7"
TODAY = datetime.date(2026, 11, 29)
RIGHT = {
    "case": f'"{CASE}"',
    "implementation": '"acme.fast"',
    "reason": '"flushes subnormals"',
    "link": f'"{LINK}"',
    "expires": "2027-03-31",
    "suite": '"0.1.0"',
}


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    load()


def waiver(**fields: Any) -> Waiver:
    given = {"case": CASE, "implementation": "acme.fast", "reason": "flushes subnormals", "link": LINK}
    dated = {"expires": datetime.date(2027, 3, 31), "suite": "0.1.0"}
    return Waiver(**{**given, **dated, **fields})


def verdict(status: str, implementation: str = "acme.fast", case: str = CASE) -> Verdict:
    problems = () if status == PASSED else ("some reason",)
    operator = case.partition("/")[0]
    return Verdict(
        case=case, operator=operator, implementation=implementation, status=status, problems=problems
    )


def apply(given: list[Waiver], *verdicts: Verdict) -> tuple[list[str], list[str]]:
    """Return the statuses, and each waiver's problem or note."""
    found, judged = waivers.apply(given, verdicts, suite="0.1.0", today=TODAY)
    return [v.status for v in found], [w.problem or w.note for w in judged]


def report(given: list[Waiver], *verdicts: Verdict) -> Report:
    found, judged = waivers.apply(given, verdicts, suite="0.1.0", today=TODAY)
    return conformance_runs.report(*found, waivers=judged)


def text(report: Report) -> list[str]:
    stream = io.StringIO()
    output.print_report(report, Console(file=stream, width=100, color_system=None))
    return stream.getvalue().splitlines()


# --- what a waiver does -----------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [FAILED, CRASHED, HUNG])
def test_a_live_waiver_admits_whatever_did_not_pass(status: str) -> None:
    found, judged = waivers.apply([waiver()], [verdict(status)], suite="0.1.0", today=TODAY)
    assert (found[0].status, found[0].was, found[0].problems) == (WAIVED, status, ("some reason",))
    assert found[0].waiver == f"flushes subnormals ({LINK}, until 2027-03-31)"
    assert (judged[0].covers, judged[0].problem, judged[0].note) == (("acme.fast",), "", "")


def test_a_waiver_covers_its_own_case_and_implementation_alone() -> None:
    others = verdict(FAILED, "acme.slow"), verdict(FAILED, case="kda_gate/odd/rows6")
    assert apply([waiver()], verdict(FAILED), *others) == ([WAIVED, FAILED, FAILED], [""])


def test_without_an_implementation_it_covers_all_that_fail() -> None:
    given = [waiver(implementation="")]
    assert apply(given, verdict(FAILED), verdict(HUNG, "acme.slow")) == ([WAIVED, WAIVED], [""])


CLAIM = "kda_gate/claims/f28a965a"


def test_a_claim_can_be_waived_by_the_id_that_the_report_gives_it(tmp_path: Path) -> None:
    path = tmp_path / "waivers.toml"
    path.write_text(
        "[[waiver]]\n" + "".join(f"{k} = {v}\n" for k, v in {**RIGHT, "case": f'"{CLAIM}"'}.items())
    )
    (given,) = waivers.read(path)
    assert apply([given], verdict(FAILED, case=CLAIM)) == ([WAIVED], [""])
    said = "it matches nothing: no implementation that was tried makes such a claim in this profile"
    assert apply([given], verdict(PASSED)) == ([PASSED], [said])
    assert apply([given], verdict(PASSED, case=CLAIM)) == ([PASSED], ["acme.fast passes: remove it"])


def test_what_is_said_of_a_whole_operator_can_be_waived() -> None:
    assert apply([waiver(case="kda_gate/*")], verdict(FAILED, case="kda_gate/*")) == ([WAIVED], [""])


def test_its_last_day_counts() -> None:
    assert apply([waiver(expires=TODAY)], verdict(FAILED)) == ([WAIVED], [""])


# --- a waiver that is a failure itself --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "verdicts", "problem"),
    [
        (
            {"expires": datetime.date(2026, 11, 28)},
            [verdict(FAILED)],
            "it expired on 2026-11-28: remove it, or look at the failure again and renew it",
        ),
        (
            {"suite": "0.0.9"},
            [verdict(FAILED)],
            "it is for suite 0.0.9, this is 0.1.0: look at the failure again and renew it",
        ),
        ({}, [verdict(PASSED)], "acme.fast passes: remove it"),
        (
            {},
            [verdict(REFUSED)],
            "it matches nothing that ran: acme.fast does not claim the case; remove it",
        ),
        (
            {"implementation": "acme.fats"},
            [verdict(FAILED)],
            "it matches nothing: no implementation 'acme.fats' of the operator was tried; "
            "did you mean 'acme.fast'? Tried: acme.fast",
        ),
        (
            {},
            [verdict(FAILED, case="kda_gate/odd/rows6")],
            "it matches nothing: the case was not asked for, or nothing implements its operator here",
        ),
    ],
)
def test_a_waiver_that_is_stale_or_not_needed_waives_nothing_and_is_a_failure(
    given: dict[str, Any], verdicts: list[Verdict], problem: str
) -> None:
    assert apply([waiver(**given)], *verdicts) == ([v.status for v in verdicts], [problem])
    assert not report([waiver(**given)], *verdicts, verdict(PASSED, case="kda_gate/odd/rows9")).ok


def test_one_for_all_implementations_must_not_hide_one_that_passes() -> None:
    found = apply([waiver(implementation="")], verdict(FAILED), verdict(PASSED, "acme.slow"))
    assert found == ([WAIVED, PASSED], ["acme.slow passes: name the implementation that fails"])


def test_a_waiver_that_repeats_another_is_a_failure() -> None:
    found = apply([waiver(), waiver(implementation="")], verdict(FAILED))
    assert found == ([WAIVED], ["", "it repeats another: acme.fast is waived already; remove one"])


@pytest.mark.parametrize("case", [CASE, "kda_gate/*"])
def test_a_waiver_whose_case_this_run_left_out_is_not_judged_and_says_so(case: str) -> None:
    found = report([waiver()], verdict(NOT_RUN, case=case), verdict(PASSED, case="kda_gate/odd/rows6"))
    assert found.ok
    assert f"waiver of {CASE} by acme.fast: not judged, its case did not run: some reason" in text(found)


# --- what a report says -----------------------------------------------------------------------------------


def test_a_run_whose_failures_are_all_waived_conforms_and_names_each() -> None:
    lines = text(report([waiver()], verdict(FAILED), verdict(PASSED, "acme.slow")))
    assert f"waived (failed) acme.fast {CASE}: flushes subnormals ({LINK}, until 2027-03-31)" in lines
    assert lines[-1] == "acme (native, profile quick, 12 s) conforms, 1 of 1 operators: 1 passed, 1 waived"


def test_a_bad_waiver_is_named_and_the_run_does_not_conform() -> None:
    lines = text(report([waiver()], verdict(PASSED)))
    assert f"waiver of {CASE} by acme.fast: acme.fast passes: remove it" in lines
    assert lines[-1] == (
        "acme (native, profile quick, 12 s) does NOT conform: 1 waiver stale or not needed: 1 passed"
    )


def test_waivers_alone_prove_nothing() -> None:
    found = report([waiver()], verdict(FAILED))
    assert not found.ok
    assert text(found)[-1] == "acme (native, profile quick, 12 s) is NOT proven: nothing passed: 1 waived"


def test_waivers_come_back_from_json() -> None:
    found = report([waiver()], verdict(FAILED), verdict(PASSED, "acme.slow"))
    assert read(msgspec.json.encode(found)) == found


def test_junit_skips_what_is_waived_and_fails_a_bad_waiver(tmp_path: Path) -> None:
    bad = waiver(case="kda_gate/odd/rows6")
    passed = verdict(PASSED, case="kda_gate/odd/rows6")
    output.write_junit(report([waiver(), bad], verdict(FAILED), passed), tmp_path / "r.xml")
    cases, own = ET.parse(tmp_path / "r.xml").getroot().findall("testsuite")
    assert (cases.get("skipped"), cases.get("failures")) == ("1", "0")
    assert cases[0][0].get("message") == f"waived: flushes subnormals ({LINK}, until 2027-03-31)"
    assert (own.get("name"), own.get("tests"), own.get("failures")) == ("waivers", "2", "1")
    assert own[1][0].get("message") == "acme.fast passes: remove it"


# --- the file ---------------------------------------------------------------------------------------------


def toml(**changed: str | None) -> str:
    fields = {name: value for name, value in {**RIGHT, **changed}.items() if value is not None}
    return "[[waiver]]\n" + "".join(f"{name} = {value}\n" for name, value in fields.items())


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "waivers.toml"
    path.write_text(toml() + toml(implementation=None))
    assert waivers.read(path) == (waiver(), waiver(implementation=""))


def test_a_file_without_waivers_is_none(tmp_path: Path) -> None:
    path = tmp_path / "waivers.toml"
    path.write_text("# none\n")
    assert waivers.read(path) == ()


KNOWN = "Known: case, implementation, reason, link, expires, suite"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            toml(expires=None, expiers="2027-03-31"),
            f"FILE: waiver 1 has an unknown key 'expiers'; did you mean 'expires'? {KNOWN}",
        ),
        (
            toml() + toml(link=None, reason=None),
            "FILE: waiver 2 lacks reason, link: all keys but implementation are needed",
        ),
        (
            toml(expires='"2027-03-31"'),
            "FILE: waiver 1: expires must be a date without quotes, as 2027-03-31; got '2027-03-31'",
        ),
        (toml(reason='" "'), "FILE: waiver 1: reason must be a text in quotes that is not empty; got ' '"),
        (toml(suite="1"), "FILE: waiver 1: suite must be a text in quotes that is not empty; got 1"),
        (
            toml().replace("[[waiver]]", "[[waivers]]"),
            "FILE has an unknown table 'waivers'; did you mean 'waiver'? Known: waiver",
        ),
        (
            toml().replace("[[waiver]]", "[waiver]"),
            "FILE: write [[waiver]], with two brackets, above each waiver",
        ),
        ("waiver = [1]", "FILE: waiver 1 is no table: write [[waiver]] above each waiver"),
        ("waiver =", "FILE is no TOML: Invalid value (at end of document)"),
    ],
)
def test_a_file_that_is_wrong_gets_a_sentence(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "waivers.toml"
    path.write_text(content)
    with pytest.raises(KimiHalError) as error:
        waivers.read(path)
    assert str(error.value) == message.replace("FILE", str(path))


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("kda_gate/od/rows1", "unknown case 'kda_gate/od/rows1'; did you mean 'kda_gate/odd/rows1'?"),
        ("kda_gat/*", "unknown operator 'kda_gat'; did you mean 'kda_gate'?"),
    ],
)
def test_a_case_that_does_not_exist_is_refused_with_the_nearest(
    tmp_path: Path, case: str, message: str
) -> None:
    path = tmp_path / "waivers.toml"
    path.write_text(toml(case=f'"{case}"'))
    with pytest.raises(KimiHalError) as error:
        waivers.read(path)
    assert str(error.value).startswith(message)


def test_a_file_that_is_not_there_gets_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(KimiHalError) as error:
        waivers.read(tmp_path / "none.toml")
    assert str(error.value) == f"cannot read {tmp_path / 'none.toml'}: No such file or directory"


# --- the command line -------------------------------------------------------------------------------------

KERNELS = """
from kimi_hal.reference.backend import build as right


def wrong(ctx):
    reference = right(ctx)

    def run(raw_g, raw_beta, A_log, dt_bias, *, g_out=None, beta_out=None):
        return reference(raw_g, raw_beta, A_log, dt_bias * 0, g_out=g_out, beta_out=beta_out)

    return run
"""


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("gated")
    both = 'IMPLEMENTATIONS = (covering("kda_gate", "right"), covering("kda_gate", "wrong"))'
    write(folder, "gated", both, KERNELS)
    with installed(folder):
        yield


@pytest.mark.parametrize(
    ("implementation", "status", "line"),
    [
        ("gated.wrong", 0, f"waived (failed) gated.wrong {CASE}: flushes subnormals"),
        ("gated.right", 1, f"waiver of {CASE} by gated.right: gated.right passes: remove it"),
    ],
)
@pytest.mark.usefixtures("gated")
def test_the_exit_status_goes_by_what_is_waived(
    tmp_path: Path, implementation: str, status: int, line: str
) -> None:
    path = tmp_path / "waivers.toml"
    path.write_text(
        toml(implementation=f'"{implementation}"', suite=f'"{__version__}"', expires="9999-12-31")
    )
    arguments = ["run", "--backend", "gated", "--case", CASE, "--waivers", str(path)]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == status, result.output
    assert line in result.output


def test_a_wrong_file_of_waivers_is_status_2_before_anything_runs(tmp_path: Path) -> None:
    path = tmp_path / "waivers.toml"
    path.write_text(toml(reson='"x"'))
    result = CliRunner().invoke(cli, ["run", "--backend", "reference", "--waivers", str(path)])
    assert result.exit_code == 2
    assert "has an unknown key 'reson'; did you mean 'reason'?" in result.output
