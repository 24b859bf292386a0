"""Small operands for any Spec of the indexer family."""

from __future__ import annotations

import torch

from kimi_hal import formats
from kimi_hal.ops.indexer import IndexerSpec, IndexerTopKSpec, IndexQuerySpec, StoreIndexSpec
from kimi_hal.parallel import ownership
from kimi_hal_conformance.case import Make, Operands
from kimi_hal_conformance.cases.indexer import query_operands, store_operands
from kimi_hal_conformance.draws import block_tables, index_cache, ints, normal, owned_slots
from kimi_hal_conformance.operands.recipe import Recipe

#: Keys of the requests, in global positions: around a page, few, more; the last row is padding.
LENGTHS = (65, 1, 200, 7)


def query(spec: IndexQuerySpec, rows: int) -> Make:
    """Return queries with outliers, an all-zero head and signed zeros."""
    return query_operands(spec, rows)


def query_bytes(spec: IndexQuerySpec, rows: int) -> int:
    """Return the bytes of queries and results."""
    return rows * spec.num_heads * 128 * 24


def store(spec: StoreIndexSpec, rows: int) -> Make:
    """Return keys for shuffled slots."""
    return store_operands(spec.index, rows)


def store_bytes(spec: StoreIndexSpec, rows: int) -> int:
    """Return the bytes of four pages, copies and canaries."""
    return 8 * 4 * formats.index(spec.index).page_bytes


def scores(spec: IndexerSpec, rows: int) -> Make:
    """Return quantised queries over this rank's own share of each request's keys."""
    lengths = LENGTHS[:rows]

    def make(g: torch.Generator) -> Operands:
        fmt, keys = formats.index(spec.index), ownership.of_keys(spec.dcp)
        local = [ownership.local_length(n, keys) for n in lengths]
        pages = sum(-(-n // fmt.page) for n in local) + 2
        columns = max((-(-n // fmt.page) for n in local), default=0) + 1
        table = block_tables(g, local, fmt.page, pages, columns)
        count = len(lengths)
        quantised, scale = fmt.encode_query(normal(g, count, spec.num_heads, 128).bfloat16())
        if fmt.element != "e2m1":
            scale = torch.empty(count, spec.num_heads, 0, dtype=torch.uint8)
        weights = normal(g, count, spec.num_heads, spread=0.02)
        row_len, owner = list(lengths), list(range(count))
        if count > 3:
            row_len[-1], owner[-1] = 0, 10**6
        return {
            "q": quantised,
            "q_scale": scale,
            "weights": weights.to(getattr(torch, spec.weights_dtype)),
            "cache": index_cache(g, spec.index, pages, owned_slots(table, local, fmt.page)),
            "block_table": table,
            "row_req": ints(owner),
            "row_len": ints(row_len),
        }

    return make


def score_bytes(spec: IndexerSpec, rows: int) -> int:
    """Return the bytes of pages, queries and products."""
    fmt = formats.index(spec.index)
    return 8 * 8 * fmt.page_bytes + rows * spec.num_heads * (128 * 24 + 256 * 16)


def topk_bytes(spec: IndexerTopKSpec, rows: int) -> int:
    """Return what the scores need, and the bytes of the selections that are compared."""
    return 3 * score_bytes(spec, rows) + rows * spec.topk * 64


LEADING = ("dcp.world",)
INDEXED = {"num_heads": 5}
RECIPES = {
    "quantize_index_query": Recipe(query, query_bytes, small=INDEXED, rows=4),
    "store_index_keys": Recipe(store, store_bytes, rows=9),
    "indexer_logits": Recipe(scores, score_bytes, leading=LEADING, small=INDEXED, rows=4),
    "indexer_topk": Recipe(
        scores, topk_bytes, leading=(*LEADING, "emit"), small=INDEXED | {"topk": 65}, rows=4
    ),
}
