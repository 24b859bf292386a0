"""Ragged sequences with static shapes: to which sequence each row belongs, and where in it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sequences:
    """N runs of rows, all int64 ``[N]``, and for each of T rows its run and place, int64 ``[T]``.

    Attributes:
        start: first row.
        length: rows; 0 for padding.
        slot: state slot; −1 for padding.
        owner: of each row, the sequence; 0 for a row of none.
        place: of each row, its number in the sequence.
        live: of each row, whether it belongs to one.
    """

    start: Tensor
    length: Tensor
    slot: Tensor
    owner: Tensor
    place: Tensor
    live: Tensor

    @classmethod
    def cut(cls, cu_seqlens: Tensor, state_ids: Tensor, rows: int, slots: int) -> Sequences:
        """Build from ``cu_seqlens [N + 1]`` and ``state_ids [N]``, cut to the rows and slots there are."""
        bounds = cu_seqlens.long().clamp(0, rows)
        slot = in_range(state_ids, slots)
        start = bounds[:-1]
        length = torch.where(slot >= 0, (bounds[1:] - start).clamp(min=0), 0)
        row = torch.arange(rows, device=slot.device)
        inside = (row[:, None] >= start) & (row[:, None] < start + length)
        live = inside.any(dim=1)
        owner = inside.int().argmax(dim=1)
        return cls(start, length, slot, owner, row - start[owner], live)

    def stops(self, slots: int, ids: Tensor | None, counts: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return checkpoints as int64 ``[N]`` slots and row counts, both −1 where none is stored."""
        if ids is None or counts is None:
            return torch.full_like(self.slot, -1), torch.full_like(self.slot, -1)
        count = counts.long()
        stored = (in_range(ids, slots) >= 0) & (self.slot >= 0) & (count >= 0) & (count <= self.length)
        return torch.where(stored, ids.long(), -1), torch.where(stored, count, -1)


def in_range(ids: Tensor, size: int) -> Tensor:
    """Return ids as int64, −1 for those outside ``[0, size)``."""
    wide = ids.long()
    return torch.where((wide >= 0) & (wide < size), wide, -1)
