"""The model's figures as records; ``figures.json`` says where each comes from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

PATH = Path(__file__).parent / "figures.json"


@dataclass(frozen=True)
class Device:
    """One rank's device.

    Attributes:
        name: its key in the file.
        memory: GB/s that a copy reaches, read and written together.
        link: nominal GB/s each way to the ranks of its domain.
        fp8: TFLOP/s of an FP8 matrix product.
        bf16: TFLOP/s of a bfloat16 one.
        domain: ranks that the links join.
        network: nominal GB/s each way beyond the domain.
    """

    name: str
    memory: float
    link: float
    fp8: float
    bf16: float
    domain: int
    network: float


@dataclass(frozen=True)
class Transport:
    """How ranks send: latency of two ranks in µs, its growth a doubling, and the rate of what follows.

    Attributes:
        name: its key in the file.
        latency: µs of a small message between two ranks.
        doubling: µs more with each doubling of the ranks.
        rate: share of the nominal link rate; ``None``: as ``curve`` says.
        curve: (bytes, µs) on two ranks of an H200.
    """

    name: str
    latency: float
    doubling: float
    rate: float | None
    curve: tuple[tuple[float, float], ...] | None


@cache
def figures() -> dict[str, Any]:
    """Return the whole file."""
    read: dict[str, Any] = json.loads(PATH.read_text())
    return read


def device(name: str) -> Device:
    """Return a device by its key."""
    return Device(name=name, **_without_source(figures()["devices"][name]))


def transport(name: str) -> Transport:
    """Return a transport by its key."""
    values = _without_source(figures()["transports"][name])
    curve = values.pop("curve")
    return Transport(name=name, curve=curve and tuple(map(tuple, curve)), **values)


def kernel(name: str) -> dict[str, float]:
    """Return a kernel's figures by its key."""
    return _without_source(figures()["kernels"][name])


def measured(name: str) -> list[list[float]]:
    """Return what a kernel's figures were taken from: sizes and, last, µs on an H200."""
    points: list[list[float]] = figures()["kernels"][name]["measured"]
    return points


def _without_source(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in ("source", "measured")}
