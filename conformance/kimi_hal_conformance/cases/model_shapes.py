"""Kimi K3.1 Pro's own shapes, at every tensor-parallel size that it is served at.

Specs are an engine's (``kimi_hal/presets.py``). Experts at sizes 1 and 2 are a slice of 8 of 896, as under expert
parallelism; all 896 stand at the width of size 32, half a gigabyte.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from kimi_hal.model import K3_1_PRO
from kimi_hal.ops.composites import MoELayerSpec
from kimi_hal.ops.moe import MoESpec
from kimi_hal.ops.sparse_mla import MergeSpec
from kimi_hal.ops.spec import Limits
from kimi_hal.presets import Deployment
from kimi_hal_conformance.case import FULL, QUICK, STANDARD, Case, Checkpoint, Make, Operands, add
from kimi_hal_conformance.cases.composites import dense_weights, dsa_operands, kda_operands, separated
from kimi_hal_conformance.cases.indexer import query_operands, score_operands, store_operands
from kimi_hal_conformance.cases.kda import (
    commit_operands,
    conv_operands,
    decode_operands,
    gate_operands,
    prefill_operands,
    verify_operands,
)
from kimi_hal_conformance.cases.moe import route_operands
from kimi_hal_conformance.cases.sparse_mla import merge_operands
from kimi_hal_conformance.cases.topk_merge import select_operands, spread
from kimi_hal_conformance.draws import normal

SIZES = (1, 2, 4, 8, 16, 32)
LIMITS = Limits(max_rows=128, max_reqs=16, max_context=4096, rows_per_req=8, uniform=False)
#: Experts of a rank that does not hold them all.
SLICE = 8


def packed(g: torch.Generator, spec: MoESpec) -> Checkpoint:
    """Return random codes under scales that keep sums near 1: as good as encoded weights, and quickly drawn."""
    shapes = {
        "w13": (spec.num_local, 2 * spec.intermediate, spec.hidden),
        "w2": (spec.num_local, spec.hidden, spec.intermediate),
    }
    found: dict[str, torch.Tensor] = {}
    for name, (experts, rows, columns) in shapes.items():
        codes = torch.randint(256, (experts, rows, columns // 2), generator=g, dtype=torch.uint8)
        middle = 127 - (columns.bit_length() // 2) - 1
        scale = torch.randint(middle - 1, middle + 2, (experts, rows, columns // 32), generator=g)
        found |= {name: codes, f"{name}_scale": scale.to(torch.uint8)}
    return Checkpoint(found)


def experts_operands(spec: MoESpec, rows: int) -> Make:
    """Return rows of which each wants two experts that are here, and others that are not."""

    def make(g: torch.Generator) -> Operands:
        elsewhere = torch.arange(spec.topk) + spec.expert_offset + spec.num_local
        ids = elsewhere.remainder(spec.num_experts).repeat(rows, 1)
        if spec.num_local == spec.num_experts:
            ids = torch.stack(
                [torch.randperm(spec.num_experts, generator=g)[: spec.topk] for _ in range(rows)]
            )
        else:
            ids[:, 0] = spec.expert_offset + torch.arange(rows) % 3
            ids[:, -1] = spec.expert_offset + spec.num_local - 1
        return {
            "x": normal(g, rows, spec.hidden, dtype=torch.bfloat16),
            "topk_weights": torch.softmax(normal(g, rows, spec.topk), dim=-1),
            "topk_ids": ids.int(),
            "weights": packed(g, spec),
        }

    return make


def of_heads(tp: int, specs: dict[str, Any]) -> Iterator[Case]:
    """Return the cases of the operators over heads at one size."""
    kda, since = specs["kda_decode"], QUICK if tp >= 16 else STANDARD
    makes = {
        "kda_gate": gate_operands(kda, 3),
        "kda_decode": decode_operands(kda, 2),
        "kda_prefill": prefill_operands(kda, (1, 9)),
        "kda_conv": conv_operands(kda, (1, 5)),
        "kda_verify": verify_operands(kda, (1, 3), LIMITS),
        "kda_commit": commit_operands(kda, (2, 3), (1, 3), LIMITS),
        "kda_layer_decode": kda_operands(kda, 2),
    }
    for operator, make in makes.items():
        # The layer's own operators stand in standard at every size, which has minutes to keep to.
        whole = operator == "kda_layer_decode" and tp <= 2
        yield case(operator, f"tp{tp}", kda, make, FULL if whole else since)
    parts = MergeSpec(parts=8, num_heads=K3_1_PRO.heads(tp), return_lse=True)
    yield case("merge_attn_states", f"tp{tp}", parts, merge_operands(parts, 3), QUICK)
    dsa = specs["dsa_decode"]
    yield case("dsa_decode", f"tp{tp}", dsa, dsa_operands(dsa, (2300, 5), False), STANDARD)


def of_experts(tp: int) -> Iterator[Case]:
    """Return a slice of experts at one size, and all of them at the last."""
    part = Deployment(tp=tp, local_experts=SLICE, expert_offset=SLICE).specs()
    spec = part["moe_experts"]
    assert isinstance(spec, MoESpec)
    since = QUICK if tp == 32 else STANDARD
    yield case("moe_experts", f"tp{tp}-slice", spec, experts_operands(spec, 3), since)
    if tp == 32:
        whole = Deployment(tp=tp).specs()["moe_experts"]
        assert isinstance(whole, MoESpec)
        yield case("moe_experts", "tp32-all-896", whole, experts_operands(whole, 4), STANDARD)
        yield case("prepare_moe_weights", "tp32-slice", spec, apart(experts_operands(spec, 3)), STANDARD)


def apart(make: Make) -> Make:
    """Return the operands with the checkpoint's tensors beside the others, as its preparation has them."""

    def wrapped(g: torch.Generator) -> Operands:
        given = dict(make(g))
        weights = given.pop("weights")
        return {**given, **weights}

    return wrapped


def whole_layers() -> Iterator[Case]:
    """Return the layer at the model's widths, of few experts and of all, as wide as on one of 32 ranks."""
    model = dataclasses.replace(K3_1_PRO, moe_intermediate=K3_1_PRO.intermediate(32))
    for experts, since in ((32, STANDARD), (K3_1_PRO.experts, FULL)):
        found = Deployment(tp=1, model=dataclasses.replace(model, experts=experts)).specs()["moe_layer"]
        assert isinstance(found, MoELayerSpec)
        spec = dataclasses.replace(found, shared_intermediate=192)
        yield case("moe_layer", f"experts{experts}", spec, layer_operands(spec, 3), since)


def layer_operands(spec: MoELayerSpec, rows: int) -> Make:
    """Return rows of a layer, drawn until no row has close scores at its cut."""

    def make(g: torch.Generator) -> Operands:
        dense = dense_weights(g, spec)
        x = separated(g, spec, rows, dense)
        return {"x": x, "weights": Checkpoint(**dense, **packed(g, spec.experts))}

    return make


def of_every_rank() -> Iterator[Case]:
    """Return what every rank computes whole: the indexer, the selection, the router."""
    specs: dict[str, Any] = Deployment().specs()
    query, store = specs["quantize_index_query"], specs["store_index_keys"]
    yield case("quantize_index_query", "any-tp", query, query_operands(query, 5), QUICK)
    yield case("store_index_keys", "any-tp", store, store_operands(store.index, 70), QUICK)
    logits, select = specs["indexer_logits"], specs["topk_select"]
    yield case("indexer_logits", "any-tp", logits, score_operands(logits, (2300, 65), 1), QUICK)
    scores = select_operands(select, spread, (4096, 2048, 5), 4096)
    yield case("topk_select", "any-tp", select, scores, QUICK)
    yield case("moe_route", "any-tp", specs["moe_route"], route_operands(specs["moe_route"], 65), QUICK)


def cases() -> Iterator[Case]:
    """Every operator at every size."""
    for tp in SIZES:
        yield from of_heads(tp, dict(Deployment(tp=tp).specs()))
        yield from of_experts(tp)
    yield from whole_layers()
    yield from of_every_rank()


def case(operator: str, label: str, spec: Any, make: Make, since: str) -> Case:
    """Return one case."""
    why = "The model's own shape at this tensor-parallel size."
    if label == "any-tp":
        why = "The model's own shape, the same at every tensor-parallel size."
    if "896" in label:
        why = "All 896 experts at once, as wide as on one of 32 ranks."
    return Case(f"{operator}/model/{label}", operator, spec, LIMITS, make, since=since, why=why)


add(cases())
