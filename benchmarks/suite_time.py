"""What the conformance suite takes over the reference, and its proof over the mutants: CPU seconds and memory.

CPU seconds of all processes together, start included, since another machine's load does not change them: of two
cores that nothing else uses the run takes about half as many seconds of wall time. Predictions: the quick profile
120, standard 600, the proof 1,800; memory of all processes together 6 GB.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryFile

from benchmarks.record import keep

RUNS = {
    "quick": ("run", "--backend", "reference", "--profile", "quick", "--lanes", "2"),
    "standard": ("run", "--backend", "reference", "--profile", "standard", "--lanes", "2"),
    "prove --quick": ("prove", "--quick", "--lanes", "2"),
    "prove": ("prove", "--lanes", "2"),
}
#: Seconds between two looks at the memory.
INTERVAL = 0.5
#: One thread a process, as on two cores.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def measure(arguments: tuple[str, ...]) -> dict[str, float | str]:
    """Run the suite once; return what it took and its last line.

    Raises:
        RuntimeError: it did not pass, so that its time means nothing.
    """
    command = [sys.executable, "-m", "kimi_hal.cli.main", "conformance", *arguments]
    start, peak = time.perf_counter(), 0
    with TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stdout=said, env=os.environ | ENVIRONMENT)
        while True:
            ended, status, usage = os.wait4(process.pid, os.WNOHANG)  # of those that it has waited for, too
            if ended:
                break
            peak = max(peak, sum(map(resident, descendants(process.pid))))
            time.sleep(INTERVAL)
        process.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        lines = said.read().strip().splitlines()
    if process.returncode:
        raise RuntimeError(f"{' '.join(arguments)} ended with status {process.returncode}: {lines[-3:]}")
    return {
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "wall_seconds": round(time.perf_counter() - start, 1),
        "memory_mib": peak >> 10,
        "said": lines[-1],
    }


def descendants(root: int) -> list[int]:
    """Return a process and all that it and its children have started."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it is gone
                continue
            parents[int(entry.name)] = int(fields[1])
    found = [root]
    for parent in found:
        found += [child for child, its in parents.items() if its == parent]
    return found


def resident(pid: int) -> int:
    """Return the KiB that a process holds, what it shares divided among those that do."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def main() -> None:
    """Measure and keep."""
    figures: dict[str, dict[str, float | str]] = {}
    for name, arguments in RUNS.items():
        figures[name] = measure(arguments)
        print(name, figures[name], flush=True)
    keep("suite_time", figures)


if __name__ == "__main__":
    main()
