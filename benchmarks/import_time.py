"""What ``import kimi_hal`` adds to ``import torch``. Prediction: at most 10 %; it imports nothing but itself."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

from benchmarks.record import keep

#: Times each import inside one process, one after the other, so that a busy machine slows all of them.
CODE = """
import json, time
def timed(code):
    start = time.perf_counter()
    exec(code, {})
    return time.perf_counter() - start
steps = {"torch": "import torch", "kimi_hal": "import kimi_hal", "hal.plan": "import kimi_hal; kimi_hal.plan"}
print(json.dumps({name: timed(code) for name, code in steps.items()}))
"""
ROUNDS = 9


def once() -> dict[str, float]:
    """Return the seconds of each import in a fresh process."""
    done = subprocess.run([sys.executable, "-c", CODE], check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


def main() -> None:
    """Measure, print and keep."""
    once()  # fills the disk cache
    rounds = [once() for _ in range(ROUNDS)]
    median = {name: statistics.median(times[name] for times in rounds) for name in rounds[0]}
    figures = {
        "torch, ms": round(median["torch"] * 1e3),
        "kimi_hal after torch, ms": round(median["kimi_hal"] * 1e3, 2),
        "kimi_hal over torch": round(statistics.median(t["kimi_hal"] / t["torch"] for t in rounds), 5),
        "hal.plan and its torch operators, ms": round(median["hal.plan"] * 1e3, 1),
    }
    print(figures)
    keep("import_time", figures)


if __name__ == "__main__":
    main()
