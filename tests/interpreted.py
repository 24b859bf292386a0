"""Run a module's checks of interpreted kernels in one child process: the switch is read when a kernel is decorated.

A check is a function ``check_<thing>`` of a module under ``tests/``. Each is one test; the child runs them all.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

TESTS = Path(__file__).parent


def names(module: str) -> list[str]:
    """Return the checks of a module, without importing it."""
    tree = ast.parse((TESTS / f"{module}.py").read_text())
    return [n.name for n in tree.body if isinstance(n, ast.FunctionDef) and n.name.startswith("check_")]


def outcomes(module: str, chosen: Sequence[str]) -> dict[str, str]:
    """Run the chosen checks under Triton's interpreter; return each one's traceback, empty where it passed."""
    env = os.environ | {"TRITON_INTERPRET": "1", "KIMI_HAL_EXECUTION": "interpreted"}
    command = [sys.executable, __file__, module, *chosen]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        return dict.fromkeys(chosen, done.stderr[-3000:])
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def outcome(check: Callable[[], None]) -> str:
    """Return the traceback of a check, empty if it passed."""
    try:
        check()
    except Exception:
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    checks = importlib.import_module(sys.argv[1])
    print(json.dumps({name: outcome(getattr(checks, name)) for name in sys.argv[2:]}))
