"""The wire form of selection candidates under ``compact``: 32 bits each, behind a header a row.

A row is ``[counts of the segments | candidates held | words]``, all int32. A word has 16 bits of score above
the low 16 bits of a local position. The positions ascend, so a word's segment, which is the rest of its
position, follows from the counts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_hal.ops.spec import DCP

#: Positions that 16 bits tell apart.
SEGMENT = 1 << 16

#: The longest request, in tokens, that the header of a row is made for.
CONTEXT = 1 << 20


def segments(dcp: DCP) -> int:
    """Return how many segments the local positions of ``CONTEXT`` tokens take on the rank with the most."""
    local = -(-CONTEXT // (dcp.world * dcp.interleave)) * dcp.interleave
    return -(-local // SEGMENT)


def pack(scores: Tensor, positions: Tensor, held: Tensor, count: int) -> Tensor:
    """Pack candidates into a message.

    Args:
        scores: ``[T, C]`` integers of 16 bits.
        positions: ``[T, C]`` int64 local positions, ascending from the front, then −1.
        held: ``[T]``, how many candidates this rank has, sent or not.
        count: segments, so that every position is below ``count`` · 65536.

    Returns:
        ``[T, count + 1 + C]`` int32.
    """
    filled = torch.where(positions < 0, count * SEGMENT, positions)
    bounds = torch.arange(1, count + 1, device=positions.device) * SEGMENT
    ends = torch.searchsorted(filled, bounds.expand(len(filled), -1).contiguous())
    counts = ends.diff(dim=1, prepend=torch.zeros_like(ends[:, :1]))
    words = (scores.int() << 16) | (positions.int() & (SEGMENT - 1))
    return torch.cat((counts.int(), held.int()[:, None], words), dim=1)


def unpack(message: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Undo ``pack`` for messages ``[..., count + 1 + C]``: scores int32, positions int64, held int32."""
    words = message[..., count + 1 :]
    ends = message[..., :count].cumsum(dim=-1)
    column = torch.arange(words.shape[-1], device=words.device).expand(words.shape).contiguous()
    segment = torch.searchsorted(ends, column, right=True)
    positions = segment * SEGMENT + (words & (SEGMENT - 1))
    return words >> 16, torch.where(segment < count, positions, -1), message[..., count]
