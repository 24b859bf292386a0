"""How far a run is: a bar in a terminal, plain lines in a log."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from kimi_hal_conformance import progress
from kimi_hal_conformance.progress import Progress
from kimi_hal_conformance.verdict import FAILED, PASSED, Verdict


def verdict(status: str, case: str) -> Verdict:
    return Verdict(case=case, operator="kda_gate", implementation="acme.fast", status=status)


def shown(terminal: bool, *verdicts: Verdict) -> str:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=200, color_system=None)
    with Progress(console, "acme") as told:
        told.begin(3)
        for found in verdicts:
            told(found)
    return stream.getvalue()


def test_a_failure_is_a_line_at_once_where_there_is_no_terminal() -> None:
    text = shown(False, verdict(PASSED, "kda_gate/a"), verdict(FAILED, "kda_gate/b"))
    assert text == "2 of 3 (1 passed, 1 failed), last: failed acme.fast kda_gate/b\n"


def test_what_is_right_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.0)
    assert shown(False, verdict(PASSED, "kda_gate/a")) == (
        "1 of 3 (1 passed), last: passed acme.fast kda_gate/a\n"
    )


def test_a_terminal_has_a_bar_with_counts_and_the_case() -> None:
    text = shown(True, verdict(PASSED, "kda_gate/a"), verdict(FAILED, "kda_gate/b"))
    assert "2/3" in text
    assert "1 passed, 1 failed" in text
    assert "acme.fast kda_gate/b" in text
