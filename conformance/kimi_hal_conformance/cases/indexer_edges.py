"""Edges of the indexer family: ties that only rounding makes, NaN in a live key, a page that is missing."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kimi_hal import formats
from kimi_hal.ops.indexer import IndexerSpec, IndexerTopKSpec, IndexQuerySpec
from kimi_hal.ops.spec import DCP, Limits
from kimi_hal_conformance.case import INTERP, QUICK, Case, Make, Operands, add
from kimi_hal_conformance.draws import index_cache, ints, normal

LIMITS = Limits(max_rows=16, max_reqs=4, max_context=2048)
LONG = Limits(max_rows=16, max_reqs=4, max_context=1 << 14)
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
    """Return a live key with a NaN element, and requests with missing pages, by −1 and by less."""

    def make(g: torch.Generator) -> Operands:
        cache = index_cache(g, spec.index, 4, torch.arange(256))
        cache[1, 9 * 128 + 17] = 0x7F  # one element of key 9 of page 1
        return queries(g, spec, 4) | {
            "cache": cache,
            "block_table": ints([0, 2, 1, -1, 3, -1, 2, -2, -(2**31), -65, 1, -3]).view(4, 3),
            "row_req": ints([0, 1, 2, 3]),
            "row_len": ints([190, 192, 192, 191]),
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


def broken_beside_pageless(spec: IndexerTopKSpec) -> Make:
    """Return 122 keys with a score, before them 6 that are NaN and a page that is missing: 64 keys of −inf."""

    def make(g: torch.Generator) -> Operands:
        cache = index_cache(g, spec.index, 2, torch.arange(128))
        cache[1].as_strided((6,), (128,), cache[1].storage_offset() + 5).fill_(
            0x7F
        )  # an element of keys 0 to 5
        return queries(g, spec, 3) | {
            "cache": cache,
            "block_table": ints([1, -1, 0]).view(1, 3),
            "row_req": ints([0, 0, 0]),
            "row_len": ints([192, 191, 128]),
        }

    return make


def zeros_of_both_signs(spec: IndexerTopKSpec) -> Make:
    """Return keys of which every other scores −2^−140, which bfloat16 rounds to −0, and the others +0.

    A query of 1 is 2^8 of its scale, which is no part of a score.
    """

    def make(g: torch.Generator) -> Operands:
        fmt, live = formats.index(spec.index), torch.arange(128)
        keys = torch.zeros(128, 128)
        keys[::2, 1] = 2.0**-22
        cache = index_cache(g, spec.index, 2, live)
        fmt.write(cache, live, keys)
        heads = torch.zeros(2, spec.num_heads, 128)
        heads[:, 0, 0], heads[:, 1, 1] = 1.0, 1.0
        return queries(g, spec, 2) | {
            "q": fmt.encode_query(heads.bfloat16())[0],
            "weights": torch.tensor([1.0, -(2.0**-126)]).repeat(2, 1),
            "cache": cache,
            "block_table": ints([0, 1]).view(1, 2),
            "row_req": ints([0, 0]),
            "row_len": ints([128, 127]),
        }

    return make


def one_run_wins(spec: IndexerTopKSpec) -> Make:
    """Return 4,224 keys of one sign of score, the best of which stand one after another."""

    def make(g: torch.Generator) -> Operands:
        fmt, pages = formats.index(spec.index), 66
        position = torch.arange(64 * pages)
        keys = 0.5 + 0.5 * torch.rand(64 * pages, 128, generator=g)
        keys[(position < 1000) | (position >= 1000 + spec.topk)] *= 0.25
        cache = index_cache(g, spec.index, pages, position[:0])
        fmt.write(cache, position, keys)
        ones = torch.ones(2, spec.num_heads, 128)
        return queries(g, spec, 2) | {
            "q": fmt.encode_query(ones.bfloat16())[0],
            "weights": torch.ones(2, spec.num_heads),
            "cache": cache,
            "block_table": torch.arange(pages, dtype=torch.int32)[None],
            "row_req": ints([0, 0]),
            "row_len": ints([64 * pages, 64 * pages - 1]),
        }

    return make


def crowded_bin(spec: IndexerTopKSpec) -> Make:
    """Return 2,100 keys whose scores share their leading 12 bits and their sign; the best stand among the last."""

    def make(g: torch.Generator) -> Operands:
        operands = dict(one_run_wins(spec)(g))
        keys = 2100
        values = 1 + torch.rand(keys, 128, generator=g)
        values[-300:] += 0.03
        fmt = formats.index(spec.index)
        fmt.write(operands["cache"], torch.arange(keys), values)
        return operands | {"row_len": ints([keys, keys - 1])}

    return make


def shares(spec: IndexerSpec) -> Make:
    """Return a page a request and lengths at which an interleave gives a rank more keys than their quotient."""

    def make(g: torch.Generator) -> Operands:
        return queries(g, spec, 6) | {
            "cache": index_cache(g, spec.index, 1, torch.arange(64)),
            "block_table": ints([0]).view(1, 1),
            "row_req": ints([0] * 6),
            "row_len": ints([3, 6, 11, 16, 18, 45]),
        }

    return make


def far_columns(spec: IndexerSpec) -> Make:
    """Return a row of keys beyond 4,096 and 8,192, on pages that are shuffled."""

    def make(g: torch.Generator) -> Operands:
        pages = 130
        return queries(g, spec, 1) | {
            "cache": index_cache(g, spec.index, pages, torch.arange(64 * pages)),
            "block_table": torch.randperm(pages, generator=g).int()[None],
            "row_req": ints([0]),
            "row_len": ints([64 * pages - 7]),
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
    yield from bounds()
    yield from orders()
    for name in formats.names("index"):
        query = IndexQuerySpec(index=name, num_heads=24)
        label = f"quantize_index_query/edges/heads24/{name}"
        yield Case(label, "quantize_index_query", query, LIMITS, turned(query), since=INTERP, fault=15)


def bounds() -> Iterator[Case]:
    """Scores of each of four ranks, and of a long row."""
    for rank in range(4):
        spec = IndexerSpec(index=FP8, num_heads=2, dcp=DCP(world=4, rank=rank, interleave=4))
        name = f"indexer_logits/edges/bounds-of-4-ranks/rank{rank}"
        yield Case(name, "indexer_logits", spec, LIMITS, shares(spec), since=INTERP, fault=11)
    spec, name = IndexerSpec(index=FP8, num_heads=2), "indexer_logits/edges/far-columns"
    yield Case(name, "indexer_logits", spec, LONG, far_columns(spec), since=QUICK, fault=17)


def orders() -> Iterator[Case]:
    """Selections in which a rule for numbers, or for how the best may lie, decides."""
    name = "indexer_topk/edges/nan-beside-no-page"
    spec = IndexerTopKSpec(index=FP8, num_heads=4, topk=150, ordered=True, return_selected=True)
    yield Case(name, "indexer_topk", spec, LIMITS, broken_beside_pageless(spec), since=INTERP, fault=19)
    name = "indexer_topk/edges/zeros-of-both-signs"
    spec = IndexerTopKSpec(index=FP8, num_heads=2, topk=40, score="bfloat16", ordered=True)
    yield Case(name, "indexer_topk", spec, LIMITS, zeros_of_both_signs(spec), since=INTERP, fault=19)
    name = "indexer_topk/edges/one-run-wins"
    spec = IndexerTopKSpec(index=FP8, num_heads=1, topk=600, ordered=True)
    yield Case(name, "indexer_topk", spec, LONG, one_run_wins(spec), since=QUICK, fault=6)
    name = "indexer_topk/edges/crowded-bin"
    spec = IndexerTopKSpec(index=FP8, num_heads=1, topk=64, return_selected=True)
    yield Case(name, "indexer_topk", spec, LONG, crowded_bin(spec), since=QUICK, fault=6)


WHY = {
    "indexer_logits/edges/bounds-of-4-ranks": "Lengths of which an interleave gives one rank more than a quotient.",
    "indexer_logits/edges/far-columns": "Columns beyond 4,096 and 8,192: a key stands in its own.",
    "indexer_topk/edges/nan-beside-no-page": "Scores of NaN before scores of −inf at the cut: −inf is selected.",
    "indexer_topk/edges/zeros-of-both-signs": "Scores that round to −0 among +0 at the cut: position decides.",
    "indexer_topk/edges/crowded-bin": "2,100 scores in one bin of a radix selection, the best among the last.",
    "indexer_topk/edges/one-run-wins": "All winners one after another: none may be lost to a quota of a block.",
    "indexer_topk/edges/ties-by-rounding": "Scores that are equal only once rounded to bfloat16.",
    "indexer_topk/edges/slots-without-page": "A selected key without a page has no slot: it drops out, no gap is left.",
    "indexer_logits/edges/broken-keys": "A NaN in one key, a page that is missing: one column each, and no other.",
    "quantize_index_query/edges/heads24": "Head counts off every list, heads of very different size: a scale for each.",
}

add(cases(), WHY)
