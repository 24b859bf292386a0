"""Run a module's checks of portable kernels in child processes: interpreted, or on a GPU.

The interpreter's switch is read when a kernel is decorated. A check is a function ``check_<thing>`` of a module under
``tests/``. Each is one test; one child runs them all. On a GPU several share them: most of their time is a compiler's.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
#: Processes that share the checks of a module on a GPU.
CHILDREN = 4


def names(module: str) -> list[str]:
    """Return the checks of a module, without importing it."""
    tree = ast.parse((TESTS / f"{module}.py").read_text())
    return [n.name for n in tree.body if isinstance(n, ast.FunctionDef) and n.name.startswith("check_")]


def outcomes(module: str, chosen: Sequence[str], device: str = "cpu") -> dict[str, str]:
    """Run the chosen checks; return each one's traceback, empty where it passed.

    On ``"cpu"`` Triton's interpreter runs the kernels.
    """
    from once import once

    found: dict[str, str] = once(f"{module}-{device}", lambda: children(module, chosen, device))
    return found


def children(module: str, chosen: Sequence[str], device: str) -> dict[str, str]:
    """Run the chosen checks in as many child processes as pay on the device."""
    count = 1 if device == "cpu" else min(CHILDREN, len(chosen))
    with ThreadPoolExecutor(count) as pool:
        parts = pool.map(lambda i: child(module, chosen[i::count], device), range(count))
    return {name: text for part in parts for name, text in part.items()}


def child(module: str, chosen: Sequence[str], device: str) -> dict[str, str]:
    """Run the chosen checks in a child process."""
    own = {"KIMI_HAL_TEST_DEVICE": device}
    if device == "cpu":
        own |= {"TRITON_INTERPRET": "1", "KIMI_HAL_EXECUTION": "interpreted"}
    command = [sys.executable, __file__, module, *chosen]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("KIMI_HAL_")}
    done = subprocess.run(command, env=inherited | own, capture_output=True, text=True, check=False)
    if done.returncode:
        return dict.fromkeys(chosen, done.stderr[-3000:])
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def device() -> str:
    """Return the device that a check runs kernels on."""
    return os.environ.pop("KIMI_HAL_TEST_DEVICE", "cpu")


def placed(value: Any, where: str) -> Any:
    """Return a tensor's copy on a device, with its strides and its alignment."""
    import torch

    if not isinstance(value, torch.Tensor) or where == "cpu":
        return value
    reach = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
    first = value.data_ptr() % 256 // value.element_size()
    flat = torch.zeros(first + (reach if value.numel() else 0), dtype=value.dtype, device=where)
    there = flat.as_strided(value.shape, value.stride(), first if value.numel() else 0)
    return there.copy_(value)


def on_device(run: Callable[..., Any], where: str) -> Callable[..., Any]:
    """Return ``run`` for tensors of the host: operands are copied to the device, what it changed back."""
    if where == "cpu":
        return run

    def call(*args: Any, **kwargs: Any) -> Any:
        there = [placed(a, where) for a in args]
        named = {name: placed(a, where) for name, a in kwargs.items()}
        results = run(*there, **named)
        for here, away in (*zip(args, there, strict=True), *((kwargs[n], named[n]) for n in named)):
            if here is not None and here is not away:
                here.copy_(away)
        back = {id(away): kwargs[name] for name, away in named.items()}
        several = results if isinstance(results, tuple) else (results,)
        home = tuple(r if r is None else back.get(id(r), r.cpu()) for r in several)
        return home if isinstance(results, tuple) else home[0]

    return call


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
