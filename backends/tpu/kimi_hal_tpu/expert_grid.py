"""How many rows a tile of one expert has, and how many tiles a call can need. Imports neither torch nor jax."""

from __future__ import annotations

from kimi_hal.ops.moe import MoESpec

#: Rows of a tile: as many as a bfloat16 tile of a TPU has, up to what keeps the MXU busy.
SMALLEST, LARGEST = 16, 128


def size_of(spec: MoESpec, rows: int) -> int:
    """Return the rows of a tile: twice what an expert gets if all get the same."""
    size = SMALLEST
    while size < LARGEST and size * spec.num_experts < 2 * rows * spec.topk:
        size *= 2
    return size


def most(spec: MoESpec, routes: int, size: int) -> int:
    """Return how many tiles a number of routes can need: whole ones, and a part of one an expert."""
    return -(-routes // size) + min(spec.num_local, routes)
