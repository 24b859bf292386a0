"""Cases of the moe family: routing, weight preparation and the grouped experts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from kimi_hal import formats
from kimi_hal.ops.moe import MoESpec, RouteSpec
from kimi_hal.ops.spec import Limits
from kimi_hal_conformance.case import INTERP, QUICK, STANDARD, Case, Checkpoint, Make, Operands, add
from kimi_hal_conformance.draws import ints, normal, strided

LIMITS = Limits(max_rows=256, max_reqs=256)


def route_operands(spec: RouteSpec, rows: int, live: int | None = None) -> Make:
    """Return logits with ties, NaN, infinities and rows of one value only."""

    def make(g: torch.Generator) -> Operands:
        logits = normal(g, rows, spec.num_experts)
        bias = normal(g, spec.num_experts, spread=0.1)
        specials = (math.nan, math.inf, -math.inf, 0.0)
        for row, value in zip(range(1, rows), specials, strict=False):
            logits[row] = value
        if rows > 6:
            logits[5, ::2] = 0.25
            logits[6, 3] = math.nan
            bias[::5] = bias[0]
        given = {"logits": logits, "bias": bias}
        return given if live is None else given | {"num_tokens": ints([live])}

    return make


def checkpoint(g: torch.Generator, spec: MoESpec) -> Checkpoint:
    """Return packed expert weights whose scale exponents differ from expert to expert."""
    fmt = formats.experts(spec.weights)
    w13 = normal(g, spec.num_local, 2 * spec.intermediate, spec.hidden, spread=spec.hidden**-0.5)
    w2 = normal(g, spec.num_local, spec.hidden, spec.intermediate, spread=spec.intermediate**-0.5)
    w13 *= 2.0 ** torch.arange(spec.num_local).remainder(4)[:, None, None]
    if spec.num_local > 2:
        w13[2] = 0.0
    first, first_scale = fmt.encode(w13)
    second, second_scale = fmt.encode(w2)
    return Checkpoint(w13=first, w13_scale=first_scale, w2=second, w2_scale=second_scale)


def expert_operands(spec: MoESpec, rows: int, only: tuple[int, ...] = ()) -> Make:
    """Return tokens routed to distinct experts; some ids are −1, out of range, or on another rank."""

    def make(g: torch.Generator) -> Operands:
        pool = list(only) or list(range(spec.num_experts))
        ids = (
            torch.stack([_chosen(g, pool, spec.topk) for _ in range(rows)])
            if rows
            else ints([]).view(0, spec.topk)
        )
        if rows > 2:
            ids[1] = -1
            ids[2, 0] = -1
            ids[2, -1] = spec.num_experts + 5
        weights = torch.softmax(normal(g, rows, spec.topk), dim=-1)
        given: dict[str, object] = {
            "x": normal(g, rows, spec.hidden, dtype=torch.bfloat16),
            "topk_weights": weights,
            "topk_ids": ids,
            "weights": checkpoint(g, spec),
        }
        if spec.has_expert_map:
            mapping = torch.full((spec.num_experts,), -1, dtype=torch.int32)
            local = torch.randperm(spec.num_experts, generator=g)[: spec.num_local]
            mapping[local] = torch.arange(spec.num_local, dtype=torch.int32)
            given["expert_map"] = mapping
        return given

    return make


def prepare_operands(spec: MoESpec) -> Make:
    """Return a checkpoint, and beside it a call of ``moe_experts`` that tells what was made of it."""

    def make(g: torch.Generator) -> Operands:
        given = dict(expert_operands(spec, 9)(g))
        weights: Checkpoint = given.pop("weights")
        return {**given, **weights}

    return make


def strided_rows(make: Make) -> Make:
    """Return the operands with gaps between the rows of the checkpoint's tensors."""

    def wrapped(g: torch.Generator) -> Operands:
        given = dict(make(g))
        return given | {name: strided(given[name], 16) for name in ("w13", "w13_scale", "w2", "w2_scale")}

    return wrapped


def _chosen(g: torch.Generator, pool: list[int], topk: int) -> Tensor:
    chosen = [pool[int(i)] for i in torch.randperm(len(pool), generator=g)[:topk]]
    return ints(chosen + [-1] * (topk - len(chosen)))


def cases() -> Iterator[Case]:
    """K3.1's router and others, experts with and without a map, empty experts, ranks and batches."""
    routers = {
        "k3": RouteSpec(),
        "k3-ordered": RouteSpec(ordered=True),
        "e512-k10": RouteSpec(num_experts=512, topk=10),
        "e384-k1": RouteSpec(num_experts=384, topk=1),
        "grouped": RouteSpec(num_experts=64, topk=6, groups=8, topk_groups=3, scale=2.5),
        "plain": RouteSpec(num_experts=20, topk=3, renormalize=False),
    }
    for label, route in routers.items():
        for rows in (0, 1, 17):
            yield routed(f"{label}/rows{rows}", route, rows, fault=17 if rows > 1 else 0)
        yield routed(f"{label}/padded", route, 9, live=4)
    base = MoESpec(num_experts=8, num_local=8, topk=3, hidden=64, intermediate=96)
    specs = {
        "small": base,
        "float32-out": replace(base, out_dtype="float32"),
        "swiglu": replace(base, activation="swiglu"),
        "one-sided": replace(base, linear_beta=None),
        "ep-offset": replace(base, num_local=3, expert_offset=4),
        "ep-map": replace(base, num_local=3, has_expert_map=True),
        "e5": replace(base, num_experts=5, num_local=5),
        "wide": MoESpec(num_experts=6, num_local=6, topk=4, hidden=3584, intermediate=96),
    }
    for label, spec in specs.items():
        for rows in (0, 1, 9):
            yield mixed(
                f"{label}/rows{rows}",
                spec,
                rows,
                since=INTERP if label != "wide" else QUICK if rows == 9 else STANDARD,
            )
    yield mixed("small/one-expert", specs["small"], 8, only=(1,), since=INTERP, fault=16)
    yield mixed("ep-offset/none-here", specs["ep-offset"], 6, only=(0, 1, 2), since=INTERP, fault=16)
    for label in ("small", "ep-offset"):
        name, make = f"prepare_moe_weights/{label}", prepare_operands(specs[label])
        yield Case(name, "prepare_moe_weights", specs[label], LIMITS, make, since=INTERP)
    first, slices = next(iter(specs.values())), "prepare_moe_weights/strided"
    yield Case(
        slices, "prepare_moe_weights", first, LIMITS, strided_rows(prepare_operands(first)), since=INTERP
    )


def routed(label: str, spec: RouteSpec, rows: int, live: int | None = None, fault: int = 0) -> Case:
    """Return one case of ``moe_route``."""
    make = route_operands(spec, rows, live)
    return Case(f"moe_route/{label}", "moe_route", spec, LIMITS, make, since=INTERP, fault=fault)


def mixed(
    label: str, spec: MoESpec, rows: int, only: tuple[int, ...] = (), since: str = QUICK, fault: int = 0
) -> Case:
    """Return one case of ``moe_experts``."""
    make = expert_operands(spec, rows, only)
    return Case(f"moe_experts/{label}", "moe_experts", spec, LIMITS, make, since=since, fault=fault)


WHY = {
    "moe_route/": "Ties, NaN, infinities and rows of one value; ids distinct and in range, weights unbiased.",
    "moe_experts/": "Rows for experts here, elsewhere, out of range and named by no id.",
    "moe_experts/small/one-expert": "All rows at one expert, none at the others.",
    "moe_experts/ep-offset/none-here": "A rank of which no row wants an expert returns zeros.",
    "prepare_moe_weights/strided": "Rows of a checkpoint that are slices of wider ones, as a shard of it has them.",
    "prepare_moe_weights/": "Weights prepared by the implementation are judged by what its experts make of them.",
}

add(cases(), WHY)
