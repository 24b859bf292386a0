"""Cases of the indexer family: query quantisation, key store, scores, and the fused selection."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kimi_hal import formats
from kimi_hal.ops.indexer import IndexerSpec, IndexerTopKSpec, IndexQuerySpec, StoreIndexSpec
from kimi_hal.ops.spec import DCP, Limits
from kimi_hal_conformance.case import Case, Make, Operands, add
from kimi_hal_conformance.draws import (
    block_tables,
    index_cache,
    ints,
    normal,
    owned_slots,
    stale_pages,
    strided,
)

LIMITS = Limits(max_rows=64, max_reqs=16, max_context=1024)
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
        local = [-(-n // spec.dcp.world) + spec.dcp.interleave for n in lengths]
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
            yield Case(
                f"quantize_index_query/{name}/rows{rows}",
                "quantize_index_query",
                query,
                LIMITS,
                query_operands(query, rows),
            )
        for rows in (0, 1, 100):
            store = StoreIndexSpec(index=name)
            yield Case(
                f"store_index_keys/{name}/rows{rows}",
                "store_index_keys",
                store,
                LIMITS,
                store_operands(name, rows),
            )
        yield scored(f"{name}/ragged", {"index": name}, (65, 1, 200))
    for heads in (1, 8, 24, 64):
        yield scored(f"heads{heads}", {"index": FP8, "num_heads": heads}, (130, 64))
    yield scored("bf16-scores", {"index": FP8, "score": "bfloat16", "weights_dtype": "bfloat16"}, (300, 63))
    yield scored("verify-rows", {"index": FP8}, (65, 129), rows=4)
    shard = DCP(world=4, rank=2, interleave=4)
    yield scored("dcp4-rank2-interleave4", {"index": FP8, "dcp": shard}, (65, 3, 200))
    for lengths in ((63,), (64,), (65,), (1,)):
        yield selected(f"k64/length{lengths[0]}", {"index": FP8, "topk": 64}, lengths)
    yield selected("k2048", {"index": FP8}, (2100,), limits=LONG)
    yield selected(
        "ordered-with-scores",
        {"index": FP8, "topk": 64, "ordered": True, "return_selected": True},
        (200, 5, 64),
    )
    yield selected(
        "bf16-ties", {"index": FP8, "topk": 32, "score": "bfloat16", "return_selected": True}, (400, 90)
    )
    yield selected("slots", {"index": FP8, "topk": 32, "emit": "slot"}, (100, 40))
    yield selected("mxfp4", {"index": "index.mxfp4.page64", "topk": 64}, (300,))


def scored(label: str, fields: dict[str, object], lengths: tuple[int, ...], rows: int = 1) -> Case:
    """Return a case of ``indexer_logits``."""
    spec = IndexerSpec.from_dict(_plain(fields))
    return Case(
        f"indexer_logits/{label}", "indexer_logits", spec, LIMITS, score_operands(spec, lengths, rows)
    )


def selected(
    label: str, fields: dict[str, object], lengths: tuple[int, ...], limits: Limits = LIMITS
) -> Case:
    """Return a case of ``indexer_topk``."""
    spec = IndexerTopKSpec.from_dict(_plain(fields))
    return Case(f"indexer_topk/{label}", "indexer_topk", spec, limits, score_operands(spec, lengths, 1))


def _plain(fields: dict[str, object]) -> dict[str, object]:
    return {name: value.to_dict() if isinstance(value, DCP) else value for name, value in fields.items()}


add(cases())
