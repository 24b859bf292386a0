"""Token shards of W ranks: gathered into whole rows, and partial sums reduced back to shards."""

from __future__ import annotations

from torch import Tensor

from kimi_hal.parallel.exchange import swap
from kimi_hal.parallel.groups import Group
from kimi_hal.parallel.shards import Shards


def gather_tokens(group: Group, own: Tensor, shards: Shards, rows: int | None = None) -> Tensor:
    """Return all tokens in order, ``[rows, …]``, from every rank's shard ``own [width, …]``, bit for bit.

    Rows from ``shards.total`` on are zero; ``rows=None`` leaves them out.
    """
    return shards.restore(group.all_gather(own), rows)


def reduce_tokens(group: Group, partial: Tensor, shards: Shards) -> Tensor:
    """Return the sum over ranks of the own tokens' rows, ``[width, …]``.

    Args:
        group: W ranks.
        partial: ``[≥ total, …]``, this rank's share of the sum for every token.
        shards: which tokens each rank gets.

    Returns:
        The sum in ``partial``'s dtype, added from rank 0 up: a row's bits depend neither on which rank gets
        it nor on how many rows there are. The filling is zero.
    """
    (parts,) = swap(group, shards.deal(partial))
    total = parts[0].clone()
    for part in parts[1:]:
        total = total + part
    return total
