"""Offsets beyond 2^31 and 2^32, in every operator that multiplies an index by a stride (fault class 8).

Caches have their own page stride and so many pages that a page begins behind 2^31, and one behind 2^32, bytes. State
slots and rows stand so far apart that an offset in elements, too, is behind 2^31. Strides fit 32 bits; products do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from kimi_hal import ops
from kimi_hal.ops.indexer import IndexerSpec, IndexerTopKSpec, IndexQuerySpec, StoreIndexSpec
from kimi_hal.ops.kda import KDASpec
from kimi_hal.ops.moe import MoESpec, RouteSpec
from kimi_hal.ops.sparse_mla import MergeSpec, SparseMLASpec, StoreLatentSpec
from kimi_hal.ops.spec import Limits, Spec
from kimi_hal.ops.topk_merge import TopKSpec
from kimi_hal_conformance.case import INTERP, STANDARD, Case, Make, add
from kimi_hal_conformance.cases.composites import dsa_operands, dsa_spec
from kimi_hal_conformance.cases.composites import kda_operands as layer_operands
from kimi_hal_conformance.cases.indexer import FP8, query_operands, score_operands, store_operands
from kimi_hal_conformance.cases.kda import (
    SLOTS,
    conv_operands,
    decode_operands,
    gate_operands,
    prefill_operands,
    verify_operands,
)
from kimi_hal_conformance.cases.moe import expert_operands, route_operands
from kimi_hal_conformance.cases.sparse_mla import attention_operands, merge_operands
from kimi_hal_conformance.cases.sparse_mla import store_operands as latent_store_operands
from kimi_hal_conformance.cases.topk_merge import select_operands, spread
from kimi_hal_conformance.sparse import Sparse

LIMITS = Limits(max_rows=64, max_reqs=16, max_context=1024, rows_per_req=8, uniform=False)
LATENT = "latent.fp8.e4m3fn.tensor"
#: Elements from one row to the next where rows stand far apart, and from one state slot to the next.
ROW, SLOT = 1 << 30, 1 << 20
ROWS = 3


def far_pages(page_bytes: int, stride: int, pages: int, ids: dict[str, int]) -> Sparse:
    """Return places of pages: ordinary ones, some from 2^31 bytes on and some from 2^32 on."""
    middle, last = ((1 << bits) // page_bytes for bits in (31, 32))
    wanted = (1, middle + 1, last + 1, middle - 1, 0, last + 2, middle, last)
    further = range(2, pages)
    places = (*wanted, *further)[:pages]
    return Sparse(places, rows=last + 4, stride=stride, ids=ids)


def far_slots() -> Sparse:
    """Return places of state slots, the even ones of which are behind 2^31 and 2^32 elements."""
    places = tuple((0, 1 << 11, 1 << 12)[slot % 3] + slot for slot in range(SLOTS))
    return Sparse(places, rows=(1 << 12) + SLOTS, stride=SLOT, ids={"state_ids": 1, "checkpoint_ids": 1})


def far_rows(rows: int = ROWS) -> Sparse:
    """Return places of rows of which the third begins behind 2^31 elements."""
    return Sparse(tuple(range(rows)), rows=rows, stride=ROW)


def cached(label: str, spec: Any, make: Make, names: dict[str, dict[str, int]]) -> Case:
    """Return a case whose caches are large; their pages follow from the operands at any seed."""
    operands = make(torch.Generator().manual_seed(0))
    sparse = {}
    for cache, ids in names.items():
        pages, page_bytes = operands[cache].shape
        sparse[cache] = far_pages(page_bytes, operands[cache].stride(0), pages, ids)
    return case(label, spec, make, sparse)


def case(label: str, spec: Spec, make: Make, sparse: dict[str, Sparse]) -> Case:
    """Return one case."""
    operator = label.partition("/")[0]
    return Case(label, operator, spec, LIMITS, make, since=INTERP, fault=8, sparse=sparse)


def caches() -> Iterator[Case]:
    """Every operator over pages."""
    latent, index = StoreLatentSpec(latent=LATENT), StoreIndexSpec(index=FP8)
    slots = {"cache": {"slots": 64}}
    yield cached("store_latent/edges/far-pages", latent, latent_store_operands(LATENT, 64, 33), slots)
    yield cached("store_index_keys/edges/far-pages", index, store_operands(FP8, 60), slots)
    paged = {"cache": {"block_table": 1}}
    position = SparseMLASpec(num_heads=4, latent=LATENT, topk=64, index_space="position")
    yield cached("sparse_mla/edges/far-pages", position, attention_operands(position, 3, 64, 200), paged)
    slot = SparseMLASpec(num_heads=4, latent=LATENT, topk=64)
    by_slot = {"cache": {"indices": 64, "block_table": 1}}
    yield cached("sparse_mla/edges/far-slots", slot, attention_operands(slot, 3, 64, 200), by_slot)
    scored = IndexerSpec(index=FP8, num_heads=4)
    yield cached("indexer_logits/edges/far-pages", scored, score_operands(scored, (130, 65), 1), paged)
    chosen = IndexerTopKSpec(index=FP8, num_heads=4, topk=64, return_selected=True)
    yield cached("indexer_topk/edges/far-pages", chosen, score_operands(chosen, (130, 65), 1), paged)
    dsa = dsa_spec(1)
    tables = {"latent_cache": {"latent_table": 1}, "index_cache": {"index_table": 1}}
    yield cached("dsa_decode/edges/far-pages", dsa, dsa_operands(dsa, (200, 1, 77), False), tables)


def far_ids() -> Iterator[Case]:
    """A store whose slots have odd numbers behind 2^24, which float32 does not hold."""
    name, page = "latent.nvfp4.352", 64
    stride = int(latent_store_operands(name, page, 1)(torch.Generator().manual_seed(0))["cache"].stride(0))
    first = (1 << 24) // page
    cache = Sparse((first, first + 2, 0, first + 3), rows=first + 4, stride=stride, ids={"slots": page})
    spec, label = StoreLatentSpec(latent=name, page=page), "store_latent/edges/odd-far-slots"
    make = latent_store_operands(name, page, 60)
    yield replace(case(label, spec, make, {"cache": cache}), since=STANDARD)


def states() -> Iterator[Case]:
    """Every operator over state slots."""
    spec = KDASpec(num_heads=2, head_dim=16)
    state, both = {"state": far_slots()}, {"state": far_slots(), "conv_state": far_slots()}
    yield case("kda_decode/edges/far-slots", spec, decode_operands(spec, 6), state)
    yield case("kda_prefill/edges/far-slots", spec, prefill_operands(spec, (3, 0, 17, 2)), state)
    yield case(
        "kda_conv/edges/far-slots", spec, conv_operands(spec, (1, 0, 5, 2)), {"conv_state": far_slots()}
    )
    yield case("kda_verify/edges/far-slots", spec, verify_operands(spec, (1, 8, 3), LIMITS), both)
    yield case("kda_layer_decode/edges/far-slots", spec, layer_operands(spec, 6), both)


def rows() -> Iterator[Case]:
    """Every operator over rows whose stride is the caller's: inputs that are read, and outputs that are given."""
    far = far_rows()
    query = IndexQuerySpec(index=FP8, num_heads=4)
    yield case("quantize_index_query/edges/far-rows", query, query_operands(query, ROWS), {"q": far})
    scored = IndexerSpec(index=FP8, num_heads=4)
    lengths = (130, 65, 64, 1)  # the last row is padding
    yield case(
        "indexer_logits/edges/far-rows-out", scored, score_operands(scored, lengths, 1), {"out": far_rows(4)}
    )
    select = TopKSpec(topk=64, return_selected=True)
    scores = select_operands(select, spread, (300, 64, 299), 300)
    yield case("topk_select/edges/far-rows", select, scores, {"scores": far})
    attend = SparseMLASpec(num_heads=4, latent=LATENT, topk=64)
    queries = attention_operands(attend, ROWS, 64, 90)
    yield case("sparse_mla/edges/far-rows", attend, queries, {"q": far, "out": far})
    merge = MergeSpec(parts=ROWS, num_heads=4, dim=64, return_lse=True)
    yield case("merge_attn_states/edges/far-parts", merge, merge_operands(merge, 7), {"outs": far})
    gate = KDASpec(num_heads=2, head_dim=32)
    yield case("kda_gate/edges/far-rows", gate, gate_operands(gate, ROWS), {"raw_g": far})
    route = RouteSpec(num_experts=64, topk=4)
    yield case("moe_route/edges/far-rows", route, route_operands(route, ROWS), {"logits": far})
    experts = MoESpec(num_experts=8, num_local=8, topk=3, hidden=64, intermediate=96)
    tokens = expert_operands(experts, ROWS)
    yield case("moe_experts/edges/far-rows", experts, tokens, {"x": far, "out": far})


WHY = {
    f"{operator}/edges/far-{kind}": reason
    for kind, reason in {
        "pages": "Pages that begin behind 2^31 and behind 2^32 bytes: read and written where they are.",
        "slots": "Slots behind 2^31 and 2^32: a product of id and stride that wraps meets another's data.",
        "rows": "Rows that begin behind 2^31 elements, as wide buffers of scores have them.",
        "parts": "Parts that begin behind 2^31 elements.",
    }.items()
    for operator in ops.OPERATORS
}

add(caches(), WHY)
add(far_ids(), {"store_latent/": "Odd slots behind 2^24: a number that float32 rounds is another slot's."})
add(states(), WHY)
add(rows(), WHY)
