"""A run of the suite that several tests look at: made once, also where several processes run the tests."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kimi_hal_conformance.verdict import Report, read


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
