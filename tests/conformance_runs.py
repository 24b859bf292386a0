"""Reports that several tests look at: a run made once, also where several processes run the tests, and a made one."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kimi_hal_conformance.schema import Environment, Report, compose, read
from kimi_hal_conformance.verdict import Verdict


def once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[], Report]) -> Report:
    """Return the report that ``make`` makes, from whichever of pytest-xdist's processes comes first."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return make()
    shared = tmp_path_factory.getbasetemp().parent  # of all processes of this test run
    path = Path(shared) / f"{name}.json"
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            path.write_bytes(msgspec.json.encode(make()))
    return read(path.read_bytes())


def environment(**fields: Any) -> Environment:
    """Return where a made report was run."""
    given: dict[str, Any] = {
        "execution": "native",
        "profile": "quick",
        "seed": 0,
        "repeats": 0,
        "versions": {"acme": "1.0", "torch": "2.13.0"},
        "devices": ("The acme one",),
        "python": "3.12.3",
        "platform": "Linux-6.8-x86_64",
        "started": "2026-11-29T12:00:00+00:00",
        "seconds": 12.0,
    }
    return Environment(**{**given, **fields})


def report(*verdicts: Verdict, **fields: Any) -> Report:
    """Return a report of these verdicts on the backend acme."""
    given: dict[str, Any] = {
        "suite_version": "0.1.0",
        "backend": "acme",
        "environment": environment(),
        "on_trial": (),
        "not_implemented": (),
        "verdicts": verdicts,
    }
    return compose(**{**given, **fields})
