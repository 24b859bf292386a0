"""How many keys each row has, and the pages they stand in, by torch operators that a graph may hold."""

from __future__ import annotations

from torch import Tensor

from kimi_hal.ops.spec import DCP
from kimi_hal.parallel import ownership


def counts(row_len: Tensor, dcp: DCP, room: int) -> Tensor:
    """Return the keys of each row on this rank, int32 and packed, between 0 and ``room``.

    Args:
        row_len: ``[T]`` int32 global bounds.
        dcp: how index keys are spread.
        room: keys that there is room for.
    """
    keys = ownership.of_keys(dcp)
    local = row_len if keys.world == 1 else ownership.local_length(row_len, keys)
    return local.clamp(0, room).contiguous()


def lines(block_table: Tensor, row_req: Tensor, row_len: Tensor, together: int) -> Tensor:
    """Return a line of the block table for every ``together`` rows, which are of one request.

    A row without keys does not say its request: another of them does, or any line serves.
    """
    request = row_req.where(row_len > 0, 0).view(-1, together).amax(1)
    return block_table.index_select(0, request.clamp(0, block_table.shape[0] - 1))
