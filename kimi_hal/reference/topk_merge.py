"""Top-k selection and its merge over ranks in plain torch: the meaning of ``ops/topk_merge.py``.

Selection is over integers (``selection.py``) and what one rank knows of another it has received as bytes
(``protocols.py``), so ``dtype`` only says in what selected scores are returned.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_hal.ops.topk_merge import TopKMergeSpec, TopKSpec
from kimi_hal.parallel import ownership
from kimi_hal.parallel.groups import Group, require
from kimi_hal.reference import protocols, selection

#: Candidates of all ranks that are merged at once: 32 MB of keys. The rows of one message follow from it.
AT_ONCE = 1 << 22


def topk_select(
    spec: TopKSpec,
    scores: Tensor,
    row_len: Tensor,
    row_start: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Select from rows of scores, in ascending order of position."""
    score = getattr(torch, spec.score)
    lengths = ownership.local_length(row_len.long(), ownership.of_keys(spec.dcp))
    index = selection.select_positions(scores, lengths, spec.topk, starts=row_start, score=score)
    wanted = index if spec.return_selected else index[:, :0]
    return index.int(), selection.as_score(selection.scores_at(scores, wanted, row_start), score).to(dtype)


def topk_merge(
    spec: TopKMergeSpec,
    scores: Tensor,
    indices: Tensor,
    row_len: Tensor,
    *,
    dtype: torch.dtype = torch.float32,
    group: Group | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Merge selections over ``group``; nothing is rounded, so ``dtype`` has no effect."""
    world = ownership.of_keys(spec.dcp).world
    live = require(group, spec.dcp) if world > 1 else None
    local = torch.full_like(indices, -1, dtype=torch.int64)
    everyones = torch.full_like(local, -1)
    # Cut by T and the Spec alone, so that every rank sends the same messages.
    step = max(1, AT_ONCE // (world * spec.topk))
    for begin in range(0, indices.shape[0], step):
        rows = slice(begin, begin + step)
        local[rows], everyones[rows] = _merge(spec, scores[rows], indices[rows], row_len[rows].long(), live)
    shown = everyones if spec.return_global else everyones[:, :0]
    return local.int(), (local >= 0).sum(dim=1).int(), shown.int()


def _merge(
    spec: TopKMergeSpec, scores: Tensor, indices: Tensor, row_len: Tensor, group: Group | None
) -> tuple[Tensor, Tensor]:
    """Return this rank's winners as local positions and, unless ids stay local, all winners as global ones."""
    ordinals, index = candidates(spec, scores, indices, row_len)
    if group is None:
        winners = selection.ascending(index)
    elif spec.protocol == "scores_only":
        mine = protocols.scores_only(spec, ordinals, index, group)
        return mine, torch.full_like(mine, -1)
    elif spec.protocol == "compact":
        winners = protocols.compact(spec, ordinals, index, row_len, group)
    else:
        winners = protocols.full(spec, ordinals, index, group)
    return own(spec, winners), winners


def candidates(
    spec: TopKMergeSpec, scores: Tensor, indices: Tensor, row_len: Tensor
) -> tuple[Tensor, Tensor]:
    """Return ordinals and int64 local positions of this rank's candidates, −1 where there is none."""
    keys = ownership.local_length(row_len, ownership.of_keys(spec.dcp))
    index = indices.long()
    return selection.ordinal(scores), torch.where(index < keys[:, None], index, -1).clamp(min=-1)


def own(spec: TopKMergeSpec, winners: Tensor) -> Tensor:
    """Return which of all winners this rank owns, as ascending local positions, then −1."""
    mine = (winners >= 0) & (ownership.owner(winners, spec.dcp) == spec.dcp.rank)
    return selection.ascending(torch.where(mine, ownership.local(winners, spec.dcp), -1))
