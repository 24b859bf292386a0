"""The strict total order of rule 2 (``docs/contract.md``) as integers, and exact selection under it.

A score becomes an ordinal, an int32 that grows with the score; ordinal and position together become one
int64 key, so that no two keys of a row are equal and plain ``topk`` is exact. Selecting one row of 2^20 keys
needs 24 MB besides the scores.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: The ordinal of every NaN, below that of −inf.
NAN = -(1 << 31) + 1

#: The bits of −0.
MINUS_ZERO = -(1 << 31)

#: The key of what is no key: below every key.
NO_KEY = -(1 << 63)

#: The largest position, and the bits that it takes in a key.
LAST = (1 << 32) - 1

#: Keys built at once: 32 MB of int64.
AT_ONCE = 1 << 22


def ordinal(scores: Tensor) -> Tensor:
    """Return int32 numbers in the order of float32 or bfloat16 scores: −0 equals +0, any NaN is the least."""
    bits = scores.float().contiguous().view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ordered.masked_fill_(bits == MINUS_ZERO, 0)
    return ordered.masked_fill_(torch.isnan(scores), NAN)


def keys(ordinals: Tensor, positions: Tensor) -> Tensor:
    """Return int64 keys: a larger ordinal first, then a smaller position. A negative position is no key.

    Args:
        ordinals: any integer dtype within int32's range; the broadcast shape is the result's.
        positions: integers below 2^32.
    """
    key = (ordinals.long() << 32) | (LAST - positions.long())
    return torch.where(positions < 0, NO_KEY, key)


def positions(key: Tensor) -> Tensor:
    """Return the int64 positions of keys, −1 for what is no key."""
    return torch.where(key == NO_KEY, -1, LAST - (key & LAST))


def best(key: Tensor, k: int) -> Tensor:
    """Return the ``k`` greatest keys of each row, descending, filled up with ``NO_KEY``."""
    taken = key.topk(min(k, key.shape[-1]), dim=-1).values
    return torch.nn.functional.pad(taken, (0, k - taken.shape[-1]), value=NO_KEY)


def ascending(index: Tensor) -> Tensor:
    """Return each row's non-negative entries in ascending order at the front, then −1."""
    top = torch.iinfo(index.dtype).max
    ordered = index.masked_fill(index < 0, top).sort(dim=-1).values
    return ordered.masked_fill_(ordered == top, -1)


def narrow(ordinals: Tensor) -> Tensor:
    """Return ordinals of bfloat16 scores in 16 bits (as int32), in the same order; −2^15 stays free."""
    return torch.where(ordinals == NAN, -(1 << 15) + 1, ordinals >> 16)


def select_positions(
    scores: Tensor,
    lengths: Tensor,
    k: int,
    *,
    starts: Tensor | None = None,
    score: torch.dtype | None = None,
) -> Tensor:
    """Return the positions of the ``k`` best scores of each row, ascending, then −1.

    Args:
        scores: ``[T, L]``, any strides.
        lengths: ``[T]`` integers, how many columns of each row are keys; clamped to what the row holds.
        k: how many to select.
        starts: ``[T]`` integers, the column of each row's position 0; ``None``: 0.
        score: the score type, float32 or bfloat16, to which scores are rounded first; ``None``: as they are.

    Returns:
        ``[T, k]`` int64 positions relative to ``starts``. Columns that are not keys are not looked at.
    """
    score = score or scores.dtype
    if score not in (torch.float32, torch.bfloat16):
        raise TypeError(
            f"selection is over float32 or bfloat16 scores, got {score}: pass score=torch.float32"
        )
    first, count = bounds(lengths, starts, scores.shape[1])
    picked = scores.new_empty((scores.shape[0], k), dtype=torch.int64)
    step = max(1, AT_ONCE // max(1, scores.shape[1]))
    for begin in range(0, scores.shape[0], step):
        rows = slice(begin, begin + step)
        picked[rows] = _select(scores[rows], first[rows], count[rows], k, score)
    return picked


def bounds(lengths: Tensor, starts: Tensor | None, width: int) -> tuple[Tensor, Tensor]:
    """Return first column and number of keys of each row, int64, clamped to the ``width`` of the row."""
    first = torch.zeros_like(lengths, dtype=torch.int64) if starts is None else starts.long()
    first = first.clamp(0, width)
    return first, torch.minimum(lengths.long(), width - first).clamp(min=0)


def _select(scores: Tensor, first: Tensor, count: Tensor, k: int, score: torch.dtype) -> Tensor:
    """Select from a few rows, looking only at the columns in which one of them has keys."""
    if not bool(count.any()):
        return scores.new_full((scores.shape[0], k), -1, dtype=torch.int64)
    left, right = int(first[count > 0].min()), int((first + count).max())
    column = torch.arange(left, right, device=scores.device) - first[:, None]
    column.masked_fill_(column >= count[:, None], -1)
    key = keys(ordinal(as_score(scores[:, left:right], score)), column)
    return ascending(positions(best(key, k)))


def as_score(scores: Tensor, score: torch.dtype) -> Tensor:
    """Round scores to the score type; bfloat16 is the float32 score rounded once, to nearest even."""
    return scores.to(torch.float32).to(score)


def scores_at(scores: Tensor, index: Tensor, starts: Tensor | None = None) -> Tensor:
    """Return the scores of selected positions ``[T, k]``, −inf where −1."""
    if not scores.shape[1]:
        return torch.full_like(index, -torch.inf, dtype=scores.dtype)
    column = index if starts is None else index + starts.long().clamp(min=0)[:, None]
    return scores.gather(1, column.clamp(0, scores.shape[1] - 1)).masked_fill(index < 0, -torch.inf)
