"""Ctrl-C: what was found until then is written, says so, and is gone on from."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from conformance_runs import report
from plugin_package import installed, write

from kimi_hal_conformance import prove as proving
from kimi_hal_conformance import suite
from kimi_hal_conformance.claims import unclaimed
from kimi_hal_conformance.cli import cli
from kimi_hal_conformance.interruption import SIGNALS, once
from kimi_hal_conformance.report import summary
from kimi_hal_conformance.request import Request
from kimi_hal_conformance.runner import Outcome
from kimi_hal_conformance.schema import INTERRUPTED, read
from kimi_hal_conformance.verdict import NOT_RUN, PASSED

CASES = ("kda_gate/tp8/rows0", "kda_gate/tp8/rows1", "kda_gate/tp8/rows9")
#: Right, but at its last case it says that it is there and goes on for minutes.
KERNELS = """
import time
from pathlib import Path
from kimi_hal.reference.backend import build


def patient(ctx):
    right = build(ctx)

    def run(raw_g, raw_beta, A_log, dt_bias, *, g_out=None, beta_out=None):
        if raw_g.shape[0] == 9 and not Path("FOLDER/on").exists():
            Path("FOLDER/there").touch()
            time.sleep(100)
        return right(raw_g, raw_beta, A_log, dt_bias, g_out=g_out, beta_out=beta_out)

    return run
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    kernels = KERNELS.replace("FOLDER", str(tmp_path))
    write(tmp_path, "patience", 'IMPLEMENTATIONS = (covering("kda_gate", "patient"),)', kernels)
    with installed(tmp_path):
        yield tmp_path


def command(*arguments: str) -> list[str]:
    cases = [word for case in CASES for word in ("--case", case)]
    start = [sys.executable, "-m", "kimi_hal.cli.main", "conformance", "run", "--backend", "patience"]
    return [*start, *cases, *arguments]


def interrupted(
    folder: Path, *arguments: str, by: tuple[int, ...] = (signal.SIGINT,)
) -> tuple[int, str, float]:
    """Start a run and interrupt it in its last case; return its status, output, and seconds until its end."""
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command(*arguments),
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background shell ignores it
    ) as run:
        end = time.monotonic() + 90
        while not (folder / "there").exists() and time.monotonic() < end:
            time.sleep(0.1)
        time.sleep(0.5)
        start = time.monotonic()
        for number in by:
            run.send_signal(number)
            time.sleep(0.02)
        output = run.communicate(timeout=60)[0]
    return run.returncode, output, time.monotonic() - start


def test_an_interrupted_run_leaves_what_it_found_and_is_gone_on_from(folder: Path) -> None:
    path = folder / "r.json"
    status, output, seconds = interrupted(folder, "--json", str(path))
    assert status == 130, output
    assert seconds < 20
    assert output.splitlines()[-1] == f"go on with --resume {path}"
    found = read(path.read_bytes())
    assert found.verdict == INTERRUPTED
    assert not found.ok
    assert [v.status for v in found.verdicts] == [PASSED, PASSED, NOT_RUN]
    assert found.verdicts[2].problems == ("the run was interrupted before this case",)
    assert "is NOT proven: the run was interrupted: 2 passed, 1 not run" in summary(found)
    (folder / "on").touch()
    tried: list[str] = []
    request = Request("patience", only=CASES, resume=found)
    rest = suite.run(request, lambda v: tried.append(v.case))
    assert tried == [CASES[2]]
    assert rest.ok
    assert rest.counts()[PASSED] == 3


def test_who_is_impatient_loses_nothing(folder: Path) -> None:
    path = folder / "r.json"
    status, output, _ = interrupted(folder, "--json", str(path), by=(signal.SIGTERM, signal.SIGINT))
    assert status == 130, output
    assert [v.status for v in read(path.read_bytes()).verdicts] == [PASSED, PASSED, NOT_RUN]


def test_a_handler_that_python_cannot_put_back_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    read, before = signal.getsignal, signal.getsignal(signal.SIGHUP)
    monkeypatch.setattr(signal, "getsignal", lambda number: None if number == signal.SIGHUP else read(number))
    with once():
        assert read(signal.SIGHUP) is before
        assert read(signal.SIGTERM) is not signal.SIG_DFL
    assert read(signal.SIGHUP) is before


def test_an_interruption_behind_the_cases_loses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tried beyond the claims comes last, and may take longer than all before it."""

    def interrupt(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(suite, "run_batches", lambda batches, *given: Outcome(tuple(() for _ in batches), {}))
    monkeypatch.setattr(suite, "beyond", interrupt)
    found = suite.run(Request("reference", only=CASES, undeclared=True))
    assert found.verdict == INTERRUPTED
    assert len(found.verdicts) == len(CASES)
    attempt: Any = SimpleNamespace(batch=SimpleNamespace(cases=CASES))
    with pytest.raises(KeyboardInterrupt):
        unclaimed.passed([attempt], lambda batches: Outcome(((),), {}, interrupted=True))


@pytest.mark.parametrize(
    ("command", "of"),
    [
        (["run", "--backend", "reference"], suite),
        (["replay", CASES[0], "--backend", "reference"], suite),
        (["prove"], proving),
    ],
)
def test_what_is_interrupted_before_anything_was_found_says_so(
    monkeypatch: pytest.MonkeyPatch, command: list[str], of: ModuleType
) -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    monkeypatch.setattr(of, "run", lambda *given: os.kill(os.getpid(), signal.SIGTERM))
    result = CliRunner().invoke(cli, command)
    assert (result.exit_code, result.output) == (130, "interrupted, and nothing was kept\n")
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_without_a_file_it_says_how_to_keep_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "run", lambda *given: report(interrupted=True))
    result = CliRunner().invoke(cli, ["run", "--backend", "reference"])
    assert result.exit_code == 130
    assert result.output.splitlines()[-1] == "--json FILE would have kept it"
