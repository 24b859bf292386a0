"""Mixture of experts in plain torch: the meaning of ``ops/moe.py``, in float32 or float64."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kimi_hal import formats
from kimi_hal.errors import ContractError
from kimi_hal.ops.moe import MoESpec, RouteSpec, expert_shapes
from kimi_hal.reference.weights import FORMAT

#: Router scores held at once, in elements: 32 Mi doubles and their sorted copies stay under 1 GiB.
SCORES_AT_ONCE = 1 << 25
#: Rows of one expert computed at once: 8,192 x 6,144 doubles of gate and up are 0.4 GB.
ROWS_AT_ONCE = 1 << 13


def moe_route(
    spec: RouteSpec,
    logits: Tensor,
    bias: Tensor,
    num_tokens: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Choose and weigh the experts of every row; returns weights in ``dtype`` and int32 ids.

    The ids don't depend on ``dtype``: scores are rounded once to float32 and selected as such.
    """
    rows = logits.shape[0]
    weights = logits.new_zeros((rows, spec.topk), dtype=dtype)
    ids = torch.full((rows, spec.topk), -1, dtype=torch.int32, device=logits.device)
    live = rows if num_tokens is None else min(max(int(num_tokens[0]), 0), rows)
    step = max(1, SCORES_AT_ONCE // spec.num_experts)
    for start in range(0, live, step):
        part = slice(start, min(start + step, live))
        weights[part], ids[part] = _route(spec, logits[part], bias, dtype)
    return weights, ids


def _route(spec: RouteSpec, logits: Tensor, bias: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    # From float64, since float32 sigmoids differ in the last bit between lanes and would break ties.
    score = torch.sigmoid(logits.double()).float()
    choice = score + bias
    missing = choice.isnan()
    choice = choice.masked_fill(missing, -torch.inf)
    ids = _chosen(spec, choice)
    if spec.ordered:
        ids = ids.sort(dim=-1).values
    weights = score.masked_fill(missing, 0.0).gather(-1, ids).to(dtype)
    return _weighed(spec, weights), ids.int()


def _chosen(spec: RouteSpec, choice: Tensor) -> Tensor:
    """Return the top-k ids by descending score, the smaller id first among equals."""
    order = choice.sort(dim=-1, descending=True, stable=True).indices
    if spec.groups > 1:
        # A stable second key: what lies outside the chosen groups ranks below even −inf.
        outside = ~_reachable(spec, choice).gather(-1, order)
        order = order.gather(-1, outside.sort(dim=-1, stable=True).indices)
    return order[:, : spec.topk]


def _reachable(spec: RouteSpec, choice: Tensor) -> Tensor:
    """Return ``[T, E]`` bool: experts in the ``topk_groups`` groups with the largest sum of two scores."""
    size = spec.num_experts // spec.groups
    grouped = choice.view(-1, spec.groups, size)
    best = grouped.topk(min(2, size), dim=-1).values.sum(dim=-1)
    best = best.masked_fill(best.isnan(), -torch.inf)  # +inf and −inf in one group
    order = best.sort(dim=-1, descending=True, stable=True).indices[:, : spec.topk_groups]
    chosen = torch.zeros_like(best, dtype=torch.bool).scatter(-1, order, True)
    return chosen.repeat_interleave(size, dim=-1)


def _weighed(spec: RouteSpec, scores: Tensor) -> Tensor:
    if not spec.renormalize:
        return scores * spec.scale
    total = scores.sum(dim=-1, keepdim=True)
    return torch.where(total == 0, 0.0, scores / (total + spec.denom_eps) * spec.scale)


def prepare_moe_weights(
    spec: MoESpec,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    donate: bool = False,
    *,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Return the checkpoint's own bytes; copies unless they are donated. ``dtype`` has no effect."""
    tensors = [w13, w13_scale, w2, w2_scale]
    return tensors if donate else [t.clone(memory_format=torch.contiguous_format) for t in tensors]


def moe_experts(
    spec: MoESpec,
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    weights: list[Tensor],
    expert_map: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Add the weighted results of the local experts in ascending local index; returns y in ``dtype``.

    One expert's weights are decoded at a time, and only an expert that has rows is decoded.
    """
    _require_plain(spec, weights)
    y = x.new_zeros(x.shape, dtype=dtype)
    for expert, routes in _routes(spec, topk_ids, expert_map):
        matrices = _decoded(spec, weights, expert, dtype)
        for part in torch.split(routes, ROWS_AT_ONCE):
            rows = part // topk_ids.shape[1]
            factor = topk_weights.reshape(-1)[part].to(dtype)
            result = _expert(spec, x[rows].to(dtype), *matrices)
            # Not index_add_: on some devices it adds the repeats of a row in any order.
            y.index_put_((rows,), result * factor[:, None], accumulate=True)
    return y


def local_experts(spec: MoESpec, topk_ids: Tensor, expert_map: Tensor | None) -> Tensor:
    """Return each route's local expert index (int64), or −1 where this rank contributes nothing."""
    ids = topk_ids.long()
    real = (ids >= 0) & (ids < spec.num_experts)
    local = ids - spec.expert_offset if expert_map is None else expert_map.long()[torch.where(real, ids, 0)]
    return torch.where(real & (local >= 0) & (local < spec.num_local), local, -1)


def _routes(spec: MoESpec, topk_ids: Tensor, expert_map: Tensor | None) -> Iterator[tuple[int, Tensor]]:
    """Yield each local expert that has tokens, ascending, with its routes ``row · k + column``, ascending."""
    local = local_experts(spec, topk_ids, expert_map).reshape(-1)
    order = local.argsort(stable=True)
    counts = torch.bincount(local + 1, minlength=spec.num_local + 1).tolist()
    for expert, routes in enumerate(torch.split(order, counts), start=-1):
        if expert >= 0 and len(routes):
            yield expert, routes


def _decoded(spec: MoESpec, weights: list[Tensor], expert: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    fmt = formats.experts(spec.weights)
    w13, w13_scale, w2, w2_scale = (t[expert] for t in weights)
    return fmt.decode(w13, w13_scale, dtype), fmt.decode(w2, w2_scale, dtype)


def _expert(spec: MoESpec, x: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    gate, up = (x @ w13.T).chunk(2, dim=-1)
    return activate(spec, gate, up) @ w2.T


def activate(spec: MoESpec, gate: Tensor, up: Tensor) -> Tensor:
    """Return SiTU or SwiGLU of a gate and an up projection, in their dtype."""
    if spec.activation == "swiglu":
        return torch.nn.functional.silu(gate) * up
    gate = spec.beta * torch.tanh(gate / spec.beta) * torch.sigmoid(gate)
    if spec.linear_beta is None or spec.linear_beta <= 0:
        return gate * up
    return gate * (spec.linear_beta * torch.tanh(up / spec.linear_beta))


def _require_plain(spec: MoESpec, weights: list[Tensor]) -> None:
    """Refuse a list that another implementation prepared, or that another Spec was given for."""
    wanted = expert_shapes(spec)
    found = [list(t.shape) for t in weights]
    if found != wanted or any(t.dtype != torch.uint8 for t in weights):
        given = ", ".join(f"{t.dtype} {list(t.shape)}".removeprefix("torch.") for t in weights) or "nothing"
        reason = (
            "weights must be the list that prepare_moe_weights of this implementation returned for this Spec "
            f"({FORMAT}: uint8 {', uint8 '.join(map(str, wanted))}), got {given}"
        )
        raise ContractError("moe_experts", [reason])
