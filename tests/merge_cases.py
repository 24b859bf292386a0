"""Rows of scores full of ties, spread over ranks, and the merge of what each rank selects from its share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kimi_hal.ops.spec import DCP
from kimi_hal.ops.topk_merge import TopKMergeSpec, TopKSpec
from kimi_hal.parallel import ownership
from kimi_hal.parallel.groups import Group, LoopbackGroup
from kimi_hal.reference import selection
from kimi_hal.reference import topk_merge as reference

PROTOCOLS = ("full", "compact", "scores_only")
VALUES = [0.0, -0.0, 0.5, 1.0, 1.0, 2.0, -1.0, math.nan, -math.nan, math.inf, -math.inf, 1e-40]


def tied_rows(rows: int, width: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return bfloat16 scores and lengths: rows of a few values, rows of one value, rows of many."""
    generator = torch.Generator().manual_seed(seed)
    few = torch.tensor(VALUES)[torch.randint(0, len(VALUES), (rows, width), generator=generator)]
    many = torch.randn(rows, width, generator=generator)
    kind = torch.arange(rows)[:, None] % 3
    scores = torch.where(kind == 0, few, torch.where(kind == 1, torch.zeros(()), many))
    lengths = torch.randint(-2, width + 1, (rows,), generator=generator, dtype=torch.int32)
    return scores.bfloat16(), lengths


@dataclass
class Merged:
    """What W ranks returned."""

    world: int
    interleave: int
    local: list[Tensor] = field(default_factory=list)
    counts: list[Tensor] = field(default_factory=list)
    everyones: list[Tensor] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)

    def union(self, k: int) -> Tensor:
        """Return all ranks' winners as global positions ``[T, k]``; more than k of them is an error."""
        parts = []
        for rank, local in enumerate(self.local):
            dcp = DCP(world=self.world, rank=rank, interleave=self.interleave)
            parts.append(torch.where(local >= 0, ownership.position(local.long(), dcp), -1))
        whole = selection.ascending(torch.cat(parts, dim=1))
        assert (whole[:, k:] == -1).all()
        return whole[:, :k]


def share(scores: Tensor, dcp: DCP) -> Tensor:
    """Return the columns of the positions that a rank owns, poisoned where it owns none."""
    width = scores.shape[1]
    columns = -(-width // (dcp.world * dcp.interleave)) * dcp.interleave
    position = ownership.position(torch.arange(columns), dcp)
    mine = scores.new_full((scores.shape[0], columns), math.inf)
    mine[:, position < width] = scores[:, position[position < width]]
    return mine


def merge(
    scores: Tensor,
    row_len: Tensor,
    k: int,
    world: int,
    interleave: int = 1,
    *,
    faults: Any = None,
    make: Callable[[TopKMergeSpec, Group], Callable[..., Any]] | None = None,
    **fields: Any,
) -> Merged:
    """Select on every rank from its share and merge, by the reference or by what ``make`` returns."""
    dtype = str(scores.dtype).removeprefix("torch.")
    fields.setdefault("return_global", fields.get("protocol") != "scores_only")
    result = Merged(world, interleave)

    def one_rank(group: Group) -> tuple[Any, ...]:
        dcp = DCP(world=world, rank=group.rank(), interleave=interleave)
        select = TopKSpec(topk=k, score=dtype, scores_dtype=dtype, return_selected=True, dcp=dcp)
        index, chosen = reference.topk_select(select, share(scores, dcp), row_len)
        spec = TopKMergeSpec(dcp=dcp, topk=k, score=dtype, **fields)
        run = make(spec, group) if make else partial(reference.topk_merge, spec, group=group)
        done = run(chosen.to(scores.dtype), index, row_len)
        return (*done, group.bytes_sent)

    for local, count, everyones, sent in LoopbackGroup.run(world, one_rank, faults=faults):
        result.local.append(local)
        result.counts.append(count)
        result.everyones.append(everyones)
        result.sent.append(sent)
    return result
