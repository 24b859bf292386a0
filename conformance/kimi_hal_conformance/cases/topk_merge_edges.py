"""Edges of the topk_merge family: far positions, stale entries, one rank that holds all winners."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kimi_hal.ops.spec import DCP, Limits
from kimi_hal.ops.topk_merge import TopKMergeSpec
from kimi_hal.parallel import ownership
from kimi_hal_conformance.case import INTERP, QUICK, Case, Make, Operands, add
from kimi_hal_conformance.draws import ints

LIMITS = Limits(max_rows=16, max_reqs=16, max_context=1 << 26)
K = 32
#: Local positions at the borders of a segment of 16 bits, and half a segment on.
BORDERS = (0, 32_767, 32_768, 65_535, 65_536, 98_304, 131_071, 131_072)
PROTOCOLS = ("full", "compact", "scores_only")


def merge(world: int, protocol: str, interleave: int = 1) -> TopKMergeSpec:
    """Return rank 0's Spec."""
    return TopKMergeSpec(
        dcp=DCP(world=world, interleave=interleave),
        topk=K,
        protocol=protocol,
        score="bfloat16" if protocol == "compact" else "float32",
        return_global=protocol != "scores_only",
    )


def replicated() -> TopKMergeSpec:
    """Return a merge of which every rank holds all index keys."""
    return replace(merge(3, "full"), dcp=DCP(world=3, interleave=5, index="replicated"))


def far(spec: TopKMergeSpec, lengths: Sequence[int]) -> Make:
    """Return candidates all over requests of great length, the borders of segments among them."""

    def rank(g: torch.Generator, own: DCP) -> Operands:
        keys = [ownership.local_length(n, own) for n in lengths]
        indices = torch.stack([_spread(g, n) for n in keys])
        scores = torch.randn(len(lengths), K, generator=g)
        return {"scores": scores.to(getattr(torch, spec.score)), "indices": indices, "row_len": ints(lengths)}

    def make(g: torch.Generator) -> Operands:
        owners = [
            DCP(world=spec.dcp.world, rank=r, interleave=spec.dcp.interleave) for r in range(spec.dcp.world)
        ]
        return {"ranks": [rank(g, own) for own in owners]}

    return make


def _spread(g: torch.Generator, keys: int) -> Tensor:
    """Return distinct local positions below ``keys``: the borders, the last ones, and any."""
    chosen = {p for p in (*BORDERS, *range(keys - 4, keys)) if 0 <= p < keys}
    while len(chosen) < min(K, keys):
        chosen.add(int(torch.randint(keys, (), generator=g)))
    return ints([*sorted(chosen)[:K], *[-1] * (K - len(chosen))])


def one_rank_wins(spec: TopKMergeSpec) -> Make:
    """Return candidates of which one rank's are the best: all, more than its quota, and one."""

    def make(g: torch.Generator) -> Operands:
        ahead = torch.tensor([K, spec.candidates + 1 if spec.protocol == "compact" else K - 1, 1])
        ranks = []
        for rank in range(spec.dcp.world):
            scores = (
                torch.stack([torch.randperm(100, generator=g)[:K] for _ in ahead])
                .sort(1, descending=True)
                .values.float()
                - 200
            )
            if rank == spec.dcp.world - 1:
                scores = scores.where(torch.arange(K) >= ahead[:, None], scores + 400)
            indices = torch.stack([torch.randperm(200, generator=g)[:K] for _ in ahead]).int()
            lengths = ints([200 * spec.dcp.world] * len(ahead))
            ranks.append(
                {"scores": scores.to(getattr(torch, spec.score)), "indices": indices, "row_len": lengths}
            )
        return {"ranks": ranks}

    return make


def one_more_than_sent(spec: TopKMergeSpec) -> Make:
    """Return rows of which one rank holds all that it sends, one more and two more, and all of them win."""

    def make(g: torch.Generator) -> Operands:
        held = [spec.candidates, spec.candidates + 1, spec.candidates + 2]
        ranks = []
        for rank in range(spec.dcp.world):
            scores = torch.stack([torch.randperm(K, generator=g) for _ in held]).float()
            indices = torch.stack([_first(g, n) for n in held])
            scores += 100.0 * (rank == spec.dcp.world - 1)
            lengths = ints([n * spec.dcp.world for n in held])
            ranks.append(
                {"scores": scores.to(getattr(torch, spec.score)), "indices": indices, "row_len": lengths}
            )
        return {"ranks": ranks}

    return make


def _first(g: torch.Generator, keys: int) -> Tensor:
    """Return the positions below ``keys`` in any order, then −1."""
    return ints([*torch.randperm(keys, generator=g).tolist(), *[-1] * (K - keys)])


def mostly_nan(spec: TopKMergeSpec) -> Make:
    """Return rows in which few candidates are numbers: NaN wins too, by position, and −inf before it."""

    def make(g: torch.Generator) -> Operands:
        ranks = []
        for _ in range(spec.dcp.world):
            scores = torch.full((3, K), math.nan)
            scores[0, ::7], scores[1, ::3] = -math.inf, 0.5
            indices = torch.stack([torch.randperm(200, generator=g)[:K] for _ in range(3)]).int()
            lengths = ints([200 * spec.dcp.world] * 3)
            ranks.append(
                {"scores": scores.to(getattr(torch, spec.score)), "indices": indices, "row_len": lengths}
            )
        return {"ranks": ranks}

    return make


def stale(spec: TopKMergeSpec) -> Make:
    """Return rows whose entries behind their own candidates are stale, and would win."""

    def make(g: torch.Generator) -> Operands:
        ranks = []
        for rank in range(spec.dcp.world):
            own = ownership.of_keys(replace(spec.dcp, rank=rank))
            lengths = (5, 40, 0)
            scores = torch.randn(len(lengths), K, generator=g) - 10.0
            indices = torch.full((len(lengths), K), 1 << 30, dtype=torch.int32)
            for row, n in enumerate(lengths):
                keys = min(K, ownership.local_length(n, own))
                indices[row, :keys] = torch.randperm(keys, generator=g).int()
                scores[row, keys:] = 100.0
                indices[row, keys : keys + 2] = ints([ownership.local_length(n, own), -5])[: K - keys]
                for columns in (indices, scores):  # a stale one stands before the others
                    columns[row] = columns[row].roll(-keys + 1 if 0 < keys < K else 0)
            ranks.append(
                {
                    "scores": scores.to(getattr(torch, spec.score)),
                    "indices": indices,
                    "row_len": ints(lengths),
                }
            )
        return {"ranks": ranks}

    return make


def cases() -> Iterator[Case]:
    """Every protocol over two and three ranks."""
    for protocol in PROTOCOLS:
        for world, interleave in ((2, 1), (3, 4)):
            spec = merge(world, protocol, interleave)
            name = f"world{world}-interleave{interleave}"
            lengths = (100_000, 500_000, 1 << 20, (1 << 21) + 5, (1 << 25) + 77)
            yield case(f"{protocol}/far/{name}", spec, far(spec, lengths), fault=8)
            yield case(f"{protocol}/one-rank-wins/{name}", spec, one_rank_wins(spec), fault=6)
            yield case(f"{protocol}/stale-entries/{name}", spec, stale(spec), fault=4)
    for label, spec in {"one-rank": merge(1, "full"), "replicated": replicated()}.items():
        yield case(f"full/stale-entries/{label}", spec, stale(spec), fault=4)
    for protocol in PROTOCOLS:
        narrow = replace(merge(2, protocol), score="bfloat16")
        yield case(f"{protocol}/mostly-nan", narrow, mostly_nan(narrow), fault=5)
    quota = merge(2, "compact")
    yield case("compact/one-more-than-sent", quota, one_more_than_sent(quota), fault=6)


def case(label: str, spec: TopKMergeSpec, make: Make, fault: int) -> Case:
    """Return one case over the Spec's ranks."""
    return Case(
        f"topk_merge/edges/{label}",
        "topk_merge",
        spec,
        LIMITS,
        make,
        since=INTERP if spec.dcp.world == 2 else QUICK,
        fault=fault,
        ranks=spec.dcp.world,
    )


WHY = {
    "topk_merge/edges/full/far": "Positions at the borders of 16 and of 25 bits.",
    "topk_merge/edges/compact/far": "Positions at the borders of what 16 bits address, and far behind.",
    "topk_merge/edges/scores_only/far": "Positions at the borders of 16 and of 25 bits.",
    "topk_merge/edges/full/one-rank-wins": "One rank has all winners, all but one, and one.",
    "topk_merge/edges/compact/one-rank-wins": "One rank has more winners than its quota: the row is sent again.",
    "topk_merge/edges/full/mostly-nan": "bfloat16 candidates of NaN: each is a key, below −inf.",
    "topk_merge/edges/compact/mostly-nan": "bfloat16 candidates of NaN: each is a key, below −inf.",
    "topk_merge/edges/scores_only/mostly-nan": "bfloat16 candidates of NaN: each is a key, below −inf.",
    "topk_merge/edges/compact/one-more-than-sent": "A rank holds one winner more than it sends, and no more.",
    "topk_merge/edges/scores_only/one-rank-wins": "One rank has all winners, all but one, and one.",
    "topk_merge/edges/full/stale-entries": "Entries without an index that would win by their score.",
    "topk_merge/edges/compact/stale-entries": "Entries without an index that would win by their score.",
    "topk_merge/edges/scores_only/stale-entries": "Entries without an index that would win by their score.",
}

add(cases(), WHY)
