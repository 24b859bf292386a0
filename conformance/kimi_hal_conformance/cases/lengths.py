"""Lengths and positions at the ends of their integers: 2^31 − 1 keys, of which few exist, and positions past 2^16."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kimi_hal import formats
from kimi_hal.ops.indexer import IndexerSpec, IndexerTopKSpec
from kimi_hal.ops.spec import DCP, Limits
from kimi_hal.ops.topk_merge import TopKSpec
from kimi_hal_conformance.case import INTERP, QUICK, Case, Make, Operands, add
from kimi_hal_conformance.draws import index_cache, ints, normal

LIMITS = Limits(max_rows=16, max_reqs=4, max_context=1 << 17)
FP8 = "index.fp8.e4m3fn.pow2.page64"
LAST = (1 << 31) - 1
#: The largest length; the two between which ``length + 63`` passes 2^31; one that every block table has.
LENGTHS = (LAST, LAST - 62, LAST - 63, 70)
#: Columns of a score row and positions of a request: more than 16 bits count.
FAR = (1 << 16) + 100


def queries(g: torch.Generator, spec: IndexerSpec, rows: int) -> dict[str, Tensor]:
    """Return quantised queries and weights of both signs."""
    q, _ = formats.index(spec.index).encode_query(normal(g, rows, spec.num_heads, 128).bfloat16())
    return {
        "q": q,
        "q_scale": torch.empty(rows, spec.num_heads, 0, dtype=torch.uint8),
        "weights": normal(g, rows, spec.num_heads, spread=0.02),
    }


def longest(spec: IndexerSpec) -> Make:
    """Return rows that ask for 2^31 − 1 keys of a table of two pages."""

    def make(g: torch.Generator) -> Operands:
        rows = len(LENGTHS)
        return queries(g, spec, rows) | {
            "cache": index_cache(g, spec.index, 3, torch.arange(192)),
            "block_table": ints([2, 0]).view(1, 2),
            "row_req": ints([0] * rows),
            "row_len": ints(LENGTHS),
        }

    return make


def longest_rows(spec: TopKSpec) -> Make:
    """Return rows of scores that ask for 2^31 − 1 columns, from the first one on and from later ones."""

    def make(g: torch.Generator) -> Operands:
        lengths, starts = (LAST, LAST, LAST - 62, LAST, 9), (0, 3, 64, 99, 100)
        operands = {"scores": normal(g, len(lengths), 100), "row_len": ints(lengths)}
        return operands | ({"row_start": ints(starts)} if spec.has_row_start else {})

    return make


def far_pages(spec: IndexerSpec) -> Make:
    """Return a request whose first page and whose last ones exist, these behind position 2^16."""

    def make(g: torch.Generator) -> Operands:
        table = torch.full((1, -(-FAR // 64)), -1, dtype=torch.int32)
        table[0, 0], table[0, -2], table[0, -1] = 1, 0, 2
        return queries(g, spec, 1) | {
            "cache": index_cache(g, spec.index, 3, torch.arange(192)),
            "block_table": table,
            "row_req": ints([0]),
            "row_len": ints([FAR]),
        }

    return make


def far_columns(spec: TopKSpec) -> Make:
    """Return a row whose best scores stand behind column 2^16."""

    def make(g: torch.Generator) -> Operands:
        scores = normal(g, 1, FAR)
        scores[:, 1 << 16 :] += 8.0
        return {"scores": scores, "row_len": ints([FAR])}

    return make


def cases() -> Iterator[Case]:
    """One of each for every operator that takes a length of a row and is no composite."""
    scored = IndexerSpec(index=FP8, num_heads=4)
    selected = IndexerTopKSpec(index=FP8, num_heads=4, topk=96)
    shard = DCP(world=4, rank=2, interleave=4)
    rows = TopKSpec(topk=16, has_row_start=True, return_selected=True)
    local = TopKSpec(topk=16, dcp=shard)
    yield case("indexer_logits/edges/longest", scored, longest(scored), 7)
    yield case("indexer_topk/edges/longest", selected, longest(selected), 7)
    sharded = IndexerTopKSpec(index=FP8, num_heads=4, topk=96, dcp=shard, return_selected=True)
    yield case("indexer_topk/edges/longest/dcp4-rank2", sharded, longest(sharded), 7)
    yield case("topk_select/edges/longest", rows, longest_rows(rows), 7)
    yield case("topk_select/edges/longest/dcp4-rank2", local, longest_rows(local), 7)
    few = IndexerTopKSpec(index=FP8, num_heads=2, topk=64)
    yield case("indexer_topk/edges/behind-65536", few, far_pages(few), 9, since=QUICK)
    most = TopKSpec(topk=64)
    yield case("topk_select/edges/behind-65536", most, far_columns(most), 9, since=QUICK)


def case(name: str, spec: IndexerSpec | TopKSpec, make: Make, fault: int, since: str = INTERP) -> Case:
    """Return a case of the operator in its name."""
    return Case(name, name.partition("/")[0], spec, LIMITS, make, since=since, fault=fault)


WHY = {
    "indexer_logits/edges/longest": "2^31 − 1 keys are asked for: as many as the table has. Their pages overflow.",
    "indexer_topk/edges/longest": "2^31 − 1 keys are asked for: as many as the table has. Their pages overflow.",
    "topk_select/edges/longest": "2^31 − 1 columns from a later one on: their end overflows 32 bits.",
    "indexer_topk/edges/behind-65536": "The winners stand behind position 65,536.",
    "topk_select/edges/behind-65536": "The winners stand behind column 65,536.",
}

add(cases(), WHY)
