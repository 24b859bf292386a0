"""Time one call of an implementation on a device, beside the roofline that the device shows in the same run."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

from kimi_hal.dispatch.hookspecs import DeviceHooks
from kimi_hal_conformance.calls import Subject
from kimi_hal_conformance.rig import OnePlan, Rig
from kimi_hal_conformance.speed import roofline
from kimi_hal_conformance.speed.floors import FLOORS
from kimi_hal_conformance.speed.shapes import SHAPES, described, question
from kimi_hal_conformance.verdict import Speed

#: Bytes written between two calls, so that nothing of the last one is left in a cache.
EVICTED = 1 << 28
WARM, TIMED = 3, 20


class UntimedError(Exception):
    """An operator's call is not timed, and this is the reason."""


def timed(operator: str, subject: Subject) -> Speed:
    """Return how fast an operator's call is.

    Raises:
        UntimedError: the suite has no call of it to time.
    """
    if operator not in SHAPES:
        raise UntimedError(f"this suite version has no call of {operator} to time")
    asked, hooks = question(operator), subject.hooks
    rig = Rig(asked, OnePlan.of(subject))
    work = FLOORS[operator](asked.spec, asked.operands, rig.outs)
    rig.fill(asked)
    call, graph = _call(rig)
    best = roofline.measured(hooks, subject.device)
    return Speed(
        seconds=_median(hooks, call, subject.device),
        bytes=work.bytes,
        operations=work.operations,
        bandwidth=best.bandwidth,
        rate=best.rate,
        graph=graph,
        call=described(asked),
    )


def _call(rig: Rig) -> tuple[Callable[[], None], bool]:
    """Return the call as an engine makes it: the replay of a graph if that is declared and there are graphs."""
    plan = rig.ready.plan

    def launch() -> None:
        plan.run(**rig.ready.placed, **rig.outs, **rig.scratch)

    launch()
    rig.subject.hooks.synchronize()
    replay = rig.subject.hooks.capture(launch) if plan.properties.capture == "full" else None
    return (launch, False) if replay is None else (replay, True)


def _median(hooks: DeviceHooks, call: Callable[[], None], device: str) -> float:
    """Return the median time of a call that finds nothing in the caches."""
    cold = torch.empty(EVICTED, dtype=torch.uint8, device=device)
    times = []
    for number in range(WARM + TIMED):
        cold.fill_(number)
        hooks.synchronize()
        times.append(hooks.time(call))
    return median(times[WARM:])
