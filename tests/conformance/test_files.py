"""Reports reach their files: before anything is printed, whole or not at all, each for itself."""

from __future__ import annotations

import io
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner
from conformance_runs import report

from kimi_hal_conformance import files, suite
from kimi_hal_conformance import report as output
from kimi_hal_conformance.cli import cli
from kimi_hal_conformance.schema import Report, read
from kimi_hal_conformance.terminal import Terminal
from kimi_hal_conformance.verdict import PASSED, Verdict

FOUND = report(
    Verdict(
        case="kda_gate/tp8/rows1", operator="kda_gate", implementation="acme.fast", status=PASSED, level=1
    )
)


@contextmanager
def at_most(size: int) -> Iterator[None]:
    """Let no file grow beyond so many bytes, as a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_that_cannot_be_written_keeps_what_it_held(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_bytes(b"before")
    with at_most(100), pytest.raises(OSError, match="File too large"):
        files.write(path, b"x" * 1000)
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_and_a_mode_stay(tmp_path: Path) -> None:
    path, link = tmp_path / "r.json", tmp_path / "latest.json"
    path.write_bytes(b"before")
    path.chmod(0o640)
    link.symlink_to(path)
    files.write(link, b"after")
    assert (link.is_symlink(), path.read_bytes(), path.stat().st_mode & 0o777) == (True, b"after", 0o640)


def test_what_cannot_be_written_takes_no_other_with_it(tmp_path: Path) -> None:
    full, page = Path("/dev/full"), tmp_path / "r.xml"
    lost = files.unwritten(FOUND, [(output.write_json, full), (output.write_junit, page)])
    assert lost == {full: "cannot write /dev/full: No space left on device"}
    assert page.read_text().startswith("<?xml")


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Report:
    """Let every run find the same."""
    monkeypatch.setattr(suite, "run", lambda *given: FOUND)
    return FOUND


@pytest.mark.usefixtures("found")
def test_a_report_that_is_lost_is_said_and_is_status_1(tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    result = CliRunner().invoke(cli, ["run", "--backend", "acme", "--json", "/dev/full", "--html", str(page)])
    assert result.exit_code == 1
    assert result.output.splitlines()[-1] == "cannot write /dev/full: No space left on device"
    assert page.exists()


def test_files_are_there_before_anything_is_printed(
    found: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*given: object) -> None:
        raise OSError("the terminal is gone")

    monkeypatch.setattr(output, "print_report", gone)
    path = tmp_path / "r.json"
    CliRunner().invoke(cli, ["run", "--backend", "acme", "--json", str(path)])
    assert read(path.read_bytes()) == found


def test_a_pipe_that_nobody_reads_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        terminal = Terminal()
        terminal.print("nobody reads this")
        terminal.print("nor this")
        assert terminal.quiet


def test_a_terminal_without_a_letter_prints_another(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(kept, "ascii"))
    terminal = Terminal()
    terminal.print("naïve → done")
    sys.stdout.flush()
    assert kept.getvalue() == b"na?ve ? done\n"
