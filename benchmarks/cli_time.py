"""Wall time of the command lines that import no torch. Prediction: under 0.3 s each on an idle machine."""

from __future__ import annotations

import subprocess
import sys
import time

from benchmarks.record import keep

COMMANDS = (("--help",), ("list",), ("doctor", "--no-probe"))
REPEATS = 7


def measure(command: tuple[str, ...]) -> float:
    """Return the median seconds of a command."""
    taken = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "kimi_hal.cli.main", *command], check=True, capture_output=True)
        taken.append(time.perf_counter() - start)
    return sorted(taken)[REPEATS // 2]


def main() -> None:
    """Measure and keep."""
    figures = {" ".join(command): round(measure(command), 3) for command in COMMANDS}
    print(figures)
    keep("cli_time", figures)
