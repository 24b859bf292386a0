"""More rows than a block of any kernel, of tiny widths: what is right of the first block is right of every row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from kimi_hal.ops.indexer import IndexerSpec, IndexerTopKSpec, IndexQuerySpec
from kimi_hal.ops.kda import KDASpec
from kimi_hal.ops.moe import RouteSpec
from kimi_hal.ops.sparse_mla import MergeSpec, SparseMLASpec
from kimi_hal.ops.spec import Limits
from kimi_hal.ops.topk_merge import TopKSpec
from kimi_hal_conformance.case import QUICK, Case, Make, Operands, add
from kimi_hal_conformance.cases.composites import dsa_operands, dsa_spec, kda_operands, moe_operands, moe_spec
from kimi_hal_conformance.cases.indexer import query_operands, score_operands
from kimi_hal_conformance.cases.kda import conv_operands, decode_operands, gate_operands, settle
from kimi_hal_conformance.cases.moe import route_operands
from kimi_hal_conformance.cases.sparse_mla import attention_operands, merge_operands
from kimi_hal_conformance.draws import ints, normal

WHY = "More rows than a block has: a later block reads its own rows, and a row's bits are those of it alone."
#: More than 256 rows, and no multiple of 8.
ROWS = 258
LIMITS = Limits(max_rows=300, max_reqs=300, max_context=1024)
INDEX = "index.fp8.e4m3fn.pow2.page64"
#: Two requests of half of the rows each, with a score for each row before.
REQUESTS = (190, 150)
#: Requests of a step: two rows each and one of padding, more than 64 in all.
SHORT = tuple(1 + 7 * i % 60 for i in range(33))
#: Rows of sequences: borders of blocks of 16, 32, 64 and 128 lie inside the first.
SEQUENCES = (150, 0, 70)


def scores() -> Make:
    """Return score rows of every length that they can have."""

    def make(g: torch.Generator) -> Operands:
        return {"scores": normal(g, ROWS, 24), "row_len": torch.arange(ROWS, dtype=torch.int32) % 25}

    return make


def slots_apart(make: Make) -> Make:
    """Return the operands with a slot of its own for each row, in no order; the last two rows stay padding."""

    def wrapped(g: torch.Generator) -> Operands:
        given = dict(make(g))
        for name in ("state", "conv_state"):
            if name in given:
                given[name] = normal(g, ROWS, *given[name].shape[1:], dtype=given[name].dtype, spread=0.1)
        ids = torch.randperm(ROWS, generator=g)
        given["state_ids"] = ints([*ids[:-2].tolist(), -1, ROWS])
        return given

    return wrapped


def layer(spec: KDASpec) -> Make:
    """Return a layer's rows with slots of their own, of which no output of the convolution is near a tie."""
    base = slots_apart(kda_operands(spec, ROWS))

    def make(g: torch.Generator) -> Operands:
        given = base(g)
        inputs = {name: given[name] for name in ("x", "conv_state", "state_ids")}
        cuts = torch.arange(ROWS + 1, dtype=torch.int32)
        settle(g, spec, inputs | {"weight": given["weights"]["conv"], "cu_seqlens": cuts})
        return given

    return make


def blocks(operator: str, spec: Any, make: Make) -> Case:
    """Return a case."""
    return Case(f"{operator}/blocks", operator, spec, LIMITS, make, since=QUICK, why=WHY)


def cases() -> Iterator[Case]:
    """Every operator over rows that stand for themselves."""
    query = IndexQuerySpec(index=INDEX, num_heads=2)
    yield blocks("quantize_index_query", query, query_operands(query, ROWS))
    index = IndexerSpec(index=INDEX, num_heads=3)
    yield blocks("indexer_logits", index, score_operands(index, REQUESTS, ROWS // 2))
    topk = IndexerTopKSpec(index=INDEX, num_heads=3, topk=16)
    yield blocks("indexer_topk", topk, score_operands(topk, REQUESTS, ROWS // 2))
    select = TopKSpec(topk=8)
    yield blocks("topk_select", select, scores())
    attention = SparseMLASpec(num_heads=1, latent="latent.bf16", topk=8)
    yield blocks("sparse_mla", attention, attention_operands(attention, ROWS, 8, 70))
    parts = MergeSpec(parts=3, num_heads=2, dim=16, dtype="float32", return_lse=True)
    yield blocks("merge_attn_states", parts, merge_operands(parts, ROWS))
    route = RouteSpec(num_experts=16, topk=3)
    yield blocks("moe_route", route, route_operands(route, ROWS))
    kda = KDASpec(num_heads=1, head_dim=16)
    yield blocks("kda_gate", kda, gate_operands(kda, ROWS))
    yield blocks("kda_decode", kda, slots_apart(decode_operands(kda, ROWS)))
    yield blocks("kda_layer_decode", kda, layer(kda))
    yield blocks("kda_conv", kda, conv_operands(kda, SEQUENCES, tail=2))
    mixture = moe_spec()
    yield blocks("moe_layer", mixture, moe_operands(mixture, ROWS, live=ROWS - 3))
    dsa = dsa_spec(1)
    yield blocks("dsa_decode", dsa, dsa_operands(dsa, SHORT, grouped=False))


add(cases())
