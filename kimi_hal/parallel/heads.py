"""From "all tokens, own heads" to "own tokens, all heads" and back: one all-to-all each way."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_hal.parallel.exchange import swap
from kimi_hal.parallel.groups import Group
from kimi_hal.parallel.shards import Shards


def to_tokens(group: Group, x: Tensor, shards: Shards) -> Tensor:
    """Give up the heads of other ranks' tokens for all heads of the own ones.

    Args:
        group: W ranks.
        x: ``[≥ total, H, …]``, all tokens of this rank's heads.
        shards: which tokens each rank keeps.

    Returns:
        ``[width, W·H, …]``, heads in rank order; the filling is zero.
    """
    (received,) = swap(group, shards.deal(x))
    return received.transpose(0, 1).flatten(1, 2)


def to_heads(group: Group, shards: Shards, rows: int, *parts: Tensor) -> tuple[Tensor, ...]:
    """Undo ``to_tokens`` for results of the own tokens, all in one message.

    Args:
        group: W ranks.
        shards: which tokens each rank has.
        rows: of the results; from ``shards.total`` on they are zero.
        parts: ``[width, W·H, …]`` each.

    Returns:
        ``[rows, H, …]`` each, this rank's heads of all tokens.
    """
    sent = (torch.stack(part.chunk(group.size(), dim=1)) for part in parts)
    return tuple(shards.restore(part, rows) for part in swap(group, *sent))
