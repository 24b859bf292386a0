"""Which rows and which heads a caller asks for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Rows = int | slice | range | Sequence[int] | Tensor
Heads = int | range | Sequence[int]


def positions(rows: Rows, context: int) -> Tensor:
    """Return rows as int64 positions; a slice is clipped as Python clips it, anything else must be inside.

    Raises:
        IndexError: a position that the text does not have.
    """
    if isinstance(rows, slice):
        return torch.arange(context)[rows]
    if isinstance(rows, int):
        rows = [rows]
    index = rows.long().cpu() if isinstance(rows, Tensor) else torch.tensor(list(rows), dtype=torch.int64)
    outside = index[(index < 0) | (index >= context)]
    if outside.numel():
        raise IndexError(f"position {int(outside[0])} is outside the text's {context} tokens")
    return index


def chosen(heads: Heads, total: int) -> Tensor:
    """Return heads as int64: the first so many, or the heads named.

    Raises:
        IndexError: a head that the model does not have.
    """
    named = list(range(heads) if isinstance(heads, int) else heads)
    outside = [head for head in named if not 0 <= head < total]
    if outside:
        raise IndexError(f"head {outside[0]} is outside the model's {total} heads")
    return torch.tensor(named, dtype=torch.int64)
