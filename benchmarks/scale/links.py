"""The time of one message among W ranks, in µs: latency, then bytes over the links, then what leaves the domain."""

from __future__ import annotations

import math
from itertools import pairwise

from benchmarks.scale.figures import Device, Transport, device, figures


def gather(on: Device, how: Transport, world: int, nbytes: float) -> float:
    """Return the time in which every rank gets the ``nbytes`` of every other.

    Beyond a domain of g ranks the message goes in two stages: each rank gets what its peers of the same place in
    other domains have, then all of that is shared in the domain.
    """
    inside = min(world, on.domain)
    domains = -(-world // inside)
    time = latency(how, inside) + stream(on, how, (inside - 1) * domains * nbytes)
    return time + _beyond(on, domains, (domains - 1) * nbytes)


def exchange(on: Device, how: Transport, world: int, nbytes: float) -> float:
    """Return the time of an all-to-all in which a rank sends ``nbytes`` to each other rank."""
    inside = min(world, on.domain)
    domains = -(-world // inside)
    time = latency(how, inside) + stream(on, how, (inside - 1) * nbytes)
    return time + _beyond(on, domains, (world - inside) * nbytes)


def latency(how: Transport, world: int) -> float:
    """Return the time of an empty message."""
    return how.latency + how.doubling * max(0.0, math.log2(world) - 1) if world > 1 else 0.0


def stream(on: Device, how: Transport, received: float) -> float:
    """Return the time that ``received`` bytes add to an empty message."""
    if how.curve is None:
        assert how.rate is not None
        return received / (on.link * how.rate) / 1e3
    return _measured(how.curve, received) * device("h200").link / on.link


def _measured(curve: tuple[tuple[float, float], ...], received: float) -> float:
    """Return what bytes add on the measured curve: straight lines between its points, its last slope beyond."""
    (first, base), (size, time) = curve[0], curve[-1]
    if received <= first:
        return 0.0
    for (x0, y0), (x1, y1) in pairwise(curve):
        if received <= x1:
            return y0 - base + (y1 - y0) * (received - x0) / (x1 - x0)
    return time - base + (received - size) * (time - curve[-2][1]) / (size - curve[-2][0])


def _beyond(on: Device, domains: int, received: float) -> float:
    """Return the time of the stage between domains."""
    if domains == 1:
        return 0.0
    network: dict[str, float] = figures()["network"]
    stages = math.ceil(math.log2(domains))
    return network["latency"] * stages + received / (on.network * network["rate"]) / 1e3
