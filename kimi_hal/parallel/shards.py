"""Which rows of a step each rank holds, and how rows travel between their order and the ranks' shards.

Shards have one width on every rank, because the messages of a collective do: a rank with fewer rows is
filled up, and what its filling holds reaches nobody.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_hal.errors import ContractError
from kimi_hal.ops.spec import DCP
from kimi_hal.parallel import ownership


@dataclass(frozen=True)
class Shards:
    """The rows of a step, parted over W ranks; the same object on every rank.

    Attributes:
        rows: int64 ``[W, width]``, the rows of each rank in the order in which it holds them, then −1.
        total: rows of all ranks together; rows from ``total`` on belong to nobody.
    """

    rows: Tensor
    total: int

    @classmethod
    def pieces(cls, lengths: Sequence[int], world: int, device: torch.device | str = "cpu") -> Shards:
        """Cut each request into 2W pieces; rank r takes pieces r and 2W − 1 − r.

        A later row sees more keys, so an early piece and a late one together cost every rank about the same.
        A piece has ⌈n / 2W⌉ rows; those at the end are short or empty. A request of fewer than 2W rows has no
        such balance: its rows go one by one to the ranks after the last one that got such a row.

        Args:
            lengths: new rows of each request; requests stand behind each other.
            world: W.
            device: where ``rows`` is.

        Raises:
            ContractError: a length that is no whole number from 0, or W below 1.

        Source: vLLM ``v1/worker/gpu/pcp_manager.py``; the ranks of short requests are this project's.
        """
        lengths = whole_lengths("shards", lengths)
        if world < 1:
            raise ContractError("shards", [f"world={world} must be at least 1"])
        held: list[list[range]] = [[] for _ in range(world)]
        start, turn = 0, 0
        for length in lengths:
            end = start + length
            if length < 2 * world:
                for row in range(start, end):
                    held[turn % world].append(range(row, row + 1))
                    turn += 1
            else:
                size = -(-length // (2 * world))
                for rank in range(world):
                    firsts = (start + piece * size for piece in (rank, 2 * world - 1 - rank))
                    held[rank] += [range(min(first, end), min(first + size, end)) for first in firsts]
            start = end
        return cls(_filled(held, device), start)

    @classmethod
    def interleaved(
        cls, total: int, world: int, interleave: int = 1, device: torch.device | str = "cpu"
    ) -> Shards:
        """Deal runs of ``interleave`` rows to the ranks in turn: row t belongs to rank ``(t // I) % W``."""
        (total,) = whole_lengths("shards", (total,))
        first = DCP(world=world, interleave=interleave)
        place = torch.arange(ownership.local_length(total, first), device=device)
        ranks = [DCP(world=world, rank=rank, interleave=interleave) for rank in range(world)]
        rows = torch.stack([ownership.position(place, rank) for rank in ranks])
        return cls(torch.where(rows < total, rows, -1), total)

    @property
    def world(self) -> int:
        """Return W."""
        return self.rows.shape[0]

    @property
    def width(self) -> int:
        """Return the rows of a shard, its filling included."""
        return self.rows.shape[1]

    def take(self, x: Tensor, rank: int) -> Tensor:
        """Return a rank's rows of ``x [≥ total, …]``, ``[width, …]``; the filling is zero.

        Raises:
            ContractError: fewer rows than the shards have, on every rank alike; no such rank.
        """
        if not x.dim() or x.shape[0] < self.total:
            raise ContractError("shards", [f"x must have at least {self.total} rows, got {list(x.shape)}"])
        if not 0 <= rank < self.world:
            raise ContractError("shards", [f"rank={rank} is outside 0 to {self.world - 1}"])
        rows = self.rows[rank].to(x.device)
        if not self.total:
            return x.new_zeros((0, *x.shape[1:]))
        taken = _indexable(x)[rows.clamp(min=0)]
        taken[rows < 0] = 0
        return taken.view(x.dtype)

    def deal(self, x: Tensor) -> Tensor:
        """Return every rank's rows of ``x [≥ total, …]``, ``[W, width, …]``; the filling is zero."""
        return torch.stack([self.take(x, rank) for rank in range(self.world)])

    def restore(self, parts: Tensor, rows: int | None = None) -> Tensor:
        """Undo ``deal``: ``[W, width, …]`` becomes ``[rows, …]``, zero from ``total`` on.

        Args:
            parts: every rank's shard.
            rows: rows of the result, at least ``total``; ``None``: ``total``.

        Raises:
            ContractError: parts of other shards, or fewer rows than these have.
        """
        rows = self.total if rows is None else rows
        if parts.shape[:2] != self.rows.shape:
            wanted, got = list(self.rows.shape), list(parts.shape)
            raise ContractError("shards", [f"parts must be {wanted} by rank and row, got {got}"])
        if rows < self.total:
            raise ContractError("shards", [f"rows={rows} is less than the shards' {self.total}"])
        whole = parts.new_zeros((rows, *parts.shape[2:]))
        place = self.rows.to(parts.device)
        held = place >= 0
        _indexable(whole)[place[held]] = _indexable(parts)[held]
        return whole


def whole_lengths(who: str, lengths: Sequence[int]) -> list[int]:
    """Return lengths as ints.

    Raises:
        ContractError: one is no whole number, or below 0.
    """
    try:
        whole = [operator.index(length) for length in lengths]
    except TypeError:
        raise ContractError(who, [f"lengths must be whole numbers, got {lengths!r}"]) from None
    if min(whole, default=0) < 0:
        raise ContractError(who, [f"a length is at least 0, got {min(whole)} in {whole}"])
    return whole


def padded_rows(rows: int, requests: int, world: int) -> int:
    """Return the most rows that ``Shards.pieces`` can give a rank: what ``Limits.max_rows`` of its plan needs."""
    return min(rows, -(-rows // world) + 2 * requests)


def _filled(held: list[list[range]], device: torch.device | str) -> Tensor:
    """Return each rank's rows side by side, ``[W, width]``, filled up with −1."""
    width = max(sum(map(len, ranges)) for ranges in held)
    rows = torch.full((len(held), width), -1, dtype=torch.int64)
    for line, ranges in zip(rows, held, strict=True):
        place = 0
        for part in ranges:
            line[place : place + len(part)] = torch.arange(part.start, part.stop)
            place += len(part)
    return rows.to(device)


def _indexable(x: Tensor) -> Tensor:
    """View one-byte elements as bytes: torch cannot index FP8 on every device."""
    return x.view(torch.uint8) if x.element_size() == 1 else x
