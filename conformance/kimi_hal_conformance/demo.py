"""``make demo``: the workload, one decode step on it, the suite over every backend that runs here, the matrix.

Every step is a command that a user could type; it is printed before it runs.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from kimi_hal.dispatch.contract import Probe
from kimi_hal.dispatch.loader import Loaded, load
from kimi_hal.settings import Settings
from kimi_hal_conformance.schedule import lacking

BIN = Path(sys.executable).parent
#: Columns where nobody looks at a terminal: in a log or a pipe.
WIDTH = "110"

INTRODUCTION = (
    "Each step is a command that you can type yourself. The first run takes less than ten minutes on two cores, "
    "later ones find the workload in the cache. No accelerator is needed: where there is none, portable kernels run "
    "in Triton's interpreter on the CPU."
)


def main() -> int:
    """Run the demo; the exit status is 0 only if every command's was."""
    if not sys.stdout.isatty():
        os.environ.setdefault("COLUMNS", WIDTH)
    console = Console()
    console.print(INTRODUCTION, highlight=False)
    begin = time.perf_counter()
    failed = [shlex.join(command) for title, command in steps() if not run(title, command, console)]
    minutes, seconds = divmod(round(time.perf_counter() - begin), 60)
    console.print(f"\n{minutes} min {seconds} s in all", highlight=False)
    for command in failed:
        console.print(f"failed: {command}", style="red", markup=False)
    return 1 if failed else 0


def steps() -> Iterator[tuple[str, Sequence[str]]]:
    """Yield each step's title and command."""
    yield "What is here", ("kimi-hal", "doctor")
    yield (
        "Real text through a trained encoder, widened to the model's shapes",
        (*("python", "-m", "kimi_hal_conformance.workload", "build"),),
    )
    yield (
        "One decode step of a DSA, a KDA and a MoE layer over 32K tokens of that text",
        (*("kimi-hal", "step", "--picks", "12"),),
    )
    for backend, execution in executable():
        yield (
            f"Does {backend} keep the contract?",
            (*("kimi-hal", "conformance", "run", "--backend", backend, "--execution", execution),),
        )
    yield "Who implements what", ("kimi-hal", "list")


def executable() -> Iterator[tuple[str, str]]:
    """Yield every backend that this machine can execute, and how: natively, or interpreted on the CPU."""
    registry = load(Settings(), strict=False)
    for name, loaded in sorted(registry.backends.items(), key=lambda item: (item[0] != "reference", item[0])):
        mode = way(loaded, registry.probe(name))
        if mode:
            yield name, mode


def way(loaded: Loaded, probe: Probe) -> str:
    """Return how a backend's implementations can run here, or an empty string."""
    modes = {
        mode
        for implementation in loaded.implementations
        for mode in implementation.execution
        if not lacking(implementation, loaded, probe)
    }
    if probe.present and "native" in modes:
        return "native"
    return "interpreted" if "interpreted" in modes else ""


def run(title: str, command: Sequence[str], console: Console) -> bool:
    """Print and run one command; tell whether it succeeded."""
    console.print()
    console.rule(f"[bold]{title}")
    console.print(f"$ {shlex.join(command)}\n", highlight=False, style="cyan")
    program = sys.executable if command[0] == "python" else str(BIN / command[0])
    return subprocess.run([program, *command[1:]]).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
