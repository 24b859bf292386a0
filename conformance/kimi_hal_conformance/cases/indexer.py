"""Cases of the indexer family: query quantisation, key store, scores, and the fused selection."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from kimi_hal import formats
from kimi_hal.ops.indexer import IndexerSpec, IndexerTopKSpec, IndexQuerySpec, StoreIndexSpec
from kimi_hal.ops.spec import DCP, Limits
from kimi_hal.parallel import ownership
from kimi_hal_conformance.case import INTERP, QUICK, Case, Make, Operands, add
from kimi_hal_conformance.draws import (
    block_tables,
    index_cache,
    ints,
    normal,
    owned_slots,
    stale_pages,
    strided,
)

LIMITS = Limits(max_rows=128, max_reqs=16, max_context=1024)
LONG = Limits(max_rows=64, max_reqs=16, max_context=4096)
FP8 = "index.fp8.e4m3fn.pow2.page64"


def query_operands(spec: IndexQuerySpec, rows: int) -> Make:
    """Return queries with outliers, an all-zero head, signed zeros and values below the amax floor."""

    def make(g: torch.Generator) -> Operands:
        q = normal(g, rows, spec.num_heads, 128)
        if rows:
            q[0, 0] = 0.0
            q[0, -1] *= 1e-6
            q[-1, 0, 5] = 300.0
            q[-1, -1, 7] = -0.0
        return {"q": strided(q.bfloat16()), "weights": strided(normal(g, rows, spec.num_heads))}

    return make


def store_operands(name: str, rows: int) -> Make:
    """Return keys, more rows than slots, for shuffled slots of which some are padding."""

    def make(g: torch.Generator) -> Operands:
        fmt = formats.index(name)
        slots = torch.randperm(4 * fmt.page, generator=g)[:rows]
        slots[1::4] = -1
        keys = normal(g, rows + 3, 128)
        if rows > 2:
            keys[0] = 0.0
            keys[2] *= 1e-7
        return {
            "k": strided(keys.bfloat16()),
            "slots": slots,
            "cache": stale_pages(4, fmt.page_bytes, stride_pad=96),
        }

    return make


def score_operands(spec: IndexerSpec, lengths: tuple[int, ...], rows_per_request: int) -> Make:
    """Return quantised queries over shuffled pages; the last row of several is padding."""

    def make(g: torch.Generator) -> Operands:
        fmt = formats.index(spec.index)
        shards = ownership.of_keys(spec.dcp)
        local = [-(-n // shards.world) + shards.interleave for n in lengths]
        pages = sum(-(-n // fmt.page) for n in local) + 2
        columns = max((-(-n // fmt.page) for n in local), default=0) + 1
        table = block_tables(g, local, fmt.page, pages, columns)
        rows = len(lengths) * rows_per_request
        quantised, scale = fmt.encode_query(normal(g, rows, spec.num_heads, 128).bfloat16())
        owner = [i // rows_per_request for i in range(rows)]
        length = [lengths[r] - rows_per_request + 1 + i % rows_per_request for i, r in enumerate(owner)]
        if rows > 2:
            owner[-1], length[-1] = 10**6, 0
        q_scale = scale if fmt.element == "e2m1" else torch.empty(rows, spec.num_heads, 0, dtype=torch.uint8)
        weights = normal(g, rows, spec.num_heads, spread=0.02)
        return {
            "q": quantised,
            "q_scale": q_scale,
            "weights": weights.to(getattr(torch, spec.weights_dtype)),
            "cache": index_cache(g, spec.index, pages, owned_slots(table, local, fmt.page)),
            "block_table": table,
            "row_req": ints(owner),
            "row_len": ints(length),
        }

    return make


def cases() -> Iterator[Case]:
    """All formats, head counts, score types, shards, lengths around a page and around k."""
    for name in formats.names("index"):
        for rows in (0, 1, 5):
            query = IndexQuerySpec(index=name)
            case = f"quantize_index_query/{name}/rows{rows}"
            yield Case(case, "quantize_index_query", query, LIMITS, query_operands(query, rows), since=INTERP)
        for rows in (0, 1, 100):
            store = StoreIndexSpec(index=name)
            case = f"store_index_keys/{name}/rows{rows}"
            yield Case(case, "store_index_keys", store, LIMITS, store_operands(name, rows), since=INTERP)
        yield scored(f"{name}/ragged", (65, 1, 200), index=name, since=INTERP)
    query = IndexQuerySpec(index=FP8, num_heads=5, hadamard=True, weight_scale=0.25, weights_dtype="bfloat16")
    case = "quantize_index_query/hadamard"
    yield Case(case, "quantize_index_query", query, LIMITS, query_operands(query, 5), since=INTERP)
    for heads in (1, 8, 24, 64):
        yield scored(f"heads{heads}", (130, 64), num_heads=heads, since=INTERP if heads < 24 else QUICK)
    yield scored("bf16-scores", (300, 63), score="bfloat16", weights_dtype="bfloat16", since=INTERP)
    yield scored("no-rows", (), since=INTERP)
    yield scored("verify-rows", (65, 129), rows=4)
    shard = DCP(world=4, rank=2, interleave=4)
    yield scored("dcp4-rank2-interleave4", (65, 3, 200), dcp=shard, since=INTERP)
    replicated = DCP(world=4, rank=2, interleave=4, index="replicated")
    yield scored("dcp4-replicated", (65, 3, 200), dcp=replicated)
    yield from selections()


def selections() -> Iterator[Case]:
    """Selections with fewer, as many and more keys than k; every output form."""
    for length in (1, 63, 64, 65):
        yield selected(f"k64/length{length}", (length, 150), topk=64, since=INTERP, fault=7)
    yield selected("no-rows", (), topk=64, return_selected=True, since=INTERP)
    yield selected("k2048", (2100,), limits=LONG)
    yield selected(
        "ordered-with-scores", (200, 5, 64), topk=64, ordered=True, return_selected=True, since=INTERP
    )
    ties: dict[str, Any] = {"topk": 32, "score": "bfloat16", "return_selected": True}
    yield selected("bf16-ties", (400, 90), **ties, since=INTERP, fault=5)
    yield selected("slots", (100, 40), topk=32, emit="slot", since=INTERP)
    yield selected("mxfp4", (300,), index="index.mxfp4.page64", topk=64, since=INTERP)
    shard = DCP(world=4, rank=3, interleave=4)
    yield selected("dcp4-rank3", (200, 13, 0), dcp=shard, topk=16, return_selected=True, since=INTERP)


def scored(label: str, lengths: tuple[int, ...], rows: int = 1, since: str = QUICK, **fields: Any) -> Case:
    """Return a case of ``indexer_logits``."""
    spec = IndexerSpec(**{"index": FP8, **fields})
    make = score_operands(spec, lengths, rows)
    return Case(f"indexer_logits/{label}", "indexer_logits", spec, LIMITS, make, since=since)


def selected(
    label: str,
    lengths: tuple[int, ...],
    limits: Limits = LIMITS,
    since: str = QUICK,
    fault: int = 0,
    **fields: Any,
) -> Case:
    """Return a case of ``indexer_topk``."""
    spec = IndexerTopKSpec(**{"index": FP8, **fields})
    make = score_operands(spec, lengths, 1)
    return Case(f"indexer_topk/{label}", "indexer_topk", spec, limits, make, since=since, fault=fault)


WHY = {
    "quantize_index_query/": "Scales and codes in each format: outliers, a head of zeros, values below the floor.",
    "store_index_keys/": "The bytes of each format at shuffled slots, some of them padding, more keys than slots.",
    "indexer_logits/": "Scores in each format over shuffled pages, lengths around a page, a last row of padding.",
    "indexer_logits/heads": "Index heads that a kernel's list of head counts has, and that it does not.",
    "indexer_logits/dcp4": "Bounds are global: each rank derives the keys of its own share.",
    "indexer_topk/": "Scoring and selection in one call: exact on its own scores, fair on the oracle's.",
    "indexer_topk/k64/": "Lengths around k: all keys and then −1, or exactly k.",
}

add(cases(), WHY)
