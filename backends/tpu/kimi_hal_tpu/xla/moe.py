"""Router and experts as traced programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kimi_hal.ops.moe import MoESpec, RouteSpec
from kimi_hal.reference import moe as reference
from kimi_hal_tpu import expert_grid
from kimi_hal_tpu.xla import experts, order

#: The smallest normal float32 number.
NORMAL = 2.0**-126
#: What added to a float64 number leaves of it whole numbers of 2^-149, which is what float32 has below ``NORMAL``.
SUBNORMAL_BITS = 1.5 * 2.0 ** (52 - 149)
#: What makes every score above 0 a normal float32 number.
LARGER = 2.0**64

Given = Mapping[str, Any]


def moe_route(spec: RouteSpec, given: Given) -> tuple[Tensor, Tensor]:
    """Return weights and int32 ids; rows from ``num_tokens`` on are padding."""
    logits = given["logits"]
    score = rounded(torch.sigmoid(logits.double()))
    choice = rounded(score + given["bias"].double())
    missing = torch.isnan(choice)
    choice = torch.where(missing, -torch.inf, choice)
    ids = chosen(spec, choice)
    weights = weighed(spec, torch.where(missing, 0.0, score).gather(1, ids))
    if given.get("num_tokens") is None:
        return weights, ids
    live = (torch.arange(logits.shape[0], device=logits.device) < given["num_tokens"])[:, None]
    return torch.where(live, weights, 0.0), torch.where(live, ids, -1)


def rounded(x: Tensor) -> Tensor:
    """Return float64 numbers rounded to float32, still as float64: there the subnormal ones are not flushed."""
    return torch.where(x.abs() < NORMAL, (x + SUBNORMAL_BITS) - SUBNORMAL_BITS, x.float().double())


def ordinals(x: Tensor) -> Tensor:
    """Return int32 numbers in the order of what ``rounded`` returned: the bits of float32, the larger the larger."""
    small = (x * 2.0**75).float() * 2.0**74  # whole numbers of 2^-149, in two factors that float32 has
    return torch.where(x.abs() < NORMAL, small.int(), order.ordinal(x.float()))


def weighed(spec: RouteSpec, scores: Tensor) -> Tensor:
    """Return float32 weights of selected scores as the reference does; a common factor of the scores changes no bit."""
    if not spec.renormalize:
        return reference._weighed(spec, scores.float())
    scores = (scores * LARGER).float()
    total = scores.sum(dim=1, keepdim=True)
    return torch.where(total == 0, 0.0, scores / (total + spec.denom_eps * LARGER) * spec.scale)


def chosen(spec: RouteSpec, choice: Tensor) -> Tensor:
    """Return the top-k ids, by descending score or ascending where asked; the smaller id first among equals."""
    best = descending(ordinals(choice))
    if spec.groups > 1:
        # A stable second sort: what lies outside the chosen groups ranks below even −inf.
        rank = torch.where(reachable(spec, choice), 1, 0).gather(1, best)
        best = best.gather(1, descending(rank))
    ids = best[:, : spec.topk]
    return ids.sort(dim=1).values if spec.ordered else ids


def descending(x: Tensor) -> Tensor:
    """Return the order of each row's numbers, the largest first, the earlier first among equals."""
    return torch.sort(x, dim=1, descending=True, stable=True).indices


def reachable(spec: RouteSpec, choice: Tensor) -> Tensor:
    """Return ``[T, E]`` bool: experts in the ``topk_groups`` groups with the largest sum of two scores."""
    size = spec.num_experts // spec.groups
    grouped = choice.reshape(-1, spec.groups, size)
    first = torch.sort(ordinals(grouped), dim=-1, descending=True).indices[..., : min(2, size)]
    best = rounded(grouped.gather(-1, first).sum(dim=-1))
    best = torch.where(torch.isnan(best), -torch.inf, best)  # +inf and −inf in one group
    place = descending(ordinals(best))[:, : spec.topk_groups]
    group = torch.arange(spec.groups, device=choice.device)
    taken = (place[:, :, None] == group).any(dim=1)
    return taken[:, :, None].expand(-1, -1, size).reshape(choice.shape)


def moe_experts(spec: MoESpec, given: Given) -> tuple[Tensor]:
    """Return this rank's partial sum ``[T, hidden]`` float32."""
    local = reference.local_experts(spec, given["topk_ids"], given.get("expert_map"))
    size = expert_grid.size_of(spec, local.shape[0])
    tiles = experts.cut(spec, local, given["topk_weights"], size)
    return (experts.run(spec, given["x"].float(), tiles, given["weights"]),)
