"""Time one candidate: plan it, run it into buffers that are there, through a graph where it can stand in one."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kimi_hal.dispatch.hookspecs import DeviceHooks
from kimi_hal.dispatch.plan import Plan
from kimi_hal.dispatch.planning import Wanted, make
from kimi_hal.ops.operator import get
from kimi_hal.step.measure import scratch
from kimi_hal.tuning.operands import Work

#: Bytes that are written between two calls, so that none finds its operands in a cache.
FLUSH = 256 << 20
#: What no result holds, by dtype: a row of it was not written.
NOTHING = {torch.float32: math.nan, torch.bfloat16: math.nan, torch.int32: -(1 << 31)}
#: Calls that are timed at least and at most.
CALLS = (5, 60)


class Flush:
    """Memory that is written between calls; none on the host, whose caches an engine's own work turns over."""

    def __init__(self, device: str) -> None:
        self.room = None if device.startswith("cpu") else torch.empty(FLUSH, dtype=torch.uint8, device=device)

    def __call__(self) -> None:
        """Write it all."""
        if self.room is not None:
            self.room.zero_()


def timed(wanted: Wanted, work: Work, hooks: DeviceHooks, budget: float, flush: Callable[[], None]) -> float:
    """Plan a candidate, time it, and return the median microseconds of a call.

    Args:
        wanted: names the implementation and its configuration.
        work: what it computes.
        hooks: the device's.
        budget: seconds of device time that its calls may take together, but for the least number of calls.
        flush: what is done before each call.

    Raises:
        KimiHalError: it cannot be planned.
        RuntimeError: whatever the device raises.
    """
    plan = make(wanted)
    call = _ready(plan, work, hooks)
    call()
    least, most = CALLS
    times: list[float] = []
    while len(times) < least or (sum(times) < budget and len(times) < most):
        flush()
        times.append(hooks.time(call))
    return statistics.median(times) * 1e6


def _ready(plan: Plan, work: Work, hooks: DeviceHooks) -> Callable[[], None]:
    """Return a call into given buffers, as a graph's replay where the plan promises that."""
    op = get(plan.operator.name)
    given: dict[str, Any] = dict(work.operands) | scratch(plan, op, _present(work.operands))
    results = op.results(plan.run(**given))
    given |= {out.keyword: result for out, result in zip(op.outs, results, strict=True)}

    def call() -> None:
        plan.run(**given)

    _spoil(results)
    call()
    hooks.synchronize()
    _require_written(plan.name, results)
    if plan.properties.capture == "full":
        replay = hooks.capture(call)
        if replay is not None:
            return replay
    return call


def _spoil(results: Sequence[Any]) -> None:
    for result in results:
        if result.dtype in NOTHING:
            result.fill_(NOTHING[result.dtype])


def _require_written(name: str, results: Sequence[Any]) -> None:
    """Refuse a candidate that leaves out rows: it would look fast. Operands have numbers and keys for every row."""
    for result in results:
        if result.dtype not in NOTHING or not result.numel():
            continue
        nothing = result.isnan() if result.is_floating_point() else result.eq(NOTHING[result.dtype])
        rows = int(nothing.reshape(result.shape[0], -1).all(1).sum())
        if rows:
            raise RuntimeError(f"{name} leaves {rows} of {result.shape[0]} rows unwritten")


def _present(operands: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in operands.items() if value is not None}
