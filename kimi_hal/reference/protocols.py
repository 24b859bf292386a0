"""The protocols of ``topk_merge``, each over the messages of a group. ``docs/operators.md`` has their proofs.

A rank's candidates are ordinals ``[T, k]`` (``selection.py``) with local positions, −1 where there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_hal.ops.spec import DCP
from kimi_hal.ops.topk_merge import TopKMergeSpec
from kimi_hal.parallel import candidates, ownership
from kimi_hal.parallel.groups import Group
from kimi_hal.reference import selection
from kimi_hal.reference.selection import NO_KEY

#: On the wire of ``scores_only``: no candidate. Below the ordinal of NaN.
NO_ORDINAL = -(1 << 31)
NO_NARROW = -(1 << 15)


def full(spec: TopKMergeSpec, ordinals: Tensor, local: Tensor, group: Group) -> Tensor:
    """Send every candidate's ordinal and global position; return all winners, ascending, then −1."""
    position = torch.where(local >= 0, ownership.position(local, spec.dcp), -1)
    sent = torch.stack((ordinals, position.int()), dim=-1)
    everyone = group.all_gather(sent)
    return winners(selection.best(side_by_side(selection.keys(*everyone.unbind(-1))), spec.topk))


def compact(spec: TopKMergeSpec, ordinals: Tensor, local: Tensor, row_len: Tensor, group: Group) -> Tensor:
    """Send the best few candidates in 32 bits each, then in full the rows that they may not decide."""
    won, again = best_few(spec, ordinals, local, row_len, group)
    rows = again.nonzero()[:, 0]
    if rows.numel():  # the same on every rank, since all have decoded the same messages
        won[rows] = full(spec, ordinals[rows], local[rows], group)
    return won


def best_few(
    spec: TopKMergeSpec,
    ordinals: Tensor,
    local: Tensor,
    row_len: Tensor,
    group: Group,
    *,
    pack: Callable[[Tensor, Tensor, Tensor, int], Tensor] = candidates.pack,
    unpack: Callable[[Tensor, int], tuple[Tensor, Tensor, Tensor]] = candidates.unpack,
) -> tuple[Tensor, Tensor]:
    """Send the best few candidates; return the winners among them, and bool ``[T]``: may they be wrong.

    ``pack`` and ``unpack`` make and read the message, for devices that do it by other operations.
    """
    beyond = row_len > candidates.CONTEXT
    held = (local >= 0).sum(dim=1)
    kept = torch.where(beyond[:, None], -1, local)
    top = selection.best(selection.keys(selection.narrow(ordinals), kept), spec.candidates)
    count = candidates.segments(spec.dcp)
    everyone = group.all_gather(pack(*by_position(top), held, count))
    scores, positions, holds = unpack(everyone, count)
    key = selection.keys(scores, globally(positions, spec.dcp))
    best = selection.best(side_by_side(key), spec.topk)
    return winners(best), beyond | undecided(key, best, holds)


def undecided(key: Tensor, best: Tensor, held: Tensor) -> Tensor:
    """Tell which rows some rank may hold more winners of than it sent.

    That needs a rank that sent its whole quota, holds more, and whose last candidate is itself a winner.

    Args:
        key: ``[W, T, C]`` keys sent by each rank.
        best: ``[T, k]`` provisional winners, descending.
        held: ``[W, T]`` candidates of each rank.
    """
    last = key.amin(dim=-1)
    more = (last != NO_KEY) & (held > key.shape[-1])
    return (more & (last >= best[:, -1])).any(dim=0)


@dataclass(frozen=True)
class Cut:
    """What the shared threshold of ``scores_only`` says.

    Attributes:
        above: bool ``[T, k]``, this rank's candidates that win in any case.
        tied: bool ``[T, k]``, those that equal the threshold.
        ties: ``[W, T]``, how many tied ones each rank has; the same on every rank.
        wanted: ``[T]``, how many of all ranks' ties win, at least 1; the same on every rank.
    """

    above: Tensor
    tied: Tensor
    ties: Tensor
    wanted: Tensor

    @property
    def split(self) -> Tensor:
        """Tell in which rows ties straddle the cut, bool ``[T]``."""
        return self.ties.sum(dim=0) > self.wanted

    @property
    def needed(self) -> Tensor:
        """Return how many tied positions some rank must send, ``[T]``."""
        return torch.minimum(self.ties, self.wanted).amax(dim=0)


def scores_only(spec: TopKMergeSpec, ordinals: Tensor, local: Tensor, group: Group) -> Tensor:
    """Send ordinals alone and apply the shared threshold; return this rank's winners, ascending, then −1."""
    cut = threshold(spec, ordinals, local, group)
    tied, rows = cut.tied, cut.split.nonzero()[:, 0]
    if rows.numel():  # the same on every rank, as are ties and wanted
        width = int(cut.needed[rows].max())
        tied[rows] &= among_first(spec, local[rows], tied[rows], cut.wanted[rows], width, group)
    return selection.ascending(torch.where(cut.above | tied, local, -1))


def threshold(spec: TopKMergeSpec, ordinals: Tensor, local: Tensor, group: Group) -> Cut:
    """Send ordinals alone; find the k-th of all and what it leaves open."""
    none, short = NO_ORDINAL, spec.score == "bfloat16"
    if short:
        none, ordinals = NO_NARROW, selection.narrow(ordinals)
    mine = torch.where(local >= 0, ordinals, none)
    everyone = group.all_gather(mine.to(torch.int16 if short else torch.int32)).int()
    cut = side_by_side(everyone).topk(spec.topk, dim=1).values[:, -1:]
    return Cut(
        above=mine > cut,
        tied=(mine == cut) & (local >= 0),
        ties=((everyone == cut) & (everyone != none)).sum(dim=2),
        wanted=spec.topk - (everyone > cut).sum(dim=(0, 2)),
    )


def among_first(
    spec: TopKMergeSpec, local: Tensor, tied: Tensor, wanted: Tensor, width: int, group: Group
) -> Tensor:
    """Exchange tied positions and tell which of this rank's are among the ``wanted`` smallest of all.

    Args:
        spec: the merge.
        local: ``[R, k]`` local positions of rows whose ties straddle the cut.
        tied: ``[R, k]``, which of them are tied.
        wanted: ``[R]``, how many of all ranks' ties win.
        width: how many positions each rank sends; at least ``Cut.needed``.
        group: the ranks.
    """
    position = torch.where(tied, ownership.position(local, spec.dcp), -1)
    everyone = group.all_gather(selection.ascending(position)[:, :width].int()).long()
    bound = selection.ascending(side_by_side(everyone)).gather(1, wanted[:, None] - 1)
    return position <= bound


def winners(best: Tensor) -> Tensor:
    """Return the positions of keys, ascending, then −1."""
    return selection.ascending(selection.positions(best))


def side_by_side(parts: Tensor) -> Tensor:
    """Turn ``[W, T, n]`` into ``[T, W · n]``."""
    return parts.transpose(0, 1).flatten(1)


def by_position(key: Tensor) -> tuple[Tensor, Tensor]:
    """Return ordinals and positions of keys in ascending order of position, what is no key at the end."""
    position = selection.positions(key)
    order = position.masked_fill(position < 0, selection.LAST).argsort(dim=1)
    return (key >> 32).gather(1, order), position.gather(1, order)


def globally(positions: Tensor, dcp: DCP) -> Tensor:
    """Turn local positions ``[W, T, C]``, one slice a rank, into global ones; −1 stays."""
    ranks = [DCP(world=dcp.world, rank=rank, interleave=dcp.interleave) for rank in range(dcp.world)]
    moved = [ownership.position(part, rank) for part, rank in zip(positions, ranks, strict=True)]
    return torch.where(positions < 0, -1, torch.stack(moved))
