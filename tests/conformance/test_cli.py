"""The command line: exit statuses and what is said about a wrong call."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from plugin_package import installed, write

from kimi_hal.cli.main import cli as whole
from kimi_hal_conformance.cli import cli
from kimi_hal_conformance.request import Request
from kimi_hal_conformance.schema import read

CASE = "kda_gate/odd/rows1"
KERNELS = """
from kimi_hal.reference.backend import build as right


def wrong(ctx):
    reference = right(ctx)

    def run(raw_g, raw_beta, A_log, dt_bias, *, g_out=None, beta_out=None):
        return reference(raw_g, raw_beta, A_log, dt_bias * 0, g_out=g_out, beta_out=beta_out)

    return run
"""


@pytest.fixture(scope="module", autouse=True)
def gates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("gates")
    both = 'IMPLEMENTATIONS = (covering("kda_gate", "right"), covering("kda_gate", "wrong"))'
    write(folder, "gates", both, KERNELS)
    write(folder, "idle", "IMPLEMENTATIONS = ()", KERNELS)
    with installed(folder):
        yield


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["run", *arguments])


def test_everything_right_is_status_0() -> None:
    result = run("--backend", "gates", "--case", CASE, "--implementation", "gates.right")
    assert result.exit_code == 0, result.output
    assert "gates (native, profile cases, " in result.output
    assert f"s), gates.right, {CASE} alone, conforms: 1 passed" in result.output


def test_one_operator_alone_is_tried_and_said(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    result = run("--backend", "idle", "--operator", "kda_gate", "--json", str(file))
    assert "s), kda_gate alone, is NOT proven: nothing ran" in result.output
    stored = read(file.read_bytes())
    assert (stored.environment.limited_to, stored.not_implemented) == (("kda_gate",), ("kda_gate",))
    result = run("--backend", "gates", "--operator", "topk_select")
    assert (result.exit_code, "gates.right" in result.output) == (1, False)


def test_what_is_named_twice_is_tried_once() -> None:
    found = Request("gates", only=(CASE, CASE), operators=("kda_gate", "kda_gate"))
    assert (found.only, found.operators) == ((CASE,), ("kda_gate",))


def test_an_operator_that_does_not_exist_is_status_2() -> None:
    result = run("--backend", "gates", "--operator", "kda_gat")
    assert result.exit_code == 2
    assert "unknown operator 'kda_gat'; did you mean 'kda_gate'?" in result.output


def test_something_wrong_is_status_1_and_both_reports_are_written(tmp_path: Path) -> None:
    files = [tmp_path / "report.json", tmp_path / "report.xml"]
    result = run("--backend", "gates", "--case", CASE, "--json", str(files[0]), "--junitxml", str(files[1]))
    assert result.exit_code == 1, result.output
    assert "failed gates.wrong kda_gate/odd/rows1\n    g_out: error" in result.output
    report = read(files[0].read_bytes())
    assert [(v.implementation, v.status) for v in report.verdicts] == [
        ("gates.right", "passed"),
        ("gates.wrong", "failed"),
    ]
    assert files[1].read_text().startswith("<?xml")


def test_nothing_to_run_is_status_1() -> None:
    result = run("--backend", "idle")
    assert result.exit_code == 1, result.output
    assert re.search(r"idle \(native, profile quick, \d+ s\) is NOT proven: nothing ran", result.output)


def test_a_backend_whose_device_is_absent_says_so() -> None:
    result = run("--backend", "ppu", "--case", CASE)
    assert result.exit_code == 1, result.output
    assert "not run, 1: no device: " in result.output


def test_an_execution_that_nobody_declares_runs_nothing() -> None:
    result = run("--backend", "gates", "--execution", "portable", "--case", CASE)
    assert result.exit_code == 1, result.output
    assert "not run, 2: it runs native; this run is portable" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--backend", "refrence"), "Error: unknown backend 'refrence'; did you mean 'reference'? Known: "),
        (
            ("--backend", "gates", "--case", "kda_gate/od/rows1"),
            "Error: unknown case 'kda_gate/od/rows1'; did you mean 'kda_gate/odd/rows1'? ",
        ),
        (
            ("--backend", "gates", "--implementation", "gates.rigth"),
            "Error: unknown implementation of gates 'gates.rigth'; did you mean 'gates.right'? Known: ",
        ),
        (
            ("--backend", "gates", "--json", "/nowhere/r.json"),
            "Error: cannot write /nowhere/r.json: there is no folder",
        ),
        (
            ("--backend", "gates", "--limit", "0"),
            "Error: Invalid value for '--limit': 0.0 is not in the range",
        ),
        (
            ("--backend", "gates", "--profile", "fast"),
            "Error: Invalid value for '--profile': 'fast' is not one of",
        ),
        ((), "Error: Missing option '--backend'"),
    ],
)
def test_a_wrong_call_is_status_2_and_names_what_is_possible(
    arguments: tuple[str, ...], message: str
) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_a_plugin_that_cannot_be_loaded_is_status_2(tmp_path: Path) -> None:
    write(tmp_path, "torn", "raise OSError('libacme.so: cannot open')", KERNELS)
    with installed(tmp_path):
        result = run("--backend", "torn")
    assert result.exit_code == 2
    assert "plugin 'torn': importing torn_plugin raised OSError: libacme.so: cannot open" in result.output


def test_kimi_hal_hands_everything_over() -> None:
    result = CliRunner().invoke(whole, ["conformance", "run", "--backend", "refrence"])
    assert result.exit_code == 2
    assert "did you mean 'reference'?" in result.output


@pytest.mark.parametrize("arguments", [("-h",), ("run", "-h"), ("run", "--help")])
def test_help_has_a_short_option_as_everywhere(arguments: tuple[str, ...]) -> None:
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0
    assert "-h, --help" in result.output
