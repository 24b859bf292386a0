"""What each protocol of ``topk_merge`` sends and how long it takes, and how often its first message is not enough."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np

from benchmarks.scale.figures import Device, Transport, kernel
from benchmarks.scale.links import gather
from kimi_hal.ops.spec import DCP
from kimi_hal.ops.topk_merge import TopKMergeSpec
from kimi_hal.parallel import candidates

K = 2048
#: ``generic`` is ``full``'s message under torch.topk; the others select by radix.
PROTOCOLS = ("generic", "full", "compact", "scores_only")
#: Tied positions a row for which a captured ``scores_only`` has room, of 4 bytes.
TIES = 128
#: Of a probability that is one less a sum.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Merge:
    """One merge: bytes that a rank sends for a row, µs of its parts, and the chance of a second message.

    Attributes:
        protocol: which.
        sent: bytes a row, the first message alone.
        again: probability that a step needs a second message.
        parts: µs by part, the second message at its expected cost.
    """

    protocol: str
    sent: float
    again: float
    parts: dict[str, float]

    @property
    def time(self) -> float:
        """Return µs."""
        return sum(self.parts.values())


def sent(protocol: str, world: int, score: str = "bfloat16", quota: int | None = None) -> int:
    """Return the bytes that a rank sends for a row in the first message."""
    if protocol == "compact":
        spec = _spec(world, quota)
        return 4 * (spec.candidates + candidates.segments(spec.dcp) + 1)
    if protocol == "scores_only":
        return (2 if score == "bfloat16" else 4) * K
    return 8 * K


@cache
def resent(world: int, quota: int | None = None) -> float:
    """Return the probability that ``compact`` must send a row again.

    That needs a rank with as many winners as it may send. Where positions are dealt to the ranks without regard
    to their scores, winners are multinomial: k of them over W ranks. Independent Poisson counts, none of which
    reaches the quota, given that their sum is k, are that exactly; what is below 1e-9 is rounding and counts as 0.
    """
    most, mean = _spec(world, quota).candidates, K / world
    if world == 1 or most >= K:
        return 0.0
    counts = np.arange(K + 1)
    log_factorial = np.cumsum(np.log(np.maximum(counts, 1)))
    one = np.exp(counts * math.log(mean) - mean - log_factorial)
    below = np.where(counts < most, one, 0.0)
    power = np.ones(1)
    for _ in range(world):
        power = np.convolve(power, below)[: K + 1]
    total = math.exp(K * math.log(K) - K - log_factorial[K])
    chance = 1.0 - float(power[K]) / total if len(power) > K else 1.0
    return chance if chance > ROUNDING else 0.0


def needed_quota(world: int, rows: int, chance: float = 1e-3) -> int:
    """Return the least quota with which a step of so many rows needs a second message no more often."""
    low, high = -(-K // world), K
    while low < high:
        middle = (low + high) // 2
        if _any(resent(world, middle), rows) <= chance:
            high = middle
        else:
            low = middle + 1
    return low


def merge(
    on: Device,
    how: Transport,
    protocol: str,
    world: int,
    rows: int,
    *,
    score: str = "bfloat16",
    quota: int | None = None,
) -> Merge:
    """Return one merge of ``rows`` rows over ``world`` ranks.

    Args:
        on: the device.
        how: the transport.
        protocol: of ``PROTOCOLS``.
        world: ranks.
        rows: query rows of the step.
        score: type of the index scores.
        quota: candidates that ``compact`` sends; ``None``: ⌈1.5·k / W⌉.
    """
    small = kernel("pass")["floor"]
    first = sent(protocol, world, score, quota)
    parts = {"send": gather(on, how, world, rows * first)}
    again = 0.0
    if protocol == "generic":
        parts["select"] = generic_select(rows, world * K)
    elif protocol == "compact":
        spec = _spec(world, quota)
        row = resent(world, quota)
        again = _any(row, rows)
        parts |= {"pack": small, "select": select(on, rows, world * spec.candidates), "split": small}
        if again:  # at least one row, and on average those that are not decided
            late = max(1.0, row * rows / again)
            parts["again"] = again * (gather(on, how, world, late * 8 * K) + select(on, late, world * K))
    else:
        parts |= {"select": select(on, rows, world * K), "split": small}
    if protocol == "scores_only":
        again = 1.0 if score == "bfloat16" else 0.0  # ties across the cut: 94 to 100 % of rows, measured
        parts["again"] = again * (gather(on, how, world, rows * 4 * TIES) + small)
    return Merge(protocol, first, again, parts)


def select(on: Device, rows: float, length: float) -> float:
    """Return the time of a radix selection from float32 rows."""
    figure = kernel("select")
    longer = figure["doubling"] * max(0.0, math.log2(max(length, 1) / 8192))
    return figure["floor"] + longer + figure["passes"] * rows * length * 4 / on.memory / 1e3


def generic_select(rows: int, length: int) -> float:
    """Return the time of ``torch.topk`` and the gather of ids behind it."""
    figure = kernel("generic_select")
    return figure["floor"] + rows * length / figure["keys"] + rows * K / figure["outputs"]


def _spec(world: int, quota: int | None) -> TopKMergeSpec:
    return TopKMergeSpec(
        dcp=DCP(world=world), topk=K, protocol="compact", score="bfloat16", return_global=False, quota=quota
    )


def _any(row: float, rows: int) -> float:
    """Return the probability that one of ``rows`` rows is affected."""
    return -math.expm1(rows * math.log1p(-row)) if row < 1 else 1.0
