"""The suite over this backend, on the CPU: every claim of `implementations.py` is tried.

On a machine with the device, `kimi-hal conformance run --backend trainium` runs the same cases on it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kimi_hal_trainium.implementations import IMPLEMENTATIONS


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run the suite once and return its report."""
    path: Path = tmp_path_factory.mktemp("conformance") / "report.json"
    command = [sys.executable, "-m", "kimi_hal.cli.main", "conformance", "run"]
    command += ["--backend", "trainium", "--execution", "interpreted", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert path.is_file(), done.stdout + done.stderr
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_no_claim_is_broken(report: dict[str, Any]) -> None:
    broken = [failure for tested in report["implementations"] for failure in tested["failures"]]
    lines = [f"{f['case']}: {'; '.join(f['problems'])}\n  {f['replay']}" for f in broken]
    assert not broken, "\n".join(lines)


@pytest.mark.parametrize("operator", sorted({i.operator for i in IMPLEMENTATIONS}))
def test_every_operator_is_tried(report: dict[str, Any], operator: str) -> None:
    mine = [tested for tested in report["implementations"] if tested["operator"] == operator]
    assert sum(tested["passed"] for tested in mine) > 0, mine
