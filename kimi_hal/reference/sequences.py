"""Sequences: which rows belong together, and which state slot they advance."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sequences:
    """N runs of rows with their slots, all int64 ``[N]``.

    Attributes:
        start: first row.
        length: rows; 0 for padding.
        slot: state slot; −1 for padding, which is read and written nowhere.
    """

    start: Tensor
    length: Tensor
    slot: Tensor

    @classmethod
    def cut(cls, cu_seqlens: Tensor, state_ids: Tensor, rows: int, slots: int) -> Sequences:
        """Build from ``cu_seqlens [N + 1]`` and ``state_ids [N]``, cut to the rows and slots there are."""
        bounds = cu_seqlens.long().clamp(0, rows)
        slot = in_range(state_ids, slots)
        length = (bounds[1:] - bounds[:-1]).clamp(min=0).where(slot >= 0, 0)
        return cls(bounds[:-1], length, slot)

    @classmethod
    def single(cls, state_ids: Tensor, slots: int) -> Sequences:
        """Build T sequences of one row each."""
        slot = in_range(state_ids, slots)
        return cls(torch.arange(len(slot), device=slot.device), (slot >= 0).long(), slot)

    def rows(self) -> tuple[Tensor, Tensor]:
        """Return for every row of every sequence the sequence and the place in it, int64 ``[M]`` each."""
        sequence = torch.repeat_interleave(self.length)
        first = self.length.cumsum(0) - self.length
        return sequence, torch.arange(len(sequence), device=sequence.device) - first[sequence]

    def batches(self, at_once: int) -> Iterator[Tensor]:
        """Yield int64 indices of the sequences that are no padding, longest first, some at a time."""
        order = self.length.argsort(descending=True, stable=True)
        order = order[self.slot[order] >= 0]
        for first in range(0, len(order), at_once):
            yield order[first : first + at_once]

    def stops(self, slots: int, ids: Tensor | None, counts: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return checkpoints as int64 ``[N]`` slots and row counts, both −1 where none is stored."""
        if ids is None or counts is None:
            return torch.full_like(self.slot, -1), torch.full_like(self.slot, -1)
        count = counts.long()
        stored = (in_range(ids, slots) >= 0) & (self.slot >= 0) & (count >= 0) & (count <= self.length)
        return ids.long().where(stored, -1), count.where(stored, -1)


def in_range(ids: Tensor, size: int) -> Tensor:
    """Return ids as int64, −1 for those outside ``[0, size)``."""
    wide = ids.long()
    return wide.where((wide >= 0) & (wide < size), -1)
