"""Decode context parallelism inside kernels: how many of a row's keys this rank holds, and where they stand."""

from __future__ import annotations

import triton
import triton.language as tl

from kimi_hal.ops.spec import DCP
from kimi_hal.parallel import ownership


@triton.jit
def local_length(length, WORLD: tl.constexpr, RANK: tl.constexpr, INTERLEAVE: tl.constexpr):
    """Return how many of the first ``length`` positions a rank owns; a negative length is 0."""
    owned = tl.maximum(length, 0)
    if WORLD > 1:
        over = owned % (WORLD * INTERLEAVE) - RANK * INTERLEAVE
        whole = owned // (WORLD * INTERLEAVE) * INTERLEAVE
        owned = whole + tl.minimum(tl.maximum(over, 0), INTERLEAVE)
    return owned


@triton.jit
def position_of(index, rank, WORLD: tl.constexpr, INTERLEAVE: tl.constexpr):
    """Return the global position of a place on a rank."""
    if WORLD > 1:
        run = index // INTERLEAVE
        index = (run * WORLD + rank) * INTERLEAVE + (index - run * INTERLEAVE)
    return index


@triton.jit
def local_of(position, WORLD: tl.constexpr, INTERLEAVE: tl.constexpr):
    """Return the place of a global position on its owner."""
    if WORLD > 1:
        position = position // (WORLD * INTERLEAVE) * INTERLEAVE + position % INTERLEAVE
    return position


def constants(dcp: DCP) -> dict[str, int]:
    """Return the kernels' constants of a Spec's DCP."""
    keys = ownership.of_keys(dcp)
    return {"WORLD": keys.world, "RANK": keys.rank, "INTERLEAVE": keys.interleave}
