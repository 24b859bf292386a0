"""Selection from a row of scores, and its merge over ranks, as traced programs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kimi_hal.ops.topk_merge import TopKMergeSpec, TopKSpec
from kimi_hal.parallel import ownership
from kimi_hal.reference import protocols, selection
from kimi_hal.reference import topk_merge as reference
from kimi_hal_tpu.xla import order
from kimi_hal_tpu.xla.exchange import Exchange


def topk_select(spec: TopKSpec, given: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return indices ``[T, k]`` and the selected scores."""
    scores = order.rounded(given["scores"], spec.score)
    width = given["size_L"].long()
    length = ownership.local_length(given["row_len"].long(), ownership.of_keys(spec.dcp))
    start = given.get("row_start")
    first = torch.zeros_like(length) if start is None else torch.minimum(start.long().clamp(min=0), width)
    index = order.select(scores, first, torch.minimum(length, width - first).clamp(min=0), spec.topk)
    best = order.chosen(scores, index, first)
    return index, best if spec.return_selected else best[:, :0]


def topk_merge(
    spec: TopKMergeSpec, given: Mapping[str, Tensor], group: Exchange | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Merge the selections of all ranks; returns own winners, their number, and all winners."""
    keys = ownership.local_length(given["row_len"].long(), ownership.of_keys(spec.dcp))
    index = given["indices"].long()
    index = torch.where((index >= 0) & (index < keys[:, None]), index, -1)
    ordinals = order.ordinal(given["scores"].float())
    if group is None:
        winners = selection.ascending(index)
    elif spec.protocol == "scores_only":
        local = shared_threshold(spec, ordinals, index, group)
        return local, (local >= 0).sum(dim=1), local[:, :0]
    else:
        winners = protocols.full(spec, ordinals, index, group)  # type: ignore[arg-type]
    local = reference.own(spec, winners)
    return local, (local >= 0).sum(dim=1), winners if spec.return_global else winners[:, :0]


def shared_threshold(spec: TopKMergeSpec, ordinals: Tensor, local: Tensor, group: Exchange) -> Tensor:
    """Send ordinals, then the tied positions of every row: how many rows need them is no static size."""
    cut = protocols.threshold(spec, ordinals, local, group)  # type: ignore[arg-type]
    wanted = cut.wanted.clamp(min=1)
    first = protocols.among_first(spec, local, cut.tied, wanted, spec.topk, group)  # type: ignore[arg-type]
    tied = cut.tied & (first | ~cut.split[:, None])
    return selection.ascending(torch.where(cut.above | tied, local, -1))
