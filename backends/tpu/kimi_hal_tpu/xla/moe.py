"""Router and experts as traced programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kimi_hal.ops.moe import MoESpec, RouteSpec
from kimi_hal.reference import moe as reference
from kimi_hal_tpu import expert_grid
from kimi_hal_tpu.xla import experts

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
    """Return this rank's partial sum ``[T, hidden]`` float32."""
    local = reference.local_experts(spec, given["topk_ids"], given.get("expert_map"))
    size = expert_grid.size_of(spec, local.shape[0])
    tiles = experts.cut(spec, local, given["topk_weights"], size)
    return (experts.run(spec, given["x"].float(), tiles, given["weights"]),)
