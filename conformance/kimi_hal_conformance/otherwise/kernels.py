"""The replaced functions of the reference, by module, and the builders over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kimi_hal import formats
from kimi_hal.ops.indexer import IndexerSpec
from kimi_hal.ops.moe import MoESpec, RouteSpec
from kimi_hal.ops.sparse_mla import MergeSpec, SparseMLASpec
from kimi_hal.reference import indexer, moe, sparse_mla
from kimi_hal_conformance.classes import chunked
from kimi_hal_conformance.mutants.clone import OPERATOR_PARTS, Clone
from kimi_hal_conformance.otherwise import sums

#: Keys that attention takes at once.
BLOCK = 13


def bf16(x: Tensor) -> Tensor:
    """Round to bfloat16."""
    return x.to(torch.bfloat16).to(x.dtype)


def attend(narrow: Callable[[Tensor], Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return attention over blocks of keys from the last to the first, with a running maximum."""

    def attend_row(
        spec: SparseMLASpec,
        q: Tensor,
        scale: float | Tensor,
        cache: Tensor,
        slots: Tensor,
        k_scale: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        chosen = slots[slots >= 0].flip(0)
        top = q.new_full((spec.num_heads,), -torch.inf)
        total, out = torch.zeros_like(top), q.new_zeros((spec.num_heads, spec.kv_rank))
        for start in range(0, chosen.shape[0], BLOCK):
            some = chosen[start : start + BLOCK]
            keys = formats.latent(spec.latent).read(cache, spec.page, some, k_scale, dtype=q.dtype)
            logits = sums.dot(q * scale, keys)
            new_top = torch.maximum(top, logits.amax(dim=1))
            base = sparse_mla.finite_base(new_top)
            weights, kept = sums.exp(logits - base[:, None]), sums.exp(top - base)
            total = sums.fused(sums.one_by_one(weights, 1), total, kept)
            out = sums.fused(narrow(weights) @ keys[:, : spec.kv_rank], out, kept[:, None])
            top = new_top
        return out * (1 / sparse_mla.denominator(total))[:, None], sparse_mla.log_sum(top, total)

    return attend_row


def merge_attn_states(
    spec: MergeSpec, outs: Tensor, lses: Tensor, *, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Combine parts from the last to the first, each weighted by its share."""
    clean = lses.to(dtype).masked_fill(~torch.isfinite(lses), -torch.inf)
    top = clean.amax(dim=0)
    total = sums.one_by_one(sums.exp(clean - sparse_mla.finite_base(top)), 0)
    lse = sparse_mla.log_sum(top, total)
    share = sums.exp(clean - sparse_mla.finite_base(top)) / sparse_mla.denominator(total)
    filled = outs.to(dtype).masked_fill((clean == -torch.inf)[..., None], 0.0)
    out = sums.one_by_one(share[..., None] * filled, 0)
    return out, lse if spec.return_lse else lse[:, :0]


def part_scores(
    spec: IndexerSpec,
    part: indexer.Part,
    q: Tensor,
    q_scale: Tensor,
    weights: Tensor,
    cache: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Score in float32, heads added one by one from the last."""
    fmt = formats.index(spec.index)
    query = fmt.decode_query(q.view(torch.uint8)[part.rows], q_scale[part.rows], torch.float32)
    weight = weights[part.rows].to(dtype)
    scores = weight.new_full((len(part.rows), max(part.counts)), -torch.inf)
    for i, count in enumerate(part.counts):
        keys, missing = indexer.read_keys(fmt, part.pages, 0, count, cache)
        dots = sums.dot(query[i], keys[:count].float()).to(dtype)
        total = scores.new_zeros(count)
        for head in range(spec.num_heads - 1, -1, -1):
            total = sums.fused(total, dots[head].relu(), weight[i, head])
        scores[i, :count] = total.masked_fill(missing[:count], -torch.inf)
    return scores


def hadamard(x: Tensor) -> Tensor:
    """Turn by the Hadamard matrix as one product."""
    size = x.shape[-1]
    matrix = x.new_ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return sums.dot((x * float(size**-0.5)).reshape(-1, size), matrix).view(x.shape)


def read(states: Tensor, x: Tensor) -> Tensor:
    """Return Sᵀ x as one product: states ``[n, H, K, V]``, x ``[n, H, K]``."""
    return torch.einsum("nhkv,nhk->nhv", states, x)


def write(states: Tensor, k: Tensor, u: Tensor) -> None:
    """Add k uᵀ with contracted multiply-adds."""
    states.copy_(sums.fused(states, k[..., None], u[..., None, :]))


def tree_sum(x: Tensor, dim: int) -> Tensor:
    """Add one by one."""
    return sums.one_by_one(x, dim)


def expert(spec: MoESpec, x: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """Run an expert with other orders of summation, gate, up and activation rounded to bfloat16."""
    gate, up = bf16(sums.dot(x, w13)).chunk(2, dim=-1)
    return sums.dot(bf16(moe.activate(spec, gate, up)), w2)


def weighed(spec: RouteSpec, scores: Tensor) -> Tensor:
    """Weigh by a sum in another order, its reciprocal multiplied."""
    if not spec.renormalize:
        return scores * spec.scale
    total = sums.one_by_one(scores, -1)[..., None]
    return torch.where(total == 0, 0.0, scores * (spec.scale / (total + spec.denom_eps)))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide by the root instead of multiplying with its reciprocal."""
    mean = sums.one_by_one(x.square(), -1)[..., None] / x.shape[-1]
    return x / torch.sqrt(mean + eps) * weight.to(x.dtype)


REPLACED: Mapping[str, Mapping[str, Any]] = {
    "sparse_mla": {"merge_attn_states": merge_attn_states},
    "indexer": {"part_scores": part_scores, "hadamard": hadamard},
    "recurrence": {
        "read": read,
        "write": write,
        "sigmoid": sums.sigmoid,
        "softplus": sums.softplus,
        "l2_normalized": sums.l2_normalized,
    },
    "convolution": {"silu": sums.silu},
    "kda": {"sigmoid": sums.sigmoid, "tree_sum": tree_sum, "kda_prefill": chunked.kda_prefill},
    "moe": {"_expert": expert, "_weighed": weighed},
    "composites": {"rms_norm": rms_norm},
}
#: How probabilities are rounded, by variant.
NARROW: Mapping[str, Callable[[Tensor], Tensor]] = {"float32": lambda p: p, "p16": bf16}


@cache
def modules(variant: str) -> Callable[[str], ModuleType]:
    """Return the modules of the private copy, replaced functions in it."""
    clone = Clone(f"kimi_hal_otherwise_{variant}", OPERATOR_PARTS)
    for name, functions in REPLACED.items():
        vars(clone.module(f"reference.{name}")).update(functions)
    clone.module("reference.sparse_mla").__dict__["_attend"] = attend(NARROW[variant])
    return clone.module


def build_float32(ctx: Any) -> Callable[..., Any]:
    """Build an operator in float32."""
    return _build("float32", ctx)


def build_p16(ctx: Any) -> Callable[..., Any]:
    """Build an operator with bfloat16 probabilities."""
    return _build("p16", ctx)


def _build(variant: str, ctx: Any) -> Callable[..., Any]:
    run: Callable[..., Any] = modules(variant)("reference.backend").build(ctx)
    return run


def weights(ctx: Any, **checkpoint: Any) -> Sequence[Tensor]:
    """Return what the reference makes of a checkpoint."""
    found: Sequence[Tensor] = modules("float32")("reference.weights").weights(ctx, **checkpoint)
    return found
