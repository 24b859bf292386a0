"""Edges of the indexer family: ties that only rounding makes, NaN in a live key, a page that is missing."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kimi_hal import formats
from kimi_hal.ops.indexer import IndexerSpec, IndexerTopKSpec, IndexQuerySpec
from kimi_hal.ops.spec import Limits
from kimi_hal_conformance.case import INTERP, Case, Make, Operands, add
from kimi_hal_conformance.draws import index_cache, ints, normal

LIMITS = Limits(max_rows=16, max_reqs=4, max_context=2048)
FP8 = "index.fp8.e4m3fn.pow2.page64"


def queries(g: torch.Generator, spec: IndexerSpec, rows: int) -> dict[str, torch.Tensor]:
    """Return quantised queries and weights of both signs."""
    q, _ = formats.index(spec.index).encode_query(normal(g, rows, spec.num_heads, 128).bfloat16())
    return {
        "q": q,
        "q_scale": torch.empty(rows, spec.num_heads, 0, dtype=torch.uint8),
        "weights": normal(g, rows, spec.num_heads, spread=0.02),
    }


def rounded_ties(spec: IndexerTopKSpec, length: int) -> Make:
    """Return so many keys that many scores are equal once they are rounded to bfloat16, also at the cut."""

    def make(g: torch.Generator) -> Operands:
        pages = -(-length // 64)
        table = torch.randperm(pages, generator=g).int()[None]
        return queries(g, spec, 3) | {
            "cache": index_cache(g, spec.index, pages, torch.arange(64 * pages)),
            "block_table": table,
            "row_req": ints([0, 0, 0]),
            "row_len": ints([length, length - 1, length // 2]),
        }

    return make


def broken_keys(spec: IndexerSpec) -> Make:
    """Return a live key with a NaN element, and a request whose middle page is missing."""

    def make(g: torch.Generator) -> Operands:
        cache = index_cache(g, spec.index, 4, torch.arange(256))
        cache[1, 9 * 128 + 17] = 0x7F  # one element of key 9 of page 1
        return queries(g, spec, 2) | {
            "cache": cache,
            "block_table": ints([1, 2, 0, -1, 3, -1]).view(2, 3).flip(1).contiguous(),
            "row_req": ints([0, 1]),
            "row_len": ints([190, 192]),
        }

    return make


def pageless_winners(spec: IndexerTopKSpec) -> Make:
    """Return requests with fewer keys than are selected, some on a page that is missing or behind the cache's last."""

    def make(g: torch.Generator) -> Operands:
        return queries(g, spec, 4) | {
            "cache": index_cache(g, spec.index, 4, torch.arange(256)),
            "block_table": ints([0, -1, 1, 4, -1, 2, -7, 3]).view(2, 4),
            "row_req": ints([0, 1, 1, 0]),
            "row_len": ints([256, 200, 256, 100]),
        }

    return make


def turned(spec: IndexQuerySpec) -> Make:
    """Return queries of a head count that no kernel's list has, heads of very different size."""

    def make(g: torch.Generator) -> Operands:
        size = 2.0 ** torch.arange(spec.num_heads).remainder(7)[:, None]
        q = normal(g, 3, spec.num_heads, 128) * size
        return {"q": q.bfloat16(), "weights": normal(g, 3, spec.num_heads)}

    return make


def cases() -> Iterator[Case]:
    """Scores, selections and queries at their edges."""
    rounded = IndexerTopKSpec(
        index=FP8, num_heads=8, topk=256, score="bfloat16", ordered=True, return_selected=True
    )
    yield Case(
        "indexer_topk/edges/ties-by-rounding",
        "indexer_topk",
        rounded,
        LIMITS,
        rounded_ties(rounded, 2000),
        fault=5,
    )
    slots = IndexerTopKSpec(index=FP8, num_heads=8, topk=160, emit="slot", return_selected=True)
    label = "indexer_topk/edges/slots-without-page"
    yield Case(label, "indexer_topk", slots, LIMITS, pageless_winners(slots), since=INTERP)
    scored = IndexerSpec(index=FP8, num_heads=8)
    yield Case(
        "indexer_logits/edges/broken-keys",
        "indexer_logits",
        scored,
        LIMITS,
        broken_keys(scored),
        since=INTERP,
        fault=19,
    )
    for name in formats.names("index"):
        query = IndexQuerySpec(index=name, num_heads=24)
        label = f"quantize_index_query/edges/heads24/{name}"
        yield Case(label, "quantize_index_query", query, LIMITS, turned(query), since=INTERP, fault=15)


WHY = {
    "indexer_topk/edges/ties-by-rounding": "Scores that are equal only once rounded to bfloat16.",
    "indexer_topk/edges/slots-without-page": "A selected key without a page has no slot: it drops out, no gap is left.",
    "indexer_logits/edges/broken-keys": "A NaN in one key, a page that is missing: one column each, and no other.",
    "quantize_index_query/edges/heads24": "Head counts off every list, heads of very different size: a scale for each.",
}

add(cases(), WHY)
