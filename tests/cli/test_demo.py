"""What ``make demo`` runs, in which order, and what it says when a command fails."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from rich.console import Console

from kimi_hal.dispatch.contract import Probe

demo = pytest.importorskip("kimi_hal_conformance.demo", reason="the suite is not installed: there is no demo")


def test_the_demo_goes_from_what_is_here_to_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "executable", lambda: [("reference", "native"), ("acme", "interpreted")])
    commands = [" ".join(command) for _, command in demo.steps()]
    assert commands == [
        "kimi-hal doctor",
        "python -m kimi_hal_conformance.workload build",
        "kimi-hal step --picks 12",
        "kimi-hal conformance run --backend reference --execution native",
        "kimi-hal conformance run --backend acme --execution interpreted",
        "kimi-hal list",
    ]


@pytest.mark.parametrize(
    ("ways", "present", "expected"),
    [
        (("native", "interpreted"), True, "native"),
        (("native", "interpreted"), False, "interpreted"),
        (("native",), False, ""),
        ((), True, ""),
    ],
)
def test_a_backend_runs_on_its_device_or_else_interpreted(
    ways: tuple[str, ...], present: bool, expected: str
) -> None:
    implementation = SimpleNamespace(name="torch", execution=ways, capabilities=())
    backend = SimpleNamespace(facts=())
    loaded = SimpleNamespace(backend=backend, implementations=[implementation] if ways else [])
    assert demo.way(loaded, Probe(present=present, why="no file")) == expected


def test_every_step_runs_and_a_failed_one_is_named_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    monkeypatch.setattr(
        demo, "steps", lambda: [("One", ("python", "-c", "1/0")), ("Two", ("kimi-hal", "list"))]
    )
    ran = []

    def run(command: Sequence[str]) -> SimpleNamespace:
        ran.append(command)
        return SimpleNamespace(returncode=int("1/0" in command))

    monkeypatch.setattr(demo.subprocess, "run", run)
    assert demo.main() == 1
    assert [command[1:] for command in ran] == [["-c", "1/0"], ["list"]]
    assert ran[0][0] == sys.executable
    assert capsys.readouterr().out.endswith("0 min 0 s in all\nfailed: python -c 1/0\n")


def test_a_command_is_printed_before_it_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo.subprocess, "run", lambda command: SimpleNamespace(returncode=0))
    assert demo.run("Who implements what", ("kimi-hal", "list"), Console(width=80))
    assert "$ kimi-hal list\n" in capsys.readouterr().out
