"""``topk_merge`` for a captured graph: messages whose shapes follow from T and the Spec alone, and a flag.

Eagerly a second message is as large as the first one asks for. A graph cannot do that: here the second
exchange has a capacity, and rows that it has no room for count into a flag on the device, which the engine
reads after replay. Such a row has no winners at all (−1, length 0) until an eager merge has answered it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_hal.errors import SpecError
from kimi_hal.ops import check, topk_merge
from kimi_hal.ops.spec import Limits
from kimi_hal.ops.topk_merge import TopKMergeSpec
from kimi_hal.parallel import ownership
from kimi_hal.parallel.agreement import agree_on
from kimi_hal.parallel.groups import Group, require
from kimi_hal.reference import protocols, selection
from kimi_hal.reference import topk_merge as reference

#: One row in so many has room in the second exchange unless the engine says otherwise. With positions dealt one
#: by one no row needed it, on random scores and on real text; room costs bytes at every call.
ROWS_A_RESEND = 32
#: Tied positions of a row that have room where nearly every row has ties across the cut, as scores of 16 bits do.
#: 51 were needed at most (two ranks, 131,072 keys); figures: ``benchmarks/results/merge_traffic.json``.
TIES = 128


@dataclass(frozen=True)
class Capacity:
    """The room of the second exchange.

    Args:
        rows: rows of one call that are resent (``compact``), or whose ties are exchanged (``scores_only``).
        ties: tied positions of such a row that each rank can send, for ``scores_only``; k serves any row.
    """

    rows: int
    ties: int

    @classmethod
    def default(cls, spec: TopKMergeSpec, max_rows: int) -> Capacity:
        """Return room for one row in 32; for ``scores_only`` of bfloat16, whose scores often tie, for every row."""
        if spec.protocol == "scores_only" and spec.score == "bfloat16":
            return cls(rows=max(1, max_rows), ties=min(spec.topk, TIES))
        return cls(rows=max(1, -(-max_rows // ROWS_A_RESEND)), ties=spec.topk)

    def bytes(self, spec: TopKMergeSpec) -> int:
        """Return what a rank sends in the second exchange of every call, needed or not."""
        each = {"full": 0, "compact": 8 * spec.topk, "scores_only": 4 * self.ties}
        return self.rows * each[spec.protocol]


class CapturedMerge:
    """``topk_merge`` over a group without a shape or a branch that data decides.

    Args:
        spec: the merge; ``full`` needs no second exchange and never raises the flag.
        group: the ranks; with ``TorchGroup`` one of ``verify=False``, since verifying reads the device.
        limits: ``max_rows`` bounds T.
        device: where the operands are.
        capacity: the same on every rank; ``None``: ``Capacity.default``.

    Raises:
        GroupError: the group is not the Spec's; on all ranks, if Spec or capacity differs.

    Attributes:
        flag: int32 ``[1]`` on the device, the same on every rank: rows left without an answer since it was
            last set to zero. It grows, so that many layers share one reading. Above 0, repeat the step with an
            eager merge: ``plan("topk_merge", …)`` with any protocol.
    """

    def __init__(
        self,
        spec: TopKMergeSpec,
        group: Group | None,
        limits: Limits,
        *,
        device: torch.device | str,
        capacity: Capacity | None = None,
    ) -> None:
        self.spec = spec
        self.capacity = capacity or Capacity.default(spec, limits.max_rows)
        if min(self.capacity.rows, self.capacity.ties) < 1:
            raise SpecError(
                f"{self.capacity}: rows and ties are at least 1; leave capacity out for a default"
            )
        self.flag = torch.zeros(1, dtype=torch.int32, device=device)
        sharded = ownership.of_keys(spec.dcp).world > 1
        self._group = require(group, spec.dcp) if sharded else None
        if (
            self._group is not None
        ):  # its messages have one shape whatever they mean, so nothing would tell later
            facts = {name: str(value) for name, value in spec.to_dict().items() if name != "dcp"}
            facts |= {
                f"dcp.{name}": str(value) for name, value in spec.dcp.to_dict().items() if name != "rank"
            }
            agree_on(self._group, {**facts, "capacity": str(self.capacity)})
        self._check = check.compiled(topk_merge, spec, limits)

    def run(
        self,
        scores: Tensor,
        indices: Tensor,
        row_len: Tensor,
        *,
        local_out: Tensor | None = None,
        len_out: Tensor | None = None,
        global_out: Tensor | None = None,
        workspace: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Merge as ``topk_merge`` does; a row that the second exchange has no room for gives −1 and 0."""
        outputs = {"local_out": local_out, "len_out": len_out, "global_out": global_out}
        self._check(scores=scores, indices=indices, row_len=row_len, **outputs)
        local, everyones = self._merged(scores, indices, row_len.long())
        shown = everyones if self.spec.return_global else everyones[:, :0]
        results = (local.int(), (local >= 0).sum(dim=1).int(), shown.int())
        return tuple(
            value if buffer is None else buffer.copy_(value)
            for value, buffer in zip(results, outputs.values(), strict=True)
        )  # type: ignore[return-value]

    def _merged(self, scores: Tensor, indices: Tensor, row_len: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's winners as local positions, and all as global ones unless ids stay local."""
        spec, group = self.spec, self._group
        ordinals, local = reference.candidates(spec, scores, indices, row_len)
        if group is not None and spec.protocol == "scores_only":
            mine = self._scores_only(ordinals, local, group)
            return mine, torch.full_like(mine, -1)
        if group is None:
            won = selection.ascending(local)
        elif spec.protocol == "compact":
            won = self._compact(ordinals, local, row_len, group)
        else:
            won = protocols.full(spec, ordinals, local, group)
        return reference.own(spec, won), won

    def _compact(self, ordinals: Tensor, local: Tensor, row_len: Tensor, group: Group) -> Tensor:
        won, again = protocols.best_few(self.spec, ordinals, local, row_len, group)
        rows = self._first(again)
        needed = again[rows, None]
        resent = protocols.full(self.spec, ordinals[rows], torch.where(needed, local[rows], -1), group)
        won[rows] = torch.where(needed, resent, won[rows])
        again.index_fill_(0, rows, False)
        return self._without(again, won)

    def _scores_only(self, ordinals: Tensor, local: Tensor, group: Group) -> Tensor:
        cut = protocols.threshold(self.spec, ordinals, local, group)
        width = min(self.capacity.ties, self.spec.topk)
        tied, open_rows = cut.tied, cut.split
        served = open_rows & (cut.needed <= width)
        rows = self._first(served)
        needed = served[rows]
        # Rows that need no exchange fill the message up; what they would wait for may be beyond its width.
        wanted = torch.where(needed, cut.wanted[rows], 1)
        first = protocols.among_first(self.spec, local[rows], tied[rows], wanted, width, group)
        tied[rows] = torch.where(needed[:, None], tied[rows] & first, tied[rows])
        open_rows[rows] = open_rows[rows] & ~needed
        return self._without(open_rows, selection.ascending(torch.where(cut.above | tied, local, -1)))

    def _first(self, wanting: Tensor) -> Tensor:
        """Return as many rows as have room, those of bool ``[T]`` first."""
        return wanting.int().argsort(descending=True, stable=True)[: self.capacity.rows]

    def _without(self, missed: Tensor, won: Tensor) -> Tensor:
        """Count the rows that were missed, and take what they seemed to have won from them."""
        self.flag += missed.sum().int()
        return torch.where(missed[:, None], -1, won)
