"""Where a measurement is kept: JSON with what it was measured on."""

from __future__ import annotations

import json
import os
import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def keep(name: str, figures: dict[str, Any]) -> Path:
    """Write figures to ``results/<name>.json`` with date, processor count and versions."""
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    about = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine,
        "python": platform.python_version(),
        "torch": version("torch"),
    }
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(about | {"figures": figures}, indent=2) + "\n")
    print(f"kept in {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")
    return path
