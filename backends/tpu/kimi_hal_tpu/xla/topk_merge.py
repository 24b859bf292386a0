"""Selection from a row of scores, and its merge over ranks, as traced programs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kimi_hal.ops.topk_merge import TopKMergeSpec, TopKSpec
from kimi_hal.parallel import candidates, ownership
from kimi_hal.reference import protocols, selection
from kimi_hal.reference import topk_merge as reference
from kimi_hal_tpu import buckets
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
    elif spec.protocol == "compact":
        winners = compact(spec, ordinals, index, given["row_len"], group)
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


def compact(spec: TopKMergeSpec, ordinals: Tensor, local: Tensor, row_len: Tensor, group: Exchange) -> Tensor:
    """Send the best few candidates in 32 bits each, then in full the rows that they may not decide.

    How many those are is read on the host between two programs; the second is for a power of two of rows.
    """
    won, again = protocols.best_few(spec, ordinals, local, row_len, group, pack=pack, unpack=unpack)  # type: ignore[arg-type]
    rows = group.on_the_host(again).nonzero()[:, 0]
    if not len(rows):  # the same on every rank, since all have decoded the same messages
        return won
    room = min(buckets.power(len(rows)), len(won))
    some = torch.cat((rows, rows[:1].expand(room - len(rows)))).to(
        won.device
    )  # a row twice says the same twice
    resent = protocols.full(spec, ordinals[some], local[some], group.whole())  # type: ignore[arg-type]
    return order.put(won, some, resent)


def pack(scores: Tensor, positions: Tensor, held: Tensor, count: int) -> Tensor:
    """Return the message that ``parallel.candidates.pack`` gives, by comparisons, which stay in the trace."""
    segment = torch.where(positions < 0, count, positions >> 16)
    counts = (segment[:, None] == torch.arange(count, device=segment.device)[:, None]).sum(dim=2)
    words = (scores.int() << 16) | (positions.int() & (candidates.SEGMENT - 1))
    return torch.cat((counts.int(), held.int()[:, None], words), dim=1)


def unpack(message: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Undo ``pack`` for messages ``[..., count + 1 + C]``: scores int32, positions int64, held int32."""
    words = message[..., count + 1 :]
    ends = message[..., :count].cumsum(dim=-1)
    column = torch.arange(words.shape[-1], device=words.device)
    segment = (ends[..., None] <= column).sum(dim=-2)
    positions = segment * candidates.SEGMENT + (words & (candidates.SEGMENT - 1))
    return words >> 16, torch.where(segment < count, positions, -1), message[..., count]
