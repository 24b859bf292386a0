"""Mixtures of experts whose right answer is known by hand: routes, empty experts, every code, scales by group."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kimi_hal.ops.composites import MoELayerSpec
from kimi_hal.ops.moe import MoESpec, RouteSpec
from kimi_hal.ops.spec import Limits
from kimi_hal_conformance.case import INTERP, QUICK, Case, Checkpoint, Make, Operands, add
from kimi_hal_conformance.cases.composites import moe_operands, moe_spec
from kimi_hal_conformance.cases.moe import checkpoint, expert_operands, prepare_operands, route_operands
from kimi_hal_conformance.draws import ints, normal

LIMITS = Limits(max_rows=256, max_reqs=256)
BASE = MoESpec(num_experts=8, num_local=8, topk=3, hidden=64, intermediate=96)
BF16 = torch.bfloat16
#: The e2m1 code of 1, and the e8m0 code of 1.
ONE, SCALE_ONE = 0x22, 127


# --- moe_route ------------------------------------------------------------------------------------------


def routes(rows: Sequence[Sequence[float]], bias: Sequence[float], live: int | None = None) -> Make:
    """Return given logits and bias."""

    def make(g: torch.Generator) -> Operands:
        given = {"logits": torch.tensor(rows), "bias": torch.tensor(bias)}
        return given if live is None else given | {"num_tokens": ints([live])}

    return make


def logit(*scores: float) -> list[float]:
    """Return the logits of given sigmoid scores."""
    return [math.log(s / (1 - s)) for s in scores]


def rising(spec: RouteSpec) -> Make:
    """Return logits that rise with the expert, and the same from the last on."""

    def make(g: torch.Generator) -> Operands:
        step = (torch.arange(spec.num_experts) - spec.num_experts // 2) / 64
        return {"logits": torch.stack([step, -step]), "bias": torch.zeros(spec.num_experts)}

    return make


def alike(spec: RouteSpec, rows: int) -> Make:
    """Return rows of the same logits: what holds of the first holds of the last."""

    def make(g: torch.Generator) -> Operands:
        logits = normal(g, 1, spec.num_experts).repeat(rows, 1)
        return {"logits": logits, "bias": normal(g, spec.num_experts, spread=0.1)}

    return make


def saturated(spec: RouteSpec) -> Make:
    """Return logits behind 18, whose scores are all exactly 1, and infinite and huge biases."""

    def make(g: torch.Generator) -> Operands:
        logits = normal(g, 3, spec.num_experts).abs() + torch.tensor([[18.0], [40.0], [-2.0]])
        bias = normal(g, spec.num_experts, spread=0.1)
        bias[3], bias[5], bias[7], bias[8] = math.inf, -math.inf, 3e38, math.nan
        return {"logits": logits, "bias": bias if spec.topk == 5 else torch.zeros_like(bias)}

    return make


def run_with_nan() -> list[list[float]]:
    """Return rows whose best run of four experts is not the first, and has only two that are worth more than −inf."""
    middle, last = [-1.0] * 12, [-1.0] * 12
    middle[4:8] = 3.0, math.nan, math.nan, 2.0
    last[8:12] = math.nan, 5.0, 3.0, 2.0  # a bias of −inf besides
    return [middle, last]


def route_cases() -> Iterator[Case]:
    """Classes 3, 7, 14, 17, 18, 19 on ``moe_route``."""
    two = RouteSpec(num_experts=4, topk=2)
    weighed = routes([logit(0.9, 0.8, 0.1, 0.2), logit(0.1, 0.1, 0.1, 0.1)], [0.0, 0.0, 1.0, 0.0])
    yield route("bias-selects", two, weighed, 18)
    for experts, topk in ((512, 10), (896, 16), (384, 6), (1000, 7)):
        spec = RouteSpec(num_experts=experts, topk=topk)
        yield route(f"rising/e{experts}", spec, rising(spec), 17)
    seventeen = RouteSpec(num_experts=128, topk=8)
    yield route("rows-alike-17", seventeen, alike(seventeen, 17), 17)
    yield route("rows-alike-130", seventeen, alike(seventeen, 130), 17, QUICK)
    broken = RouteSpec(num_experts=12, topk=5)
    rows = [[0.1 * i - 0.5 for i in range(12)] for _ in range(6)] + [[math.inf] * 12, [math.nan] * 12]
    yield route("nan-row-and-inf-row", broken, routes(rows, [0.0] * 12), 19)
    for topk in (4, 5):
        spec = RouteSpec(num_experts=12, topk=topk)
        yield route(f"saturated/k{topk}", spec, saturated(spec), 19)
    for live in (0, -3, 3, 99):
        spec = RouteSpec(num_experts=12, topk=3)
        rows = [[0.1 * i for i in range(12)] for _ in range(3)] + [[math.nan] * 12] * 2
        yield route(f"live{live}", spec, routes(rows, [0.0] * 12, live), 3)
    for experts, topk in ((1, 1), (5, 5), (7, 3)):
        spec = RouteSpec(num_experts=experts, topk=topk)
        make = route_operands(spec, 7) if experts > 3 else alike(spec, 2)
        yield route(f"e{experts}-k{topk}", spec, make, 14)
    runs = RouteSpec(num_experts=12, topk=3, groups=3, topk_groups=1)
    yield route("run-with-nan", runs, routes(run_with_nan(), [0.0] * 9 + [-math.inf, 0.0, 0.0]), 18)
    eps = RouteSpec(num_experts=12, topk=3, denom_eps=1e-20, scale=2.5)
    yield route("all-scores-0", eps, routes([[-300.0] * 12, [-80.0] * 12], [0.0] * 12), 19)


def route(label: str, spec: RouteSpec, make: Make, fault: int, since: str = INTERP) -> Case:
    """Return a case of ``moe_route``."""
    name = f"moe_route/edges/{label}"
    return Case(name, "moe_route", spec, LIMITS, make, since=since, fault=fault)


# --- moe_experts ----------------------------------------------------------------------------------------


def ones(spec: MoESpec) -> Checkpoint:
    """Return experts whose every weight is 1 under scales of 1."""
    shapes = {
        "w13": (2 * spec.intermediate, spec.hidden),
        "w2": (spec.hidden, spec.intermediate),
    }
    found = {}
    for name, (rows, columns) in shapes.items():
        found[name] = torch.full((spec.num_local, rows, columns // 2), ONE, dtype=torch.uint8)
        found[f"{name}_scale"] = torch.full(
            (spec.num_local, rows, columns // 32), SCALE_ONE, dtype=torch.uint8
        )
    return Checkpoint(found)


def routed(
    g: torch.Generator, spec: MoESpec, ids: Sequence[Sequence[int]], weights: Checkpoint
) -> dict[str, Any]:
    """Return rows for given experts."""
    return {
        "x": normal(g, len(ids), spec.hidden, dtype=BF16),
        "topk_weights": torch.softmax(normal(g, len(ids), spec.topk), dim=-1),
        "topk_ids": ints([i for row in ids for i in row]).view(len(ids), spec.topk),
        "weights": weights,
    }


def sized(spec: MoESpec, sizes: Sequence[int]) -> Make:
    """Return rows of which ``sizes[e]`` want expert e and nothing else."""

    def make(g: torch.Generator) -> Operands:
        ids = [[e] + [-1] * (spec.topk - 1) for e, n in enumerate(sizes) for _ in range(n)]
        ids = ids or [[-1] * spec.topk] * 3
        return routed(g, spec, ids, checkpoint(g, spec))

    return make


def unread_weights(spec: MoESpec) -> Make:
    """Return routes of −1 whose weight is NaN, an expert named twice, and a row of NaN that no one wants."""

    def make(g: torch.Generator) -> Operands:
        given = routed(g, spec, [[1, -1, 2], [4, 4, -7], [-1, -1, -1], [7, 99, 0]], checkpoint(g, spec))
        given["topk_weights"][0, 1] = given["topk_weights"][1, 2] = math.nan
        given["topk_weights"][3, 1] = math.inf
        given["topk_weights"][2] = math.nan
        given["x"][2] = math.nan
        return given

    return make


def grouped_scales(spec: MoESpec) -> Make:
    """Return weights of 1 whose scale is another power of two in every group of columns, and one-hot rows."""

    def make(g: torch.Generator) -> Operands:
        weights = ones(spec)
        for name in ("w13_scale", "w2_scale"):
            groups = weights[name].shape[-1]
            weights[name] += (torch.arange(groups) % 5).to(torch.uint8) - 9
        given = routed(g, spec, [[0, 1, 2]] * 4, weights)
        given["x"][0] = 1.0
        given["x"][1:] = 0.0
        given["x"][1, 0] = given["x"][2, 33] = given["x"][3, -1] = 1.0
        return given

    return make


def every_code(spec: MoESpec, scales: Sequence[int]) -> Make:
    """Return an expert whose first rows hold every e2m1 code, each row under another scale code.

    A one-hot row reads one column. Of the gate's result the activation makes what it makes; the up half is 1.
    """

    def make(g: torch.Generator) -> Operands:
        weights = ones(spec)
        byte = torch.arange(spec.hidden // 2) % 8
        weights["w13"][0, : spec.intermediate] = ((2 * byte + 1) << 4 | 2 * byte).to(torch.uint8)
        weights["w13_scale"][0, : spec.intermediate] = torch.tensor(scales, dtype=torch.uint8).repeat(
            spec.intermediate
        )[: spec.intermediate, None]
        weights["w2"][0] = 0
        weights["w2"][0, torch.arange(min(spec.hidden, spec.intermediate)), :] = 0
        for row in range(min(spec.hidden, spec.intermediate)):
            weights["w2"][0, row, row // 2] = 0x02 if row % 2 == 0 else 0x20
        given = routed(g, spec, [[0, -1, -1]] * 16, weights)
        given["x"].zero_().fill_diagonal_(1.0)
        given["topk_weights"].fill_(1.0)
        return given

    return make


def long_sum(spec: MoESpec) -> Make:
    """Return rows that want all of equal experts: one term and many of 2^-9 of it, which bfloat16 cannot add to it."""

    def make(g: torch.Generator) -> Operands:
        one = checkpoint(g, replace(spec, num_local=1))
        weights = Checkpoint({name: tensor.repeat(spec.num_local, 1, 1) for name, tensor in one.items()})
        given = routed(g, spec, [list(range(spec.topk))] * 2, weights)
        given["topk_weights"].fill_(2.0**-9)
        given["topk_weights"][0, 0] = given["topk_weights"][1, -1] = (
            1.0  # whoever adds from an end meets it first
        )
        return given

    return make


def expert_cases() -> Iterator[Case]:
    """Classes 9, 14, 16, 17, 18, 20, 21 on ``moe_experts`` and ``prepare_moe_weights``."""
    four = replace(BASE, num_experts=4, num_local=4)
    for sizes in ((3, 0, 0, 5), (0, 8, 0, 0), (0, 0, 0, 0), (1, 1, 1, 1), (0, 0, 0, 17)):
        yield experts(f"sizes-{'-'.join(map(str, sizes))}", four, sized(four, sizes), 16)
    yield experts("weights-not-read", BASE, unread_weights(BASE), 18)
    often = replace(BASE, num_experts=64, num_local=64, topk=64, hidden=32, intermediate=32)
    yield experts("sum-of-64", often, long_sum(often), 9)
    wide = MoESpec(num_experts=3, num_local=3, topk=3, hidden=4096, intermediate=32)
    yield experts("scale-of-each-group", wide, grouped_scales(wide), 21, QUICK)
    small = replace(wide, hidden=160, intermediate=160)
    yield experts("scale-of-each-group/small", small, grouped_scales(small), 21)
    swiglu = replace(BASE, activation="swiglu", hidden=32, intermediate=32)
    ordinary = (120, 121, 122, 123, 124, 125, 126, 127, 128, 129, 130, 134)
    yield experts("every-code", swiglu, every_code(swiglu, ordinary), 20)
    yield experts("every-code/smallest-scales", swiglu, every_code(swiglu, tuple(range(1, 113, 7))), 20)
    for hidden, columns in ((32, 32), (96, 160), (160, 96), (224, 32), (32, 416)):
        spec = replace(BASE, hidden=hidden, intermediate=columns)
        yield experts(f"hidden{hidden}-columns{columns}", spec, expert_operands(spec, 5), 14)
        name = f"prepare_moe_weights/edges/hidden{hidden}-columns{columns}"
        make = prepare_operands(spec)
        yield Case(name, "prepare_moe_weights", spec, LIMITS, make, since=INTERP, fault=21)
    five = replace(BASE, num_experts=5, num_local=5, topk=2)
    for rows in (4, 5, 33, 129):
        yield experts(f"e5-rows{rows}", five, expert_operands(five, rows), 17, INTERP if rows < 33 else QUICK)
    many = MoESpec(num_experts=300, num_local=300, topk=9, hidden=32, intermediate=32)
    yield experts("e300", many, expert_operands(many, 20), 17, QUICK)
    far = replace(many, num_local=20, expert_offset=280)
    yield experts("e300-last-20", far, expert_operands(far, 20), 17)
    one = replace(BASE, topk=1, num_experts=1, num_local=1)
    yield experts("one-expert", one, expert_operands(one, 6), 17)
    specs = {
        "swiglu": replace(BASE, activation="swiglu"),
        "e5": five,
        "ep-map": replace(BASE, num_local=3, has_expert_map=True),
    }
    for label, spec in specs.items():
        name = f"prepare_moe_weights/edges/{label}"
        make = prepare_operands(spec)
        yield Case(name, "prepare_moe_weights", spec, LIMITS, make, since=INTERP, fault=21)


def experts(label: str, spec: MoESpec, make: Make, fault: int, since: str = INTERP) -> Case:
    """Return a case of ``moe_experts``."""
    name = f"moe_experts/edges/{label}"
    return Case(name, "moe_experts", spec, LIMITS, make, since=since, fault=fault)


# --- moe_layer ------------------------------------------------------------------------------------------


def layer_with(make: Make, change: Any) -> Make:
    """Return a layer's operands after a change of each rank's."""

    def wrapped(g: torch.Generator) -> Operands:
        operands = dict(make(g))
        for own in operands.get("ranks", [operands]):
            change(own)
        return operands

    return wrapped


def broken_padding(own: dict[str, Tensor]) -> None:
    """Make every row behind the live ones NaN."""
    own["x"][int(own["num_tokens"].clamp(min=0)) :] = math.nan


def crowd(own: dict[str, Any]) -> None:
    """Let a bias send every row to the first experts, by far: the others get none."""
    own["weights"]["bias"] = torch.where(torch.arange(own["weights"]["bias"].numel()) < 4, 8.0, -8.0)


def layer_cases() -> Iterator[Case]:
    """Classes 3, 16, 17, 18 on ``moe_layer``."""
    spec = moe_spec()
    for live in (0, -1, 4, 50):
        make = layer_with(moe_operands(spec, 7, live=live), broken_padding if live < 7 else lambda own: None)
        yield layer(f"live{live}", spec, make, 3)
    yield layer("bias-selects-few", spec, layer_with(moe_operands(spec, 9), crowd), 16)
    yield layer("rows-40", spec, moe_operands(spec, 40), 17, QUICK)
    halves = tuple(moe_spec(ranks=3, rank=rank) for rank in range(3))
    make = layer_with(moe_operands(halves[0], 5), crowd)
    name = "moe_layer/edges/rank-without-a-token"
    yield Case(name, "moe_layer", halves[0], LIMITS, make, since=INTERP, fault=16, ranks=3, rank_specs=halves)
    bounded = replace(spec, experts=replace(spec.experts, activation="swiglu"))
    yield layer("swiglu", bounded, moe_operands(bounded, 5), 0)


def layer(label: str, spec: MoELayerSpec, make: Make, fault: int, since: str = INTERP) -> Case:
    """Return a case of ``moe_layer``."""
    name = f"moe_layer/edges/{label}"
    return Case(name, "moe_layer", spec, LIMITS, make, since=since, fault=fault)


WHY = {
    "moe_route/edges/bias-selects": "Scores .9 .8 .1 .2, bias on the third: ids {2, 0}, weights .1 and .9.",
    "moe_route/edges/rising": "The last experts are the best: ids beyond one block; then the first are.",
    "moe_route/edges/rows-alike": "The same row many times: the last is routed like the first.",
    "moe_route/edges/nan-row-and-inf-row": "Rows of +inf and of NaN: distinct ids in range, no NaN elsewhere.",
    "moe_route/edges/saturated": "Scores that are all exactly 1: the smaller id wins; biases of inf and NaN.",
    "moe_route/edges/live": "Rows behind num_tokens are NaN: ids −1, weights 0; a count out of range is clamped.",
    "moe_route/edges/run-with-nan": "Experts of −inf inside the chosen run come before any outside it.",
    "moe_route/edges/e": "Few experts, all of them chosen, odd numbers.",
    "moe_route/edges/all-scores-0": "Scores of 0 with an epsilon in the denominator: weights of 0, no NaN.",
    "moe_experts/edges/sizes": "Experts without a row, first, last, all.",
    "moe_experts/edges/sum-of-64": "One term and 63 of 2^-9 of it: a sum in bfloat16 stays at the first.",
    "moe_experts/edges/weights-not-read": "Routes that count nothing have weights of NaN; an expert is named twice.",
    "moe_experts/edges/scale-of-each-group": "Another scale in every group of columns, one-hot rows.",
    "moe_experts/edges/every-code": "Every code under many scale codes, read one by one.",
    "moe_experts/edges/hidden": "Widths of whole groups that are no whole tiles.",
    "moe_experts/edges/e5": "Five experts, rows around a block.",
    "moe_experts/edges/e300": "More experts than a block has threads.",
    "moe_experts/edges/e300-last-20": "The last 20 of 300 experts: local ids are not global ones.",
    "moe_experts/edges/one-expert": "A single expert.",
    "prepare_moe_weights/edges/": "Weights of widths off every tile, and of every way to hold a share of the experts.",
    "moe_layer/edges/live": "Rows behind num_tokens are NaN: zeros; a count out of range is clamped.",
    "moe_layer/edges/bias-selects-few": "A bias sends all rows to four experts: the others have none.",
    "moe_layer/edges/rows-40": "More rows than a block has.",
    "moe_layer/edges/rank-without-a-token": "A rank whose experts no row wants adds zeros.",
    "moe_layer/edges/swiglu": "The other activation, in routed and in shared experts.",
}

add(route_cases(), WHY)
add(expert_cases(), WHY)
add(layer_cases(), WHY)
