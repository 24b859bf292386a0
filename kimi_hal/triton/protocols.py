"""The protocols of ``topk_merge`` over kernels: what the reference's ``protocols.py`` sends, byte for byte as much.

A rank's own candidates, and those received, are planes of integers (``winners.py``). What a call holds is of the size
of its messages; nothing is kept between calls. The host waits once where a second message may follow: its size is
decided by the first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kimi_hal.ops.topk_merge import TopKMergeSpec
from kimi_hal.parallel import candidates, ownership
from kimi_hal.parallel.groups import Group, require
from kimi_hal.reference.topk_merge import AT_ONCE
from kimi_hal.triton import shards, winners

#: Candidates of a row that one program compares at once, at most: what its registers hold.
SHORT = 16384
#: Candidates that a program looks at together where it goes over a row.
BLOCK = 4096
#: Candidates whose places one program counts, and with how many others it compares them at once.
PLACED, STEP = 128, 64
#: The constants of kernels that do not look at owners: one kernel serves all ranks.
NOBODY = {"WORLD": 1, "RANK": 0, "INTERLEAVE": 1}
NOWHERE = {"WORLD": 1, "INTERLEAVE": 1}
#: The longest lists that are ordered by counting; longer ones are sorted.
COUNTED = 4096


@dataclass(frozen=True)
class Operands:
    """Candidates of some rows, and their bounds."""

    scores: Tensor
    indices: Tensor
    row_len: Tensor

    def rows(self, some: slice | Tensor) -> Operands:
        """Return the operands of some rows."""
        return Operands(self.scores[some], self.indices[some], self.row_len[some])


@dataclass(frozen=True)
class Results:
    """Where winners go: local and global positions ``[T, k]``, and how many of them are this rank's ``[T]``."""

    local: Tensor
    count: Tensor
    everyones: Tensor

    def rows(self, some: slice) -> Results:
        """Return the results of some rows."""
        return Results(self.local[some], self.count[some], self.everyones[some])

    def put(self, rows: Tensor, others: Results) -> None:
        """Put other results in the place of some rows."""
        self.local[rows] = others.local
        self.count[rows] = others.count
        self.everyones[rows] = others.everyones


@dataclass(frozen=True)
class Planes:
    """Candidates: ordinals and positions, each ``[W, T, C]``; ordinals may be in 16 bits."""

    ordinals: Tensor
    positions: Tensor

    def of_rank(self, rank: int) -> Planes:
        """Return one rank's candidates."""
        return Planes(self.ordinals[rank : rank + 1], self.positions[rank : rank + 1])

    def rows(self, some: Tensor) -> Planes:
        """Return the candidates of some rows."""
        return Planes(self.ordinals[:, some], self.positions[:, some])

    @property
    def total(self) -> int:
        """Return the candidates of a row."""
        return self.ordinals.shape[0] * self.ordinals.shape[2]

    @property
    def narrow(self) -> bool:
        """Tell whether ordinals are in 16 bits."""
        return self.ordinals.dtype == torch.int16

    @property
    def strides(self) -> tuple[int, int, int, int]:
        """Return rank and row strides of both planes."""
        return *_strides(self.ordinals), *_strides(self.positions)


def _strides(plane: Tensor) -> tuple[int, int]:
    return plane.stride(0), plane.stride(1)


@dataclass(frozen=True)
class Cut:
    """What parts winners from others, ``[T]`` each: an ordinal, and the last position of those that equal it."""

    ordinal: Tensor
    bound: Tensor


@dataclass(frozen=True)
class Listed:
    """Positions of winners in no order, ``[T, k]``, and how many they are, ``[T]``."""

    positions: Tensor
    number: Tensor


class Merger:
    """Merges selections over a group, for one Spec."""

    def __init__(self, spec: TopKMergeSpec, group: Group | None) -> None:
        self.spec, self.k = spec, spec.topk
        self.world = ownership.of_keys(spec.dcp).world
        self.group = require(group, spec.dcp) if self.world > 1 else None
        self.keys = shards.constants(spec.dcp)
        self.owner = {"WORLD": spec.dcp.world, "RANK": spec.dcp.rank, "INTERLEAVE": spec.dcp.interleave}
        self.home = {"WORLD": spec.dcp.world, "INTERLEAVE": spec.dcp.interleave}
        self.low = 16 if spec.score == "bfloat16" else 0
        self.segments = candidates.segments(spec.dcp)
        #: Rows of one message, the same on every rank.
        self.together = max(1, AT_ONCE // (self.world * spec.topk))

    def __call__(self, given: Operands, results: Results) -> None:
        """Fill the results of every row."""
        rows = given.indices.shape[0]
        for first in range(0, rows, self.together):
            some = slice(first, first + self.together)
            part = given.rows(some) if rows > self.together else given
            self.merge(part, results.rows(some))

    def merge(self, given: Operands, results: Results) -> None:
        """Fill the results of rows that go into one message; there is at least one."""
        if self.group is None:
            self.alone(given, results)
        elif self.spec.protocol == "scores_only":
            self.scores_only(given, results, self.group)
        elif self.spec.protocol == "compact":
            self.compact(given, results, self.group)
        else:
            self.full(given, results, self.group)

    # --- protocols --------------------------------------------------------------------------------------

    def alone(self, given: Operands, results: Results) -> None:
        """Take every candidate; where keys are on all ranks, each keeps those that it owns."""
        mine = self.offer(given)
        if self.spec.return_global:
            self.ascend(self.list_winners(mine, None), results.everyones)
        own = self.list_winners(mine, None, number=results.count, owned=self.spec.dcp.world > 1)
        self.ascend(own, results.local, local=True)

    def full(self, given: Operands, results: Results, group: Group) -> None:
        """Send every candidate's ordinal and global position."""
        sent = given.indices.new_empty((2, *given.indices.shape))
        self.offer(given, Planes(sent[:1], sent[1:]))
        everyone = group.all_gather(sent)
        planes = Planes(everyone[:, 0], everyone[:, 1])
        self.settle(planes, planes.of_rank(self.spec.dcp.rank), self.cut(planes), results)

    def compact(self, given: Operands, results: Results, group: Group) -> None:
        """Send the best few candidates in 32 bits each, then in full the rows that they may not decide."""
        messages = group.all_gather(self.best_few(given))
        planes = self.unpacked(messages)
        cut = self.cut(planes)
        self.settle(planes, planes.of_rank(self.spec.dcp.rank), cut, results)
        rows = self.undecided(planes, cut, messages, given.row_len).nonzero()[:, 0]
        if rows.numel():  # the same on every rank, since all have decoded the same messages
            whole = Results(results.local[rows], results.count[rows], results.everyones[rows])
            self.full(given.rows(rows), whole, group)
            results.put(rows, whole)

    def scores_only(self, given: Operands, results: Results, group: Group) -> None:
        """Send ordinals alone; where ties straddle the cut, their positions as well."""
        short = torch.int16 if self.spec.score == "bfloat16" else torch.int32
        shape = (1, *given.indices.shape)
        mine = Planes(given.indices.new_empty(shape, dtype=short), given.indices.new_empty(shape))
        self.offer(given, mine)
        everyone = Planes(group.all_gather(mine.ordinals[0]), mine.positions)
        cut = self.cut(everyone, bound=False)
        wanted, needed = self.ties(everyone, cut)
        asked = needed.cpu()
        rows, width = asked.nonzero()[:, 0].to(needed.device), int(asked.max())
        if width:  # the same on every rank, as are all counts
            cut.bound[rows] = self.bound_of_ties(
                mine.rows(rows), cut.ordinal[rows], wanted[rows], width, group
            )
        self.ascend(self.list_winners(mine, cut, number=results.count), results.local, local=True)

    def settle(self, everyone: Planes, mine: Planes, cut: Cut, results: Results) -> None:
        """Write this rank's winners, and all of them where they are wanted."""
        self.ascend(self.list_winners(mine, cut, number=results.count), results.local, local=True)
        if self.spec.return_global:
            self.ascend(self.list_winners(everyone, cut), results.everyones)

    # --- steps ------------------------------------------------------------------------------------------

    def offer(self, given: Operands, planes: Planes | None = None, *, packed: bool = False) -> Planes:
        """Write this rank's candidates into planes; ``packed``: those that go into 32 bits, as local positions."""
        rows, k = given.indices.shape
        if planes is None:
            shape = (1, rows, k)
            planes = Planes(given.indices.new_empty(shape), given.indices.new_empty(shape))
        block = min(1024, max(64, triton.next_power_of_2(k)))
        winners.offer[(rows, triton.cdiv(k, block))](
            given.scores,
            given.indices,
            given.row_len,
            planes.ordinals,
            planes.positions,
            given.scores.stride(0),
            given.indices.stride(0),
            given.row_len.stride(0),
            planes.ordinals.stride(1),
            planes.positions.stride(1),
            k,
            CONTEXT=candidates.CONTEXT if packed else 0,
            GLOBAL=not packed,
            NARROW=planes.narrow,
            LOW=self.low,
            **self.keys,
            BLOCK=block,
        )
        return planes

    def cut(self, planes: Planes, k: int = 0, *, bound: bool = True) -> Cut:
        """Find what parts the ``k`` best candidates of each row from the others."""
        ordinal = planes.ordinals.new_empty(planes.ordinals.shape[1], dtype=torch.int32)
        limit = torch.empty_like(ordinal) if bound else torch.full_like(ordinal, winners.NO_BOUND.value)
        self.cutting(planes, Cut(ordinal, limit), None, k or self.k, bound=bound)
        return Cut(ordinal, limit)

    def cutting(self, planes: Planes, cut: Cut, wanted: Tensor | None, k: int, *, bound: bool) -> None:
        """Run the kernel that fits the candidates of a row."""
        total, flipped = planes.total, wanted is not None
        short = total <= SHORT
        block = max(64, triton.next_power_of_2(total)) if short else BLOCK
        kernel = winners.cut_short if short else winners.cut_long
        kernel[(planes.ordinals.shape[1],)](
            planes.ordinals,
            planes.positions,
            cut.ordinal,
            cut.bound,
            wanted,
            *planes.strides,
            planes.ordinals.shape[2],
            total,
            k,
            FLIPPED=flipped,
            BOUND=bound,
            NARROW=planes.narrow,
            LOW=0 if flipped else self.low,
            BLOCK=block,
            num_warps=4 if block <= 2048 else 8 if block <= 8192 else 16,
        )

    def list_winners(
        self,
        planes: Planes,
        cut: Cut | None,
        *,
        number: Tensor | None = None,
        keys: Tensor | None = None,
        tied: bool = False,
        owned: bool = False,
    ) -> Listed:
        """List the winners of each row; without a cut every candidate wins."""
        rows = planes.ordinals.shape[1]
        if number is None:
            number = planes.positions.new_empty(rows)
        listed = torch.empty_like(keys) if keys is not None else planes.positions.new_empty((rows, self.k))
        block = min(BLOCK, max(64, triton.next_power_of_2(planes.total)))
        winners.list_winners[(rows,)](
            planes.ordinals,
            planes.positions,
            None if cut is None else cut.ordinal,
            None if cut is None else cut.bound,
            listed,
            keys,
            number,
            *planes.strides,
            listed.stride(0),
            number.stride(0),
            planes.ordinals.shape[2],
            planes.total,
            listed.shape[1],
            EVERY=cut is None,
            TIED=tied,
            KEYS=keys is not None,
            OWNED=owned,
            NARROW=planes.narrow,
            **(self.owner if owned else NOBODY),
            BLOCK=block,
        )
        return Listed(listed, number)

    def ascend(self, listed: Listed, out: Tensor, *, local: bool = False) -> None:
        """Write lists in ascending order, then −1; ``local``: as this rank's local positions."""
        rows, k = listed.positions.shape
        if k > COUNTED:
            listed = sorted_lists(listed)
        winners.ascend[(rows, triton.cdiv(k, PLACED))](
            listed.positions,
            listed.number,
            out,
            listed.positions.stride(0),
            listed.number.stride(0),
            out.stride(0),
            out.shape[1],
            SORTED=k > COUNTED,
            LOCAL=local,
            **(self.home if local else NOWHERE),
            BLOCK=PLACED,
            STEP=STEP,
        )

    # --- compact ----------------------------------------------------------------------------------------

    def best_few(self, given: Operands) -> Tensor:
        """Return this rank's message: its best few candidates in 32 bits each, behind a header a row."""
        rows, few = given.indices.shape[0], self.spec.candidates
        mine = self.offer(given, packed=True)
        keys = given.indices.new_empty((rows, few))
        listed = self.list_winners(mine, self.cut(mine, few), keys=keys)
        if few > COUNTED:
            order = placed(listed).argsort(dim=1)
            listed = Listed(listed.positions.gather(1, order), listed.number)
            keys = keys.gather(1, order)
        message = given.indices.new_empty((rows, self.segments + 1 + few))
        winners.pack[(rows, triton.cdiv(few, PLACED))](
            listed.positions,
            keys,
            listed.number,
            mine.positions,
            message,
            listed.positions.stride(0),
            mine.positions.stride(1),
            message.stride(0),
            few,
            mine.positions.shape[2],
            SEGMENTS=self.segments,
            SORTED=few > COUNTED,
            BLOCK=PLACED,
            STEP=STEP,
        )
        return message

    def unpacked(self, messages: Tensor) -> Planes:
        """Return the candidates in everyone's messages."""
        world, rows, few = *messages.shape[:2], self.spec.candidates
        planes = Planes(messages.new_empty((world, rows, few)), messages.new_empty((world, rows, few)))
        winners.unpack[(rows, world)](
            messages,
            planes.ordinals,
            planes.positions,
            *messages.stride()[:2],
            *planes.ordinals.stride()[:2],
            few,
            SEGMENTS=self.segments,
            **self.home,
            BLOCK=min(1024, max(64, triton.next_power_of_2(few))),
        )
        return planes

    def undecided(self, planes: Planes, cut: Cut, messages: Tensor, row_len: Tensor) -> Tensor:
        """Tell which rows the messages may not decide, int32 ``[T]``."""
        again = torch.empty_like(cut.ordinal)
        few = planes.ordinals.shape[2]
        winners.undecided[(again.shape[0],)](
            planes.ordinals,
            planes.positions,
            cut.ordinal,
            cut.bound,
            messages,
            row_len,
            again,
            *planes.ordinals.stride()[:2],
            *messages.stride()[:2],
            row_len.stride(0),
            few,
            planes.total,
            CONTEXT=candidates.CONTEXT,
            SEGMENTS=self.segments,
            BLOCK=min(1024, max(64, triton.next_power_of_2(few))),
        )
        return again

    # --- scores_only ------------------------------------------------------------------------------------

    def ties(self, everyone: Planes, cut: Cut) -> tuple[Tensor, Tensor]:
        """Return how many ties win, and how many positions some rank must send, 0 where all do; ``[T]`` each."""
        wanted, needed = torch.empty_like(cut.ordinal), torch.empty_like(cut.ordinal)
        columns = everyone.ordinals.shape[2]
        winners.ties[(wanted.shape[0],)](
            everyone.ordinals,
            cut.ordinal,
            wanted,
            needed,
            *everyone.ordinals.stride()[:2],
            columns,
            everyone.total,
            self.k,
            NARROW=everyone.narrow,
            BLOCK=min(BLOCK, max(64, triton.next_power_of_2(columns))),
        )
        return wanted, needed

    def bound_of_ties(
        self, mine: Planes, ordinal: Tensor, wanted: Tensor, width: int, group: Group
    ) -> Tensor:
        """Exchange tied positions; return the last that wins in each row.

        Args:
            mine: this rank's candidates of rows whose ties straddle the cut.
            ordinal: their cuts.
            wanted: how many of all ranks' ties win.
            width: how many positions each rank sends.
            group: the ranks.
        """
        bound = torch.empty_like(ordinal)
        sent = mine.positions.new_empty((len(ordinal), width))
        self.ascend(self.list_winners(mine, Cut(ordinal, bound), tied=True), sent)
        everyone = group.all_gather(sent)
        self.cutting(Planes(everyone, everyone), Cut(ordinal, bound), wanted, self.k, bound=True)
        return bound


def placed(listed: Listed) -> Tensor:
    """Return the positions of lists with what is not listed beyond every position."""
    column = torch.arange(listed.positions.shape[1], device=listed.positions.device)
    return listed.positions.masked_fill(column >= listed.number[:, None], winners.NO_BOUND.value)


def sorted_lists(listed: Listed) -> Listed:
    """Return lists in ascending order."""
    return Listed(placed(listed).sort(dim=1).values, listed.number)
