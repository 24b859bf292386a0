"""The host-memory tier: blocks kept outside the device, moved by the descriptors that a transfer uses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kimi_hal.cache.integers import whole
from kimi_hal.cache.layout import Layout
from kimi_hal.cache.ranges import Move, known_blocks, whole_blocks
from kimi_hal.cache.views import check_pool
from kimi_hal.errors import CacheError

if TYPE_CHECKING:
    from torch import Tensor


class HostTier:
    """Rows of host memory in the layout of a device's pool. Which block is kept where is the engine's choice.

    Args:
        layout: of the device's pool.
        num_blocks: rows of host memory.
        pinned: page-locked memory, which a device copies from and to without waiting.
    """

    def __init__(self, layout: Layout, num_blocks: int, *, pinned: bool = False) -> None:
        import torch

        self.device_layout = layout
        self.layout = layout.sized(num_blocks=num_blocks)
        self.pool = torch.empty(self.layout.bytes, dtype=torch.uint8, pin_memory=pinned)

    def store(self, pool: Tensor, blocks: Sequence[int], rows: Sequence[int]) -> None:
        """Copy blocks of the device's pool to rows of the tier, on the current stream.

        Of pinned memory a device's copy may still be under way on return: synchronise before the host reads.

        Raises:
            CacheError: as many rows as blocks are needed, each inside its pool; a row named twice.
        """
        self._check(pool, blocks, rows, written=rows)
        copy(whole_blocks(self.layout, blocks, rows), pool, self.pool)

    def load(self, pool: Tensor, rows: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy rows of the tier to blocks of the device's pool, on the current stream."""
        self._check(pool, blocks, rows, written=blocks)
        copy(whole_blocks(self.layout, rows, blocks), self.pool, pool)

    def _check(
        self, pool: Tensor, blocks: Sequence[int], rows: Sequence[int], written: Sequence[int]
    ) -> None:
        check_pool(self.device_layout, pool)
        known_blocks(self.device_layout, blocks, "device ")
        known_blocks(self.layout, rows, "host ")
        if len(set(written)) != len(written):
            raise CacheError(f"a block is written twice: {list(written)}")


def copy(moves: Iterable[Move], source: Tensor, target: Tensor) -> None:
    """Copy ranges of one pool to another inside this process, on the current stream.

    Raises:
        CacheError: a range outside a pool, or a pool that is not 1-D uint8.
    """
    for side, pool in (("source", source), ("target", target)):
        if str(pool.dtype) != "torch.uint8" or pool.dim() != 1:
            raise CacheError(f"the {side} pool must be 1-D uint8, got {list(pool.shape)} {pool.dtype}")
    for move in moves:
        check_move(move, source.numel(), target.numel())
        part = source[move.source : move.source + move.length]
        target[move.target : move.target + move.length].copy_(part, non_blocking=True)


def check_move(move: Move, source: int, target: int) -> None:
    """Refuse a move that leaves a pool of so many bytes on either side."""
    for value in (move.source, move.target, move.length):
        whole(f"{move.what}: a byte of a move", value)
    for start, size, side in ((move.source, source, "source"), (move.target, target, "target")):
        if start < 0 or move.length < 1 or start + move.length > size:
            raise CacheError(
                f"{move.what}: bytes {start:,} to {start + move.length:,} are outside the {side} pool's {size:,}"
            )
