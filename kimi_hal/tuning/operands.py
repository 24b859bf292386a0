"""Operands of a class of shapes: random numbers as an engine's would be, every row with as many keys as the class has.

Keys stand in pages in random order. A few pages are encoded, and the others are copies of them: encoding as many keys
as a long context has would take longer than what is to be measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kimi_hal import formats
from kimi_hal.dispatch.shapes import Shape, limits
from kimi_hal.ops.indexer import IndexQuerySpec
from kimi_hal.ops.operator import torch_dtype
from kimi_hal.ops.spec import Limits
from kimi_hal.reference import indexer

#: Pages that are encoded, and tokens of a latent cache at most.
PAGES, TOKENS = 64, 1 << 20
#: Bytes of a query and its result, by head.
QUERY = 2 * (576 + 512)
#: Dequantisation factor of latents and queries.
SCALE = 2.0**-6


@dataclass(frozen=True)
class Work:
    """What is measured: the sizes to plan for, and the operands by name."""

    limits: Limits
    operands: Mapping[str, Any]


def size(operator: str, spec: Any, shape: Shape) -> int:
    """Return the bytes of the largest operands and results of a class, before any is made; 0 where all are small."""
    return OPERANDS[operator].size(spec, shape)


def make(operator: str, spec: Any, shape: Shape, device: str) -> Work:
    """Return what is measured for an operator, a Spec and a class of shapes.

    Raises:
        KeyError: there are no such operands: the operator is none of ``OPERANDS``.
    """
    sizes = limits(operator, spec, shape)
    return Work(sizes, OPERANDS[operator].make(spec, shape, sizes, torch.device(device)))


def _pages(encoded: Tensor, count: int) -> Tensor:
    return encoded[torch.randint(0, encoded.shape[0], (count,), device=encoded.device)]


def _keys_of(fmt: formats.IndexFormat, pages: int, device: torch.device) -> Tensor:
    encoded = torch.zeros(PAGES, fmt.page_bytes, dtype=torch.uint8, device=device)
    slots = torch.arange(PAGES * fmt.page, device=device)
    fmt.write(encoded, slots, torch.randn(len(slots), fmt.head_dim, device=device))
    return _pages(encoded, pages)


def _latents_of(spec: Any, pages: int, k_scale: Tensor | None, device: torch.device) -> Tensor:
    fmt, page = formats.latent(spec.latent), spec.page
    encoded = torch.zeros(min(PAGES, pages), page * fmt.row_bytes, dtype=torch.uint8, device=device)
    slots = torch.arange(encoded.shape[0] * page, device=device)
    values = (
        torch.randn(len(slots), spec.kv_rank, device=device),
        torch.randn(len(slots), spec.pe_dim, device=device),
    )
    fmt.write(encoded, page, slots, *values, k_scale)
    return _pages(encoded, pages)


def _latent_queries(spec: Any, rows: int, heads: int, device: torch.device) -> dict[str, Any]:
    scale = torch.full((1,), SCALE, device=device)
    q = torch.randn(rows, heads, spec.kv_rank + spec.pe_dim, device=device)
    return {
        "q": q.to(torch_dtype(spec.q_dtype)),
        "k_scale": scale if formats.latent(spec.latent).needs_scale else None,
        "q_scale": None if spec.q_dtype == "bfloat16" else scale,
    }


def _rows(shape: Shape, sizes: Limits, device: torch.device) -> dict[str, Any]:
    return {
        "row_req": torch.arange(shape.rows, device=device).int() // shape.rows_per_req,
        "row_len": torch.full((shape.rows,), sizes.max_context, dtype=torch.int32, device=device),
    }


def _scored(spec: Any, shape: Shape, sizes: Limits, device: torch.device) -> dict[str, Any]:
    fmt, rows, requests = formats.index(spec.index), shape.rows, sizes.max_reqs
    columns = -(-shape.length // fmt.page)
    query = IndexQuerySpec(index=spec.index, num_heads=spec.num_heads, weights_dtype=spec.weights_dtype)
    q, scale, weights = indexer.quantize_index_query(
        query,
        torch.randn(rows, spec.num_heads, spec.head_dim, device=device),
        torch.randn(rows, spec.num_heads, device=device),
    )
    table = torch.randperm(requests * columns, device=device).int().view(requests, columns)
    return {
        "q": q,
        "q_scale": scale,
        "weights": weights.to(torch_dtype(spec.weights_dtype)),
        "cache": _keys_of(fmt, requests * columns, device),
        "block_table": table,
        **_rows(shape, sizes, device),
    }


def _selected(spec: Any, shape: Shape, sizes: Limits, device: torch.device) -> dict[str, Any]:
    scores = torch.randn(shape.rows, shape.length, device=device).to(torch_dtype(spec.scores_dtype))
    length = torch.full((shape.rows,), sizes.max_context, dtype=torch.int32, device=device)
    start = torch.zeros_like(length) if spec.has_row_start else None
    return {"scores": scores, "row_len": length, "row_start": start}


def _attended(spec: Any, shape: Shape, sizes: Limits, device: torch.device) -> dict[str, Any]:
    rows, page = shape.rows, spec.page
    pages = max(1, min(TOKENS, 64 * rows * spec.topk) // page)
    queries = _latent_queries(spec, rows, spec.num_heads, device)
    own = pages * page * (spec.dcp.world if spec.index_space == "position" else 1)
    indices = torch.randint(0, own, (rows, spec.topk), dtype=torch.int32, device=device)
    paged = spec.index_space != "slot"
    return {
        **queries,
        "cache": _latents_of(spec, pages, queries["k_scale"], device),
        "indices": indices,
        "index_len": torch.full((rows,), spec.topk, dtype=torch.int32, device=device)
        if spec.has_index_len
        else None,
        "block_table": torch.randperm(pages, device=device).int()[None] if paged else None,
        "row_req": torch.zeros(rows, dtype=torch.int32, device=device) if paged else None,
    }


def _decoded(spec: Any, shape: Shape, sizes: Limits, device: torch.device) -> dict[str, Any]:
    fmt, requests = formats.index(spec.indexer.index), sizes.max_reqs
    columns = -(-shape.length // fmt.page)
    blocks = -(-shape.length // spec.attn.page)
    pages = max(1, min(TOKENS // spec.attn.page, requests * blocks))
    queries = _latent_queries(spec.attn, shape.rows, spec.heads, device)
    index_q, index_w = _quantised(spec.query, shape, sizes, device).values()
    return {
        **queries,
        "index_q": index_q,
        "index_w": index_w,
        "latent_cache": _latents_of(spec.attn, pages, queries["k_scale"], device),
        "index_cache": _keys_of(fmt, requests * columns, device),
        "latent_table": torch.randint(0, pages, (requests, blocks), dtype=torch.int32, device=device),
        "index_table": torch.randperm(requests * columns, device=device).int().view(requests, columns),
        **_rows(shape, sizes, device),
    }


def _quantised(spec: Any, shape: Shape, sizes: Limits, device: torch.device) -> dict[str, Any]:
    return {
        "q": torch.randn(shape.rows, spec.num_heads, spec.head_dim, device=device).bfloat16(),
        "weights": torch.randn(shape.rows, spec.num_heads, device=device).bfloat16(),
    }


def _slots(rows: int, device: torch.device) -> Tensor:
    return torch.randperm(rows, device=device)


def _stored_keys(spec: Any, shape: Shape, sizes: Limits, device: torch.device) -> dict[str, Any]:
    fmt = formats.index(spec.index)
    pages = -(-shape.rows // fmt.page)
    return {
        "k": torch.randn(shape.rows, spec.head_dim, device=device).bfloat16(),
        "slots": _slots(shape.rows, device),
        "cache": torch.zeros(pages, fmt.page_bytes, dtype=torch.uint8, device=device),
    }


def _stored_latents(spec: Any, shape: Shape, sizes: Limits, device: torch.device) -> dict[str, Any]:
    fmt = formats.latent(spec.latent)
    pages = -(-shape.rows // spec.page)
    return {
        "kv_c": torch.randn(shape.rows, spec.kv_rank, device=device).bfloat16(),
        "k_pe": torch.randn(shape.rows, spec.pe_dim, device=device).bfloat16(),
        "slots": _slots(shape.rows, device),
        "cache": torch.zeros(pages, spec.page * fmt.row_bytes, dtype=torch.uint8, device=device),
        "k_scale": torch.full((1,), SCALE, device=device) if fmt.needs_scale else None,
    }


def _merged(spec: Any, shape: Shape, sizes: Limits, device: torch.device) -> dict[str, Any]:
    lead = (spec.parts, shape.rows, spec.num_heads)
    return {
        "outs": torch.randn(*lead, spec.dim, device=device).to(torch_dtype(spec.dtype)),
        "lses": torch.randn(*lead, device=device),
    }


def _small(spec: Any, shape: Shape) -> int:
    return 0


def _scores(spec: Any, shape: Shape) -> int:
    return 4 * shape.rows * shape.length


def _keys(spec: Any, shape: Shape) -> int:
    keys: int = max(1, shape.rows // shape.rows_per_req) * shape.length
    return keys * formats.index(spec.index).row_bytes


def _keys_and_scores(spec: Any, shape: Shape) -> int:
    return _keys(spec, shape) + _scores(spec, shape)


def _latents(spec: Any, shape: Shape) -> int:
    queries: int = shape.rows * spec.num_heads * QUERY
    return TOKENS * formats.latent(spec.latent).row_bytes + queries


def _keys_and_latents(spec: Any, shape: Shape) -> int:
    return _keys(spec.indexer, shape) + _latents(spec.attn, shape)


class Source(NamedTuple):
    """How the operands of an operator are made, and how many bytes the large ones take."""

    make: Callable[[Any, Shape, Limits, torch.device], dict[str, Any]]
    size: Callable[[Any, Shape], int] = _small


OPERANDS = {
    "indexer_logits": Source(_scored, _keys_and_scores),
    "indexer_topk": Source(_scored, _keys),
    "topk_select": Source(_selected, _scores),
    "sparse_mla": Source(_attended, _latents),
    "quantize_index_query": Source(_quantised),
    "store_index_keys": Source(_stored_keys),
    "store_latent": Source(_stored_latents),
    "merge_attn_states": Source(_merged),
    "dsa_decode": Source(_decoded, _keys_and_latents),
}
