"""Work that one test process does for all of a parallel run: compiling, interpreting."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def once(key: str, produce: Callable[[], Any]) -> Any:
    """Return what ``produce`` makes, as JSON holds it; the first worker that asks makes it, the others wait."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None:
        return produce()
    folder = Path(tempfile.gettempdir()) / f"kimi-hal-tests-{run}"
    folder.mkdir(exist_ok=True)
    path = folder / f"{key}.json"
    with (folder / f"{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.is_file():
            path.write_text(json.dumps(produce()))
        return json.loads(path.read_text())
