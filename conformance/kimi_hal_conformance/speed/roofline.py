"""What the device can do at best, measured in this run: a large copy and a large matrix product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from kimi_hal.dispatch.hookspecs import DeviceHooks

#: Bytes that are copied, far beyond any cache; a quarter of the free memory where that is less.
COPIED = 1 << 30
#: Rows and columns of the product.
SIDE = 8192
WARM, TIMED = 3, 9


@dataclass(frozen=True)
class Roofline:
    """Bytes a second, read and written; bfloat16 operations a second."""

    bandwidth: float
    rate: float


def measured(hooks: DeviceHooks, device: str) -> Roofline:
    """Measure both on random data: on zeros a product can run faster."""
    return Roofline(bandwidth=_bandwidth(hooks, device), rate=_rate(hooks, device))


def _bandwidth(hooks: DeviceHooks, device: str) -> float:
    size = min(COPIED, hooks.memory()[0] // 4)
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds(hooks, lambda: target.copy_(source))


def _rate(hooks: DeviceHooks, device: str) -> float:
    a, b = (torch.randn(SIDE, SIDE, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    return 2 * SIDE**3 / seconds(hooks, lambda: torch.mm(a, b, out=out))


def seconds(hooks: DeviceHooks, call: Callable[[], object]) -> float:
    """Return the median time of a call that has been made before."""
    for _ in range(WARM):
        call()
    hooks.synchronize()
    return median(hooks.time(lambda: _nothing(call())) for _ in range(TIMED))


def _nothing(result: object) -> None:
    """Drop a result: what is timed returns nothing."""
