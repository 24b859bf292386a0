"""Where a measurement is kept: JSON with what it was measured on."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
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


#: What a cell's ``data`` says where it was measured on activations of real text; random numbers say nothing.
REAL = "real text"


def keep_cells(cells: list[dict[str, Any]]) -> None:
    """Write cells to ``results/h200/summary.json``; they replace those of their operators and data."""
    path = RESULTS / "h200" / "summary.json"
    mine = {(one["operator"], one.get("data")) for one in cells}
    kept = json.loads(path.read_text()) if path.is_file() else []
    cells = [*(one for one in kept if (one["operator"], one.get("data")) not in mine), *cells]
    path.write_text("[\n" + ",\n".join(f"  {json.dumps(one, ensure_ascii=False)}" for one in cells) + "\n]\n")


def lines_of(module: str, part: str, seen: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Run a part of a measurement in a process of its own, print what it prints, and yield its lines of JSON.

    Args:
        module: of ``benchmarks``, which measures the part that it is given.
        part: to measure.
        seen: the environment there.
    """
    command = [sys.executable, "-m", f"benchmarks.{module}", part]
    with subprocess.Popen(command, env=seen, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.startswith("{"):
                yield json.loads(line)
