"""One case again: from the command line, from a report, and what is said of one that does not exist."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from conformance_runs import environment, report
from plugin_package import installed, write

from kimi_hal_conformance.cli import cli
from kimi_hal_conformance.replay import Given, from_report
from kimi_hal_conformance.report import write_json
from kimi_hal_conformance.schema import Report
from kimi_hal_conformance.verdict import FAILED, PASSED, Verdict

CASE = "kda_gate/odd/rows9"
KERNELS = """
from kimi_hal.reference.backend import build as right


def wrong(ctx):
    reference = right(ctx)

    def run(raw_g, raw_beta, A_log, dt_bias, *, g_out=None, beta_out=None):
        print("I am", "wrong")
        found = reference(raw_g, raw_beta, A_log, dt_bias, g_out=g_out, beta_out=beta_out)
        found[0].mul_(1.01)
        return found

    return run
"""


@pytest.fixture(scope="module", autouse=True)
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("replays")
    both = 'IMPLEMENTATIONS = (covering("kda_gate", "right"), covering("kda_gate", "wrong"))'
    write(folder, "replays", both, KERNELS)
    with installed(folder):
        yield


def replay(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["replay", *arguments])


def said(status: str, name: str, **fields: object) -> Verdict:
    given = {"replay": f"kimi-hal conformance replay {CASE} …", "seed": 5, **fields}
    return Verdict(case=CASE, operator="kda_gate", implementation=f"replays.{name}", status=status, **given)


STORED = report(
    said(PASSED, "right"),
    said(FAILED, "wrong"),
    backend="replays",
    environment=environment(seed=5, repeats=3),
)


def test_a_case_is_run_again_and_everything_is_told() -> None:
    result = replay(CASE, "--backend", "replays", "--implementation", "replays.wrong")
    assert result.exit_code == 1, result.output
    lines = result.output.splitlines()
    assert lines[0].startswith(f"failed replays.wrong {CASE} (")
    assert lines[1].startswith("    why it exists: ")
    assert lines[2].startswith("    spec: KDASpec(")
    assert any(line.startswith("    g_out: error ") for line in lines)
    assert any(
        line.startswith("    beta_out: ") and "of its budget in root mean square" in line for line in lines
    )
    at = lines.index(f"    smallest input that fails: {CASE}, row 0 of 9")
    assert lines[at + 1].startswith("    raw_g bfloat16[1, ")
    assert "    | I am wrong" in lines


def test_a_case_that_passes_is_status_0() -> None:
    result = replay(CASE, "--backend", "replays", "--implementation", "replays.right")
    assert result.exit_code == 0, result.output
    assert result.output.startswith(f"passed replays.right {CASE} (")


def test_a_report_gives_backend_implementation_seed_execution_and_repeats(tmp_path: Path) -> None:
    nothing = Given(None, None, None, None, None, None)
    (found,) = from_report(CASE, nothing, STORED, tmp_path)
    assert (found.backend, found.execution, found.implementation) == ("replays", "native", "replays.wrong")
    assert (found.seed, found.repeats, found.only) == (5, 3, (CASE,))


def test_the_command_line_goes_before_the_report(tmp_path: Path) -> None:
    given = Given(None, "portable", "replays.right", 7, 0, 9.0)
    (found,) = from_report(CASE, given, STORED, tmp_path)
    assert (found.execution, found.implementation, found.seed) == ("portable", "replays.right", 7)
    assert (found.repeats, found.limit) == (0, 9.0)


def test_another_backend_is_tried_as_a_whole_or_as_it_is_asked(tmp_path: Path) -> None:
    for name in (None, "reference.torch"):
        given = Given("reference", None, name, None, None, None)
        (found,) = from_report(CASE, given, STORED, tmp_path)
        assert (found.backend, found.implementation, found.seed) == ("reference", name or "", 5)


def test_where_all_passed_all_are_run(tmp_path: Path) -> None:
    both = report(said(PASSED, "right"), said(PASSED, "wrong"), backend="replays")
    found = from_report(CASE, Given(None, None, None, None, None, None), both, tmp_path)
    assert [r.implementation for r in found] == ["replays.right", "replays.wrong"]


def refused(tmp_path: Path, stored: Report, *arguments: str) -> str:
    write_json(stored, tmp_path / "r.json")
    result = replay(*arguments, "--report", str(tmp_path / "r.json"))
    assert result.exit_code == 2, result.output
    return result.output.replace(str(tmp_path), "").replace("\n", " ")


def test_a_case_that_the_report_lacks_names_the_nearest(tmp_path: Path) -> None:
    assert f"Error: /r.json has no case 'kda_gate/od/rows9'; did you mean '{CASE}'?" in refused(
        tmp_path, STORED, "kda_gate/od/rows9"
    )


def test_what_was_compiled_is_replayed_by_its_own_command(tmp_path: Path) -> None:
    compiled = report(said(FAILED, "wrong", replay="kimi-hal conformance run --compile-only …"))
    assert f"Error: '{CASE}' is no case that is run: `kimi-hal conformance run --compile-only …`" in refused(
        tmp_path, compiled, CASE
    )


def test_what_is_said_of_all_cases_is_no_case(tmp_path: Path) -> None:
    everything = Verdict(
        case="kda_gate/*", operator="kda_gate", implementation="replays.wrong", status=FAILED
    )
    assert "Error: 'kda_gate/*' is said of all cases of an operator: run the backend again" in refused(
        tmp_path, report(everything), "kda_gate/*"
    )


def test_an_unknown_case_names_the_nearest() -> None:
    result = replay("kda_gate/od/rows9", "--backend", "replays")
    assert result.exit_code == 2
    assert f"Error: unknown case 'kda_gate/od/rows9'; did you mean '{CASE}'? " in result.output


def test_a_case_without_a_backend_says_what_to_type() -> None:
    result = replay(CASE)
    assert result.exit_code == 2
    assert "Error: say which backend is to be tried: --backend NAME, or --report FILE" in result.output
