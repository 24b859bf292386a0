"""Cases of the topk_merge family: selection under the tie rule, and its merging over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kimi_hal.ops.spec import DCP, Limits
from kimi_hal.ops.topk_merge import TopKMergeSpec, TopKSpec
from kimi_hal.parallel import ownership
from kimi_hal_conformance.case import INTERP, QUICK, Case, Make, Operands, add
from kimi_hal_conformance.draws import ints, normal

LIMITS = Limits(max_rows=64, max_reqs=64, max_context=1 << 16)

Draw = Callable[[torch.Generator, int, int], Tensor]


def spread(g: torch.Generator, rows: int, width: int) -> Tensor:
    """Return distinct normal scores."""
    return normal(g, rows, width)


def ties(g: torch.Generator, rows: int, width: int) -> Tensor:
    """Return a hundred winners among equal scores (fault class 5)."""
    scores = torch.zeros(rows, width)
    for row in scores:
        row[torch.randperm(width, generator=g)[: min(100, width)]] = (
            torch.rand(min(100, width), generator=g) + 0.5
        )
    return scores


def clustered(g: torch.Generator, rows: int, width: int) -> Tensor:
    """Return distinct scores that share their leading 16 bits (fault class 6)."""
    step = torch.arange(width, dtype=torch.float32) * 2.0**-23 + 1.0
    return torch.stack([step[torch.randperm(width, generator=g)] for _ in range(rows)])


def special(g: torch.Generator, rows: int, width: int) -> Tensor:
    """Return scores with NaN of both signs, infinities, signed zeros and subnormals (fault class 19)."""
    scores = normal(g, rows, width).sign() * 0.0
    values = (math.nan, -math.nan, math.inf, -math.inf, 1e-45, -1e-45, 0.0, -0.0, 3e38)
    for row in scores:
        for value in values:
            row[torch.randperm(width, generator=g)[: max(1, width // 40)]] = value
    return scores


DISTRIBUTIONS: dict[str, Draw] = {"spread": spread, "ties": ties, "clustered": clustered, "special": special}


def select_operands(spec: TopKSpec, draw: Draw, lengths: Sequence[int], width: int) -> Make:
    """Return rows whose columns beyond their length would win if anyone read them."""

    def make(g: torch.Generator) -> Operands:
        rows = len(lengths)
        scores = draw(g, rows, width)
        start = [5 * i % 7 for i in range(rows)] if spec.has_row_start else [0] * rows
        for row, (first, length) in enumerate(zip(start, lengths, strict=True)):
            scores[row, :first] = math.inf
            scores[row, max(0, min(first + length, width)) :] = math.inf
        operands: dict[str, Tensor] = {
            "scores": scores.to(getattr(torch, spec.scores_dtype)),
            "row_len": ints(lengths),
        }
        return operands | ({"row_start": ints(start)} if spec.has_row_start else {})

    return make


def merge_operands(spec: TopKMergeSpec, draw: Draw, lengths: Sequence[int]) -> Make:
    """Return what each rank selected from its own share of one drawn row of scores."""

    def make(g: torch.Generator) -> Operands:
        width = max((*lengths, 1))
        scores = draw(g, len(lengths), width).to(getattr(torch, spec.score))
        return {"ranks": [rank_operands(spec, scores, lengths, rank) for rank in range(spec.dcp.world)]}

    return make


def rank_operands(spec: TopKMergeSpec, scores: Tensor, lengths: Sequence[int], rank: int) -> Operands:
    """Return one rank's own best keys, as ``indexer_topk`` with ``return_selected`` would."""
    from kimi_hal.reference.topk_merge import topk_select

    position = torch.arange(scores.shape[1])
    dcp = ownership.of_keys(replace(spec.dcp, rank=rank))
    mine = ownership.owner(position, dcp) == dcp.rank
    local = scores[:, mine]
    if not local.shape[1]:
        local = scores.new_zeros(scores.shape[0], 1)
    select = TopKSpec(
        topk=spec.topk, score=spec.score, scores_dtype=spec.score, return_selected=True, dcp=dcp
    )
    indices, chosen = topk_select(select, local, ints(lengths))
    return {"scores": chosen.to(scores.dtype), "indices": indices, "row_len": ints(lengths)}


def cases() -> Iterator[Case]:
    """Every distribution, lengths around k, windows, dtypes; then every protocol over several ranks."""
    k = 128
    around = (0, 1, k - 1, k, k + 1, 700, -3)
    for label, draw in DISTRIBUTIONS.items():
        for ordered in (False, True):
            spec = TopKSpec(topk=k, ordered=ordered, return_selected=True)
            yield selected(f"{label}/{'ordered' if ordered else 'any-order'}", spec, draw, around, 900)
        rounded = TopKSpec(topk=k, score="bfloat16", return_selected=True)
        yield selected(f"{label}/rounded", rounded, draw, around, 900)
        yield selected(f"{label}/k2048", TopKSpec(), draw, (2047, 2048, 2049, 8192), 8192)
    window = TopKSpec(topk=4, has_row_start=True, scores_dtype="bfloat16", score="bfloat16")
    yield selected("windows", window, spread, (9, 2, 0, 300, -1), 10)
    yield selected("no-rows", TopKSpec(topk=8), spread, (), 16)
    shard = TopKSpec(topk=16, dcp=DCP(world=4, rank=1, interleave=4), return_selected=True)
    yield selected("dcp4-rank1-interleave4", shard, spread, (100, 6, 4), 40)
    for world, interleave in ((1, 1), (2, 1), (3, 4), (8, 64)):
        for protocol in ("full", "compact", "scores_only"):
            for label in ("spread", "ties", "special"):
                yield merged(world, interleave, protocol, label)
        yield merged(world, interleave, "full", "ties", ordered=True)


#: Classes of ``docs/faults.md`` that a distribution of scores reproduces.
FAULTS: dict[Draw, int] = {spread: 0, ties: 5, clustered: 6, special: 19}


def selected(label: str, spec: TopKSpec, draw: Draw, lengths: Sequence[int], width: int) -> Case:
    """Return one case of ``topk_select``."""
    make = select_operands(spec, draw, lengths, width)
    since = INTERP if width < 1000 else QUICK
    name = f"topk_select/{label}"
    return Case(name, "topk_select", spec, LIMITS, make, since=since, fault=FAULTS[draw])


def interpreted(world: int, protocol: str, label: str) -> bool:
    """Tell whether an interpreter, for which every rank is as much work again, merges the case in seconds."""
    if world == 3:
        return (protocol, label) == ("full", "ties")
    return world == 1 or (world == 2 and label != "spread")


def merged(world: int, interleave: int, protocol: str, label: str, ordered: bool = False) -> Case:
    """Return one case of ``topk_merge`` over ``world`` ranks."""
    spec = TopKMergeSpec(
        dcp=DCP(world=world, interleave=interleave),
        topk=64,
        protocol=protocol,
        score="bfloat16" if protocol == "compact" else "float32",
        ordered=ordered,
        return_global=protocol != "scores_only",
    )
    make = merge_operands(spec, DISTRIBUTIONS[label], (0, 1, 63, 64, 65, 900))
    name = f"topk_merge/{protocol}/world{world}-interleave{interleave}/{label}{'/ordered' * ordered}"
    return Case(
        name,
        "topk_merge",
        spec,
        LIMITS,
        make,
        since=INTERP if interpreted(world, protocol, label) else QUICK,
        fault=FAULTS[DISTRIBUTIONS[label]],
        ranks=world,
    )


WHY = {
    "topk_select/spread/": "Distinct scores, lengths around k, columns behind the length that would win.",
    "topk_select/ties/": "A hundred winners among equal scores: the smallest tied positions fill the row.",
    "topk_select/clustered/": "Distinct scores that share their leading 16 bits: one bin of a radix selection.",
    "topk_select/special/": "NaN of both signs, infinities, zeros of both signs and subnormals among scores.",
    "topk_select/windows": "Windows that begin in the row and end behind it: positions are relative, lengths clamped.",
    "topk_select/no-rows": "No rows: nothing is launched.",
    "topk_select/dcp4": "Bounds are global: this rank's share of them counts.",
    "topk_merge/": "The union of the ranks' winners is the selection of one rank, on every protocol.",
}

add(cases(), WHY)
