"""Rows of the cache that count, at the front of each row of indices in their order, and how many they are."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

#: Indices that a program looks at together.
BLOCK = 1024


@triton.jit
def _compact(index, out, count, width, BLOCK: tl.constexpr):
    """Move the indices of one row that are not negative to its front, and fill what is left with −1."""
    row = tl.program_id(0).to(tl.int64)
    kept = 0
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        slot = tl.load(index + row * width + column, mask=column < width, other=-1)
        live = slot >= 0
        place = kept + tl.cumsum(live.to(tl.int32), 0) - 1
        tl.store(out + row * width + place, slot, mask=live)
        kept += tl.sum(live.to(tl.int32), 0)
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        tl.store(out + row * width + column, -1, mask=(column >= kept) & (column < width))
    tl.store(count + row, kept)


def compact(index: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``[T, k]`` int32 rows of the cache, −1 behind them, and ``[T]`` int32 how many; T is not 0.

    Args:
        index: ``[T, k]`` int32, packed, −1 anywhere.
    """
    out, count = index.new_empty(index.shape), index.new_empty(index.shape[:1])
    _compact[(index.shape[0],)](index, out, count, index.shape[1], BLOCK=BLOCK)
    return out, count
