"""False alarms: the quick profile's cases over right implementations, seed by seed. Prediction: none.

The implementations: the reference, one in float32 that rounds otherwise, and one with bfloat16 probabilities, declared
(``kimi_hal_conformance/otherwise``). ``FALSE_ALARM_SEEDS`` says how many seeds (30), ``FALSE_ALARM_SECONDS`` after how
many seconds no other seed is begun; what was done is kept after each seed.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from typing import Any

import torch

from benchmarks.record import keep
from kimi_hal_conformance.case import QUICK
from kimi_hal_conformance.cases import load
from kimi_hal_conformance.otherwise.trials import verdicts
from kimi_hal_conformance.verdict import PASSED


def main() -> None:
    """Run seeds and keep what was found."""
    torch.set_num_threads(1)
    load()
    seeds, limit = int(os.environ.get("FALSE_ALARM_SEEDS", "30")), os.environ.get("FALSE_ALARM_SECONDS")
    start, figures = time.monotonic(), _nothing()
    for seed in range(seeds):
        for verdict in verdicts(lambda case: case.runs_in(QUICK) and not case.sparse, [seed]):
            _count(figures, verdict)
        figures["seeds"] = seed + 1
        figures["seconds"] = round(time.monotonic() - start)
        keep("false_alarms", figures)
        if limit and time.monotonic() - start > float(limit):
            break


def _nothing() -> dict[str, Any]:
    return {"seeds": 0, "seconds": 0, "verdicts": Counter(), "worst": {}, "alarms": []}


def _count(figures: dict[str, Any], verdict: Any) -> None:
    name, worst = verdict.implementation, figures["worst"]
    figures["verdicts"][name] += 1
    shares = [m.norm for m in verdict.measures if m.norm is not None and not m.exact]
    shares += [m.maximum for m in verdict.measures if m.maximum is not None and not m.exact]
    worst[name] = round(max([worst.get(name, 0.0), *shares]), 3)
    if verdict.status != PASSED:
        alarm = {"case": verdict.case, "implementation": name, "seed": verdict.seed}
        figures["alarms"].append(alarm | {"problems": list(verdict.problems)})


if __name__ == "__main__":
    main()
