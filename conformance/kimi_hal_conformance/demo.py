"""``make demo``: the workload, one decode step on it, the suite over every backend that runs here, the matrix.

Every step is a command that a user could type; it is printed before it runs.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from kimi_hal.dispatch.contract import Probe
from kimi_hal.dispatch.loader import Loaded, load
from kimi_hal.settings import Settings

BIN = Path(sys.executable).parent
WIDTH = "110"


def main() -> int:
    """Run the demo; the exit status is 0 only if every command's was."""
    console = Console()
    failed = [
        line
        for title, command in steps()
        if not run(title, command, console)
        for line in [shlex.join(command)]
    ]
    if failed:
        console.print(f"[red]failed: {'; '.join(failed)}")
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
    modes = {mode for implementation in loaded.implementations for mode in implementation.execution}
    if probe.present and "native" in modes:
        return "native"
    return "interpreted" if "interpreted" in modes else ""


def run(title: str, command: Sequence[str], console: Console) -> bool:
    """Print and run one command; tell whether it succeeded."""
    console.rule(f"[bold]{title}")
    console.print(f"$ {shlex.join(command)}\n", highlight=False, style="cyan")
    program = sys.executable if command[0] == "python" else str(BIN / command[0])
    return subprocess.run([program, *command[1:]], env=os.environ | {"COLUMNS": WIDTH}).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
