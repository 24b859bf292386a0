"""The worker's forks: each computes with as many threads as the machine gives, whatever its parent has computed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kimi_hal_conformance import lane as lane_module
from kimi_hal_conformance.conditions import HOST
from kimi_hal_conformance.lane import Lane
from kimi_hal_conformance.messages import Batch, Ended
from kimi_hal_conformance.turn import completed
from kimi_hal_conformance.verdict import PASSED, Verdict


def test_a_fork_computes_in_parallel_after_its_parent_has_made_the_cases() -> None:
    batch = Batch(
        implementation="reference.torch",
        device="cpu",
        hooks=HOST,
        cases=("kda_decode/tp8/rows6",),
        seed=0,
        limit=20.0,
        untimed="not here",
    )
    lane = Lane(os.environ | {"OMP_NUM_THREADS": "4", "KIMI_HAL_BACKEND": "reference"})
    try:
        (found,) = lane.run(batch)
    finally:
        lane.stop()
    assert (found.status, found.untried["speed"]) == (PASSED, "not here"), found.problems


FLOOD = """
import sys, time

for number in range(100):
    print("x" * 100_000, flush=True)
    time.sleep(0.01)
print("the end", flush=True)
"""


def test_what_a_process_prints_without_end_does_not_fill_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flooding.py").write_text(FLOOD)
    monkeypatch.setattr(lane_module, "LOG", 1_000_000)
    lane = Lane(os.environ | {"PYTHONPATH": str(tmp_path)})
    lane.module = "flooding"
    try:
        lane._start()
        mark = lane._mark()
        assert lane._receive(60.0) == Ended(code=0)
        assert lane._mark() < 8_000_000  # of 10,000,000
        assert lane._output(mark).endswith("x\nthe end")
        assert len(lane._output(10**9)) <= lane_module.OUTPUT
    finally:
        lane.stop()


def test_a_timing_that_is_lost_leaves_the_verdict() -> None:
    held = Verdict(case="kda_gate/tp8/rows1", operator="kda_gate", implementation="acme.fast", status=PASSED)
    hung, died = completed(held, None), completed(held, Ended(code=-11))
    assert (hung.status, hung.untried) == (PASSED, {"speed": "a call took more than 60 s"})
    assert (died.status, died.untried) == (PASSED, {"speed": "the process was lost while a call was timed"})
