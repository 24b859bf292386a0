"""Router and experts as traced programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kimi_hal import formats
from kimi_hal.ops.moe import MoESpec, RouteSpec
from kimi_hal.reference import moe as reference

Given = Mapping[str, Any]


def moe_route(spec: RouteSpec, given: Given) -> tuple[Tensor, Tensor]:
    """Return weights and int32 ids; rows from ``num_tokens`` on are padding."""
    logits = given["logits"]
    score = torch.sigmoid(logits.double()).float()
    choice = score + given["bias"]
    missing = torch.isnan(choice)
    choice = torch.where(missing, -torch.inf, choice)
    ids = chosen(spec, choice)
    weights = torch.where(missing, 0.0, score).gather(1, ids)
    weights = reference._weighed(spec, weights)
    if given.get("num_tokens") is None:
        return weights, ids
    live = (torch.arange(logits.shape[0], device=logits.device) < given["num_tokens"])[:, None]
    return torch.where(live, weights, 0.0), torch.where(live, ids, -1)


def chosen(spec: RouteSpec, choice: Tensor) -> Tensor:
    """Return the top-k ids, by descending score or ascending where asked; the smaller id first among equals."""
    order = descending(choice)
    if spec.groups > 1:
        # A stable second sort: what lies outside the chosen groups ranks below even −inf.
        rank = torch.where(reachable(spec, choice), 1, 0).gather(1, order)
        order = order.gather(1, descending(rank))
    ids = order[:, : spec.topk]
    return ids.sort(dim=1).values if spec.ordered else ids


def descending(x: Tensor) -> Tensor:
    """Return the order of each row's numbers, the largest first, the earlier first among equals."""
    return torch.sort(x, dim=1, descending=True, stable=True).indices


def reachable(spec: RouteSpec, choice: Tensor) -> Tensor:
    """Return ``[T, E]`` bool: experts in the ``topk_groups`` groups with the largest sum of two scores."""
    size = spec.num_experts // spec.groups
    grouped = choice.reshape(-1, spec.groups, size)
    best = torch.sort(grouped, dim=-1, descending=True).values[..., : min(2, size)].sum(dim=-1)
    best = torch.where(torch.isnan(best), -torch.inf, best)  # +inf and −inf in one group
    place = descending(best)[:, : spec.topk_groups]
    group = torch.arange(spec.groups, device=choice.device)
    taken = (place[:, :, None] == group).any(dim=1)
    return taken[:, :, None].expand(-1, -1, size).reshape(choice.shape)


def moe_experts(spec: MoESpec, given: Given) -> tuple[Tensor]:
    """Return this rank's partial sum: one loop over its experts, each over all rows.

    Every expert's weights are read once, which is the floor where each has a token; a row that did not choose an
    expert takes nothing of it.
    """
    from torch_xla.experimental.scan import scan

    x = given["x"].float()
    local = reference.local_experts(spec, given["topk_ids"], given.get("expert_map"))
    number = torch.arange(spec.num_local, device=x.device)
    named = local[None] == number[:, None, None]
    factor = torch.where(named, given["topk_weights"][None], 0.0).sum(dim=2)
    took = named.any(dim=2).float()
    w13, w2 = decoded(spec, *given["weights"])

    # What a step reads must come through the loop: torch-xla traces it apart, without what stands around it.
    def one(carry: tuple[Tensor, ...], expert: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Tensor]:
        (rows, total), (up_gate, down, weight, uses) = carry, expert
        gate, up = torch.matmul(rows, up_gate.transpose(0, 1)).chunk(2, dim=1)
        hidden = reference.activate(spec, gate, up).bfloat16().float()
        part = torch.matmul(hidden, down.transpose(0, 1)) * weight[:, None]
        total = total + torch.where(uses[:, None] > 0, part, 0.0)
        return (rows.clone(), total), total[:1, :1]

    (_, total), _ = scan(one, (x, torch.zeros_like(x)), (w13, w2, factor, took))
    return (total,)


def decoded(
    spec: MoESpec, w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the experts' matrices in float32: e2m1 times a power of two is exact in bfloat16."""
    fmt = formats.experts(spec.weights)
    return fmt.decode(w13, w13_scale), fmt.decode(w2, w2_scale)
