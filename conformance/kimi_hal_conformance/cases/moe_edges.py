"""Edges of the moe family: scores a hair apart, ids that index a map, bounds that mean none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from kimi_hal import formats
from kimi_hal.ops.moe import MoESpec, RouteSpec
from kimi_hal.ops.spec import Limits
from kimi_hal_conformance.case import INTERP, Case, Checkpoint, Make, Operands, add
from kimi_hal_conformance.cases.moe import checkpoint
from kimi_hal_conformance.draws import ints, normal

LIMITS = Limits(max_rows=128, max_reqs=128)
MANY = Limits(max_rows=512, max_reqs=512)
BASE: dict[str, Any] = {"num_experts": 8, "num_local": 8, "topk": 3, "hidden": 64, "intermediate": 96}
BF16 = torch.bfloat16


def near_ties(spec: RouteSpec) -> Make:
    """Return rows in which a later expert is the best by one part in a million."""

    def make(g: torch.Generator) -> Operands:
        logits = normal(g, 3, spec.num_experts) - 8.0
        logits[0, 10], logits[0, 200] = 0.0, 4e-6
        logits[1, 0], logits[1, 383] = 0.0, 1e-6
        logits[2, 383], logits[2, 0] = 0.0, 1e-6
        return {"logits": logits, "bias": torch.zeros(spec.num_experts)}

    return make


def small_sums(spec: RouteSpec) -> Make:
    """Return rows whose scores are tiny, and rows whose scores are all 0."""

    def make(g: torch.Generator) -> Operands:
        logits = normal(g, 4, spec.num_experts)
        logits[0] -= 40.0
        logits[1] -= 85.0
        logits[2] = -300.0
        return {"logits": logits, "bias": normal(g, spec.num_experts, spread=0.1)}

    return make


def mapped(spec: MoESpec) -> Make:
    """Return ids of −1 under a map whose first and last experts are local, and ids and entries beyond the last."""

    def make(g: torch.Generator) -> Operands:
        ids = [[-1, 0, 7], [0, -1, -1], [-1, -1, -1], [7, 8, -(2**31)], [3, 100, 7], [5, 6, 0]]
        mapping = torch.full((spec.num_experts,), -1, dtype=torch.int32)
        mapping[[0, 3, 7, 5, 6]] = ints([1, 2, 0, spec.num_local, 2**31 - 1])
        weights = checkpoint(g, spec)
        for tensor in weights.values():  # else the last expert is one of zeros
            tensor[-1] = tensor[0]
        return {
            "x": normal(g, len(ids), spec.hidden, dtype=BF16),
            "topk_weights": torch.softmax(normal(g, len(ids), spec.topk), dim=-1),
            "topk_ids": ints([i for row in ids for i in row]).view(-1, spec.topk),
            "weights": weights,
            "expert_map": mapping,
        }

    return make


def crowded(spec: MoESpec, rows: int, spread: float = 1.0) -> Make:
    """Return rows that nearly all want the same experts, more than a block of them."""

    def make(g: torch.Generator) -> Operands:
        ids = ints([1, 2, 3]).repeat(rows, 1)
        ids[-1] = ints([0, 4, 7])
        return {
            "x": normal(g, rows, spec.hidden, dtype=BF16, spread=spread),
            "topk_weights": torch.softmax(normal(g, rows, spec.topk), dim=-1),
            "topk_ids": ids,
            "weights": checkpoint(g, spec),
        }

    return make


def broken_expert(spec: MoESpec) -> Make:
    """Return an expert with scale codes 0, 255 and 254, which only its own rows may feel."""

    def make(g: torch.Generator) -> Operands:
        operands = dict(crowded(spec, 5)(g))
        weights = operands["weights"]
        weights["w13_scale"][0, 0] = 255
        weights["w13_scale"][4, :, 0] = 0
        weights["w2_scale"][7, 0] = 0
        operands["topk_ids"][0] = ints([4, 7, 5])
        return operands

    return make


def saturated(spec: MoESpec) -> Make:
    """Return rows whose activations are all the product of their two bounds, which every dtype holds."""

    def make(g: torch.Generator) -> Operands:
        operands = dict(crowded(spec, 9)(g))
        operands["x"] = operands["x"].abs() + 64
        w13 = normal(g, spec.num_local, 2 * spec.intermediate, spec.hidden).abs() + 2
        packed, scale = formats.experts(spec.weights).encode(w13)
        return operands | {"weights": Checkpoint(**operands["weights"] | {"w13": packed, "w13_scale": scale})}

    return make


def cases() -> Iterator[Case]:
    """Routes and experts at their edges."""
    for topk in (1, 4):
        route = RouteSpec(num_experts=384, topk=topk)
        yield Case(
            f"moe_route/edges/near-ties/k{topk}",
            "moe_route",
            route,
            LIMITS,
            near_ties(route),
            since=INTERP,
            fault=18,
        )
    small = RouteSpec(num_experts=64, topk=4)
    yield Case(
        "moe_route/edges/small-sums", "moe_route", small, LIMITS, small_sums(small), since=INTERP, fault=19
    )
    ep_map = MoESpec(**BASE | {"num_local": 3, "has_expert_map": True})
    plain = MoESpec(**BASE)
    edges: dict[str, tuple[MoESpec, Make, int]] = {
        "minus-one-and-a-map": (ep_map, mapped(ep_map), 18),
        "crowded-expert": (plain, crowded(plain, 40), 17),
        "large-activations": (plain, crowded(plain, 5, spread=12.0), 0),
        "scale-codes": (plain, broken_expert(plain), 20),
    }
    for label, bound in (("no-bound", None), ("bound-of-0", 0.0), ("negative-bound", -1.0)):
        spec = MoESpec(**BASE, linear_beta=bound)
        edges[label] = (spec, crowded(spec, 5, spread=8.0), 0)
    gentle = MoESpec(**BASE, beta=1e6)
    edges["large-beta"] = (gentle, crowded(gentle, 5, spread=12.0), 0)
    for label, (spec, make, fault) in edges.items():
        yield Case(f"moe_experts/edges/{label}", "moe_experts", spec, LIMITS, make, since=INTERP, fault=fault)
    wide = MoESpec(**BASE, out_dtype="float32")
    yield Case("moe_experts/edges/saturated", "moe_experts", wide, LIMITS, saturated(wide), since=INTERP)
    narrow = MoESpec(**BASE | {"hidden": 32, "intermediate": 32})
    full = crowded(narrow, 300)
    yield Case("moe_experts/edges/crowded-by-300", "moe_experts", narrow, MANY, full, since=INTERP, fault=17)


WHY = {
    "moe_route/edges/near-ties": "Scores one part in a million apart: the larger wins, wherever it is.",
    "moe_route/edges/small-sums": "Chosen scores so small that an epsilon in the denominator shows, and all 0.",
    "moe_experts/edges/minus-one-and-a-map": "Ids of −1 under a map whose first and last experts are local.",
    "moe_experts/edges/crowded-expert": "More rows at one expert than a block holds.",
    "moe_experts/edges/crowded-by-300": "More rows at one expert than 8 bits count.",
    "moe_experts/edges/large-activations": "Activations at which tanh and the linear bound saturate.",
    "moe_experts/edges/saturated": "Activations that bfloat16 holds, float32 results: what else is rounded shows.",
    "moe_experts/edges/scale-codes": "Scale codes 0 and 255: an expert that is broken is felt by its own rows alone.",
    "moe_experts/edges/no-bound": "No bound on the linear half.",
    "moe_experts/edges/bound-of-0": "A bound of 0 is none.",
    "moe_experts/edges/negative-bound": "A negative bound is none.",
    "moe_experts/edges/large-beta": "A large beta: SiTU's limit, where a tanh in low precision cancels.",
}

add(cases(), WHY)
