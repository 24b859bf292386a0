"""Ragged sequences with static shapes, around a kernel: which rows belong together, and which slot they advance."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from kimi_hal_tpu.pallas.mode import Array


class Sequences(NamedTuple):
    """N runs of rows, int32 ``[N]`` each.

    Attributes:
        start: first row.
        length: rows; 0 for padding.
        slot: state slot; −1 for padding, and for a slot that the pool does not have.
    """

    start: Array
    length: Array
    slot: Array

    @classmethod
    def cut(cls, cu_seqlens: Array, state_ids: Array, rows: int, slots: int) -> Sequences:
        """Build from ``cu_seqlens [N + 1]`` and ``state_ids [N]``, cut to the rows and slots there are."""
        bounds = jnp.clip(cu_seqlens, 0, rows)
        slot = in_range(state_ids, slots)
        length = jnp.where(slot >= 0, jnp.maximum(bounds[1:] - bounds[:-1], 0), 0)
        return cls(bounds[:-1], length, slot)

    def owners(self, rows: int) -> tuple[Array, Array, Array]:
        """Return of each of ``rows`` rows its sequence, its place in it, and whether it belongs to one."""
        row = jnp.arange(rows, dtype=jnp.int32)
        inside = (row[:, None] >= self.start) & (row[:, None] < self.start + self.length)
        owner = jnp.argmax(inside, axis=1)
        return owner, row - self.start[owner], jnp.any(inside, axis=1)

    def stops(self, slots: int, ids: Array | None, counts: Array | None) -> tuple[Array, Array]:
        """Return checkpoints as int32 ``[N]`` slots and row counts, both −1 where none is stored."""
        if ids is None or counts is None:
            return jnp.full_like(self.slot, -1), jnp.full_like(self.slot, -1)
        stored = (in_range(ids, slots) >= 0) & (self.slot >= 0) & (counts >= 0) & (counts <= self.length)
        return jnp.where(stored, ids, -1), jnp.where(stored, counts, -1)


def in_range(ids: Array, size: int) -> Array:
    """Return ids, −1 for those outside ``[0, size)``."""
    return jnp.where((ids >= 0) & (ids < size), ids, -1)


def put(target: Array, slots: Array, rows: Array) -> Array:
    """Return ``target`` with ``rows`` at ``slots``; a slot below 0 is written nowhere."""
    return target.at[jnp.where(slots >= 0, slots, target.shape[0])].set(rows, mode="drop")
