"""More rows than the second dimension of a CUDA grid has blocks, of tiny widths: those behind 65,535 count too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from kimi_hal import formats
from kimi_hal.ops.indexer import IndexerSpec, IndexerTopKSpec, IndexQuerySpec, StoreIndexSpec
from kimi_hal.ops.kda import KDASpec
from kimi_hal.ops.moe import MoESpec, RouteSpec
from kimi_hal.ops.sparse_mla import MergeSpec, StoreLatentSpec
from kimi_hal.ops.spec import Limits
from kimi_hal.ops.topk_merge import TopKSpec
from kimi_hal_conformance.case import FULL, STANDARD, Case, Make, Operands, add
from kimi_hal_conformance.cases.indexer import query_operands, score_operands
from kimi_hal_conformance.cases.kda import conv_operands, decode_operands, gate_operands
from kimi_hal_conformance.cases.moe import expert_operands, route_operands
from kimi_hal_conformance.cases.sparse_mla import merge_operands
from kimi_hal_conformance.draws import ints, normal, stale_pages

WHY = "More than 65,535 rows, which a grid of one block a row has no room for: the last are like the first."
ROWS = 65_543
#: Rows at each end that are no padding, where padding can be marked.
LIVE = 3
LIMITS = Limits(max_rows=ROWS, max_reqs=ROWS, max_context=1024)
INDEX, LATENT = "index.fp8.e4m3fn.pow2.page64", "latent.fp8.e4m3fn.tensor"
ENDS = (*range(LIVE), *range(ROWS - LIVE, ROWS))


def padded(make: Make, marker: str, values: Sequence[int]) -> Make:
    """Return the operands of which all rows but those at the ends are padding, marked in an integer operand."""

    def wrapped(g: torch.Generator) -> Operands:
        operands = dict(make(g))
        marks = torch.full((ROWS,), 0 if marker == "row_len" else -1, dtype=operands[marker].dtype)
        marks[list(ENDS)] = torch.tensor(values, dtype=marks.dtype)
        return operands | {marker: marks}

    return wrapped


def stored(name: str, page_bytes: int, widths: dict[str, int]) -> Make:
    """Return rows for two pages of a cache, those between the ends for none."""

    def make(g: torch.Generator) -> Operands:
        rows = {key: normal(g, ROWS, width, dtype=torch.bfloat16) for key, width in widths.items()}
        given: dict[str, Any] = {
            **rows,
            "slots": torch.full((ROWS,), -1),
            "cache": stale_pages(2, page_bytes, stride_pad=32),
        }
        return given | ({"k_scale": torch.tensor([0.25])} if name == LATENT else {})

    return padded(make, "slots", (70, 3, 64, 5, 127, 0))


def scores() -> Make:
    """Return score rows of every length that they can have."""

    def make(g: torch.Generator) -> Operands:
        return {"scores": normal(g, ROWS, 4), "row_len": torch.arange(ROWS, dtype=torch.int32) % 5}

    return make


def scored(spec: IndexerSpec) -> Make:
    """Return rows of one request, those between the ends without a key."""

    def make(g: torch.Generator) -> Operands:
        few = score_operands(spec, (70,), 2 * LIVE)(g)
        numbers = torch.arange(ROWS) % (2 * LIVE)
        of_rows = ("q", "q_scale", "weights", "row_req", "row_len")
        return {**few, **{name: few[name][numbers] for name in of_rows}}

    return padded(make, "row_len", (70, 1, 64, 33, 65, 7))


def routed(spec: MoESpec) -> Make:
    """Return rows that nearly all want no expert of this rank."""

    def make(g: torch.Generator) -> Operands:
        operands = dict(expert_operands(spec, ROWS)(g))
        ids = torch.full_like(operands["topk_ids"], -1)
        ids[list(ENDS)] = ints(range(2 * LIVE)).view(-1, 1) % spec.num_experts
        return operands | {"topk_ids": ids}

    return make


def many(operator: str, spec: Any, make: Make, since: str = STANDARD) -> Case:
    """Return a case."""
    return Case(f"{operator}/many-rows", operator, spec, LIMITS, make, since=since, why=WHY)


def cases() -> Iterator[Case]:
    """Every operator over rows of which the reference computes 65,543 in seconds."""
    query, store = IndexQuerySpec(index=INDEX, num_heads=1), StoreIndexSpec(index=INDEX)
    yield many("quantize_index_query", query, query_operands(query, ROWS))
    yield many("store_index_keys", store, stored(INDEX, formats.index(INDEX).page_bytes, {"k": 128}))
    latent = StoreLatentSpec(latent=LATENT)
    row_bytes = formats.latent(LATENT).row_bytes
    yield many("store_latent", latent, stored(LATENT, 64 * row_bytes, {"kv_c": 512, "k_pe": 64}))
    index = IndexerSpec(index=INDEX, num_heads=1)
    yield many("indexer_logits", index, scored(index), FULL)
    topk = IndexerTopKSpec(index=INDEX, num_heads=1, topk=4)
    yield many("indexer_topk", topk, scored(topk), FULL)
    yield many("topk_select", TopKSpec(topk=2), scores())
    parts = MergeSpec(parts=2, num_heads=1, dim=8, return_lse=True)
    yield many("merge_attn_states", parts, merge_operands(parts, ROWS))
    route = RouteSpec(num_experts=4, topk=2)
    yield many("moe_route", route, route_operands(route, ROWS))
    experts = MoESpec(num_experts=4, num_local=4, topk=1, hidden=32, intermediate=32)
    yield many("moe_experts", experts, routed(experts))
    kda = KDASpec(num_heads=1, head_dim=4)
    slots = (3, 0, 8, 5, 1, 7)
    yield many("kda_gate", kda, gate_operands(kda, ROWS))
    yield many("kda_decode", kda, padded(decode_operands(kda, ROWS), "state_ids", slots))
    yield many("kda_conv", kda, padded(conv_operands(kda, (1,) * ROWS), "state_ids", slots))


add(cases())
