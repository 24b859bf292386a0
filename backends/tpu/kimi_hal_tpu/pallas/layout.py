"""How ragged sequences are cut into chunks: each starts one of its own, and so does what follows a checkpoint."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from kimi_hal_tpu.pallas.chunks import CHUNK, READ, SAME, ZERO, Chunks
from kimi_hal_tpu.pallas.mode import Array
from kimi_hal_tpu.pallas.sequences import Sequences


class Layout(NamedTuple):
    """Chunks of N sequences, int32 ``[N]`` each.

    Attributes:
        before: rows before the checkpoint; 0 where there is none.
        leading: chunks of these rows; 1 where a checkpoint is taken before the first row.
        total: all chunks.
        first: number of the first chunk, over all sequences.
    """

    before: Array
    leading: Array
    total: Array
    first: Array

    @classmethod
    def of(cls, runs: Sequences, after: Array) -> Layout:
        """Cut sequences; ``after``: rows before each one's checkpoint, −1: there is none."""
        before = jnp.maximum(after, 0)
        leading = jnp.where(after >= 0, jnp.maximum(whole(before), 1), 0)
        total = leading + whole(runs.length - before)
        return cls(before, leading, total, jnp.cumsum(total) - total)

    def work(
        self, runs: Sequences, fresh: Array, saved: Array, rows: int, checkpoints: bool
    ) -> tuple[Array, Chunks]:
        """Return of each chunk the rows, int32 ``[J, C]`` within the call's, and what is done with it.

        Args:
            runs: the sequences.
            fresh: bool ``[N]``: the state starts at zero.
            saved: ``[N]``, slots of checkpoints.
            rows: of the call.
            checkpoints: whether there may be any.
        """
        count = rows // CHUNK + runs.slot.shape[0] * (2 if checkpoints else 1)
        there, every = jnp.sum(self.total), jnp.arange(count, dtype=jnp.int32)
        j, live = jnp.minimum(every, there - 1), every < there
        n = jnp.argmax((j[:, None] >= self.first) & (j[:, None] < self.first + self.total), axis=1)
        number, leading, before = j - self.first[n], self.leading[n], self.before[n]
        early = number < leading
        start = jnp.where(early, number * CHUNK, before + (number - leading) * CHUNK)
        end = jnp.where(early, before, runs.length[n])
        begin = jnp.where(number > 0, SAME, jnp.where(fresh[n], ZERO, READ))
        last = live & (number == self.total[n] - 1) & (runs.length[n] > 0)
        picked = (runs.start[n] + start)[:, None] + jnp.arange(CHUNK, dtype=jnp.int32)
        return jnp.clip(picked, 0, rows - 1), Chunks(
            slot=jnp.maximum(runs.slot[n], 0),
            begin=jnp.where(live, begin, SAME),
            count=jnp.where(live, jnp.clip(end - start, 0, CHUNK), 0),
            target=jnp.where(last, runs.slot[n], -1),
            saved=jnp.where(live & (number == leading - 1), saved[n], -1),
        )

    def of_rows(self, owner: Array, place: Array) -> tuple[Array, Array]:
        """Return chunk and row in it of rows with place ``place`` in sequence ``owner``."""
        early = place < self.before[owner]
        late = place - self.before[owner]
        offset = jnp.where(early, place // CHUNK, self.leading[owner] + late // CHUNK)
        return self.first[owner] + offset, jnp.where(early, place, late) % CHUNK


def whole(rows: Array) -> Array:
    """Return how many chunks hold so many rows."""
    return (rows + CHUNK - 1) // CHUNK
