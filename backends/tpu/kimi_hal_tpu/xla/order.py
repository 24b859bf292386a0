"""Exact selection under the contract's order, and writes that leave rows out, with static shapes."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_hal.reference import selection


def select(scores: Tensor, first: Tensor, count: Tensor, k: int) -> Tensor:
    """Return the positions of the ``k`` best keys of each row, ascending, then −1: int64 ``[T, k]``.

    Args:
        scores: ``[T, L]`` float32 numbers of the score type.
        first: int64 ``[T]``, the column of each row's position 0.
        count: int64 ``[T]``, keys of each row.
        k: how many.
    """
    column = torch.arange(scores.shape[1], device=scores.device) - first[:, None]
    position = torch.where((column >= 0) & (column < count[:, None]), column, -1)
    key = selection.keys(ordinal(scores), position)
    return selection.ascending(selection.positions(selection.best(key, k)))


def ordinal(scores: Tensor) -> Tensor:
    """Return the ordinals of float32 scores; NaN is read from the bits, which no compiler optimises away."""
    bits = scores.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ordered = torch.where(magnitude == 0, 0, ordered)
    return torch.where(magnitude > 0x7F800000, selection.NAN, ordered)


def rounded(scores: Tensor, score: str) -> Tensor:
    """Return scores as float32 numbers of the score type, rounded once."""
    wide = scores.float()
    return wide.bfloat16().float() if score == "bfloat16" else wide


def chosen(scores: Tensor, index: Tensor, first: Tensor) -> Tensor:
    """Return the scores of selected positions, −inf where −1."""
    column = (index + first[:, None]).clamp(0, scores.shape[1] - 1)
    return torch.where(index < 0, -torch.inf, scores.gather(1, column))


def last_writer(slots: Tensor) -> Tensor:
    """Return slots with −1 for every row whose slot a later row names too: each slot is written once."""
    row = torch.arange(slots.shape[0], device=slots.device)
    again = (slots[:, None] == slots[None, :]) & (row[:, None] < row[None, :])
    return torch.where(again.any(dim=1), -1, slots)


def put(target: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
    """Return ``target`` with ``rows`` at ``slots``; what is below 0 or beyond the last is written nowhere.

    XLA leaves out an update whose index is beyond the target; a negative one would count from the end.
    """
    size = target.shape[0]
    there = (slots >= 0) & (slots < size)
    return target.index_put((torch.where(there, slots, size),), rows)
