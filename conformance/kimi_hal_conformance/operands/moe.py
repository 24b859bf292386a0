"""Small operands for any Spec of the moe family."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_hal.ops.moe import MoESpec, RouteSpec
from kimi_hal_conformance.case import Make, Operands
from kimi_hal_conformance.cases.moe import checkpoint, route_operands
from kimi_hal_conformance.draws import ints, normal
from kimi_hal_conformance.operands.recipe import Fields, Recipe

BF16 = torch.bfloat16


def route(spec: RouteSpec, rows: int) -> Make:
    """Return logits with NaN, infinities and rows of one value; the seventh row names its fourth expert."""
    return route_operands(spec, rows if spec.num_experts > 3 else min(rows, 6))


def route_bytes(spec: RouteSpec, rows: int) -> int:
    """Return the bytes of scores and their sorted copies."""
    return rows * spec.num_experts * 64


def experts(spec: MoESpec, rows: int) -> Make:
    """Return tokens of which half want an expert of this rank; some ids are −1, or another rank's."""

    def make(g: torch.Generator) -> Operands:
        ids = torch.stack([_chosen(g, spec) for _ in range(rows)]) if rows else ints([]).view(0, spec.topk)
        if rows > 2:
            ids[1, 0] = -1
        given: dict[str, object] = {
            "x": normal(g, rows, spec.hidden, dtype=BF16),
            "topk_weights": torch.softmax(normal(g, rows, spec.topk), dim=-1),
            "topk_ids": ids,
            "weights": checkpoint(g, spec),
        }
        if spec.has_expert_map:
            mapping = torch.full((spec.num_experts,), -1, dtype=torch.int32)
            mapping[: spec.num_local] = torch.randperm(spec.num_local, generator=g).int()
            given["expert_map"] = mapping
        return given

    return make


def _chosen(g: torch.Generator, spec: MoESpec) -> Tensor:
    """Return distinct experts, this rank's first."""
    local = torch.randperm(spec.num_local, generator=g) + spec.expert_offset
    others = torch.randperm(spec.num_experts, generator=g)
    outside = (others < spec.expert_offset) | (others >= spec.expert_offset + spec.num_local)
    here = local[: (spec.topk + 1) // 2]
    ids = torch.cat([here, others[outside], local[here.numel() :]])[: spec.topk]
    return ids[torch.randperm(spec.topk, generator=g)].int()


def prepare(spec: MoESpec, rows: int) -> Make:
    """Return a checkpoint, and beside it the call that tells what was made of it."""

    def make(g: torch.Generator) -> Operands:
        given = dict(experts(spec, rows)(g))
        return {**given, **given.pop("weights")}

    return make


def expert_bytes(spec: MoESpec, rows: int) -> int:
    """Return the bytes of the weights as they are drawn, and of two experts decoded."""
    one = 3 * spec.intermediate * spec.hidden
    return spec.num_local * one * 16 + one * 16 + rows * (spec.hidden + spec.intermediate) * 64


def bind_experts(fields: Fields) -> None:
    """No rank holds more experts than there are, or beyond the last; an offset is not read beside a map."""
    fit(fields)
    if fields.get("has_expert_map"):
        fields["expert_offset"] = 0


def fit(fields: Fields, prefix: str = "") -> None:
    """Let a rank's experts be some of those that there are, and a row have no more than all."""
    total = fields.get(f"{prefix}num_experts", 1)
    local, offset, topk = (f"{prefix}{name}" for name in ("num_local", "expert_offset", "topk"))
    if local in fields:
        fields[local] = min(fields[local], total)
        fields[offset] = min(fields.get(offset, 0), total - fields[local])
    if topk in fields:
        fields[topk] = min(fields[topk], total)


def bind_route(fields: Fields, prefix: str = "") -> None:
    """Groups divide the experts, and a row can reach as many as it asks for."""
    names = (f"{prefix}{name}" for name in ("num_experts", "groups", "topk_groups", "topk"))
    experts, groups, chosen, topk = names
    if not all(name in fields for name in (experts, groups, chosen, topk)):
        return
    if fields[experts] % fields[groups]:
        fields[experts] = fields[experts] // fields[groups] * fields[groups] or fields[groups]
    fields[chosen] = min(fields[chosen], fields[groups])
    fields[topk] = min(fields[topk], fields[chosen] * (fields[experts] // fields[groups]))


SMALL = {"num_experts": 12, "num_local": 5, "topk": 3, "hidden": 96, "intermediate": 64, "expert_offset": 0}
ROUTED = {"num_experts": 60, "topk": 3, "groups": 1}
RECIPES = {
    "moe_route": Recipe(
        route, route_bytes, bind=bind_route, leading=("groups", "num_experts"), small=ROUTED, rows=7
    ),
    "prepare_moe_weights": Recipe(
        prepare,
        expert_bytes,
        bind=bind_experts,
        leading=("num_experts", "has_expert_map"),
        small=SMALL,
        rows=4,
    ),
    "moe_experts": Recipe(
        experts,
        expert_bytes,
        bind=bind_experts,
        leading=("num_experts", "has_expert_map"),
        small=SMALL,
        rows=4,
    ),
}
