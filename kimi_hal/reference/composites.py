"""The bodies of the composites, in plain torch over parts that the caller brings, and their reference.

A body is written once. The reference gives it the reference's own operators in one dtype, unrounded; the
automatic implementation of a backend gives it that backend's planned operators (``dispatch/composed.py``).
``more`` holds keyword operands by part: step, workspace and output buffers, where there are any.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kimi_hal.errors import GroupError
from kimi_hal.ops.composites import DSASpec, MoELayerSpec, part_specs
from kimi_hal.ops.kda import KDASpec
from kimi_hal.ops.operator import get
from kimi_hal.parallel.exchange import exchange_heads, gather_heads, sum_in_rank_order
from kimi_hal.parallel.groups import Group, require
from kimi_hal.reference.backend import function
from kimi_hal.reference.kda import gated_rms_norm
from kimi_hal.reference.moe import activate
from kimi_hal.reference.sparse_mla import spans

Parts = Mapping[str, Callable[..., Any]]
More = Mapping[str, Mapping[str, Any]]
NO_MORE: More = {}

#: Rows computed at once: 128 gathered heads of 512 doubles are 0.5 GB for 1,024 rows.
ATTENTION_ROWS = 1 << 10
#: Rows computed at once: 36,864 channels are 0.3 GB in float64 for 1,024 rows.
KDA_ROWS = 1 << 10
#: Rows computed at once: gate and up of the shared experts are 0.8 GB in float64 for 8,192 rows.
MOE_ROWS = 1 << 13


def reference_parts(
    composite: str, spec: Any, dtype: torch.dtype = torch.float32, group: Group | None = None
) -> Parts:
    """Return the reference's function of every part of a composite, with Spec, dtype and group bound."""
    found = {}
    for name, part in part_specs(composite, spec).items():
        op = get(part.operator)
        context = {"group": group} if op.grouped else {}
        found[name] = partial(function(op), part.spec, dtype=dtype, **context)
    return found


# --- dsa_decode -----------------------------------------------------------------------------------------


def compose_dsa_decode(spec: DSASpec, parts: Parts, group: Group | None = None) -> Callable[..., Any]:
    """Return ``body(<operands of dsa_decode>, more) -> (out, lse)`` over the given parts.

    Args:
        spec: the composite's Spec.
        parts: a function for each of ``part_specs("dsa_decode", spec)``, called without ``out`` unless
            ``more`` names one.
        group: required where ``spec.dcp.world`` is above 1.
    """

    def body(
        q: Tensor,
        index_q: Tensor,
        index_w: Tensor,
        latent_cache: Tensor,
        index_cache: Tensor,
        latent_table: Tensor,
        index_table: Tensor,
        row_req: Tensor,
        row_len: Tensor,
        k_scale: Tensor | None = None,
        q_scale: Tensor | None = None,
        *,
        more: More = NO_MORE,
    ) -> tuple[Tensor, Tensor]:
        def call(name: str, *operands: Any) -> Any:
            return parts[name](*operands, **more.get(name, {}))

        quantised = call("quantize_index_query", index_q, index_w)
        indices, scores = call("indexer_topk", *quantised, index_cache, index_table, row_req, row_len)
        count = None
        if spec.sharded_index:
            indices, count, _ = call("topk_merge", scores, indices, row_len)
        if group is not None:
            q = gather_heads(group, q)
        operands = (q, latent_cache, indices, k_scale, q_scale, count, latent_table, row_req)
        out, lse = call("sparse_mla", *operands)
        if group is None:
            return out, lse
        out, lse = call("merge_attn_states", *exchange_heads(group, out, lse, spec.head_exchange))
        return out, lse

    return body


def dsa_decode(
    spec: DSASpec,
    q: Tensor,
    index_q: Tensor,
    index_w: Tensor,
    latent_cache: Tensor,
    index_cache: Tensor,
    latent_table: Tensor,
    index_table: Tensor,
    row_req: Tensor,
    row_len: Tensor,
    k_scale: Tensor | None = None,
    q_scale: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    group: Group | None = None,
) -> tuple[Tensor, Tensor]:
    """Select and attend, some rows at a time; returns out and lse in ``dtype``."""
    group = require(group, spec.dcp) if spec.dcp.world > 1 else None
    body = compose_dsa_decode(spec, reference_parts("dsa_decode", spec, dtype, group), group)
    out = q.new_empty((q.shape[0], spec.heads, spec.attn.kv_rank), dtype=dtype)
    lse = q.new_empty((q.shape[0], spec.dims()["L"]), dtype=dtype)
    caches = (latent_cache, index_cache, latent_table, index_table)
    for part in spans(q.shape[0], ATTENTION_ROWS):
        rows = (row_req[part], row_len[part])
        out[part], lse[part] = body(q[part], index_q[part], index_w[part], *caches, *rows, k_scale, q_scale)
    return out, lse


# --- kda_layer_decode -----------------------------------------------------------------------------------


def compose_kda_layer_decode(spec: KDASpec, parts: Parts, dtype: torch.dtype) -> Callable[..., Any]:
    """Return ``body(<operands of kda_layer_decode>, more) -> o`` over the given parts.

    The norm is computed in ``dtype``, and o is in it. ``weights`` is conv, A_log, dt_bias, norm, without the
    two in the middle under ``gate="log"``.
    """

    def body(
        x: Tensor,
        raw_g: Tensor,
        raw_beta: Tensor,
        out_gate: Tensor,
        weights: list[Tensor],
        conv_state: Tensor,
        state: Tensor,
        state_ids: Tensor,
        *,
        more: More = NO_MORE,
    ) -> Tensor:
        conv, *gate, norm = weights
        rows = x.shape[0]
        cuts = torch.arange(rows + 1, dtype=torch.int32, device=x.device)
        y = parts["kda_conv"](x, conv, conv_state, state_ids, cuts, **more.get("kda_conv", {}))
        # The convolution's output is bf16 whoever computes it: states must not depend on who did.
        q, k, v = y.bfloat16().view(rows, 3, spec.num_heads, spec.head_dim).unbind(1)
        a_log, dt_bias = gate or (None, None)
        o = parts["kda_decode"](
            q, k, v, raw_g, raw_beta, a_log, dt_bias, state, state_ids, **more.get("kda_decode", {})
        )
        live = (state_ids >= 0) & (state_ids < state.shape[0])
        # A padded row is 0 whatever its gate holds, and 0 · NaN is not.
        return gated_rms_norm(o, norm, out_gate, spec.norm_eps, dtype).masked_fill(~live[:, None, None], 0.0)

    return body


def kda_layer_decode(
    spec: KDASpec,
    x: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    out_gate: Tensor,
    weights: list[Tensor],
    conv_state: Tensor,
    state: Tensor,
    state_ids: Tensor,
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Run one token of every row, some rows at a time; returns o in ``dtype``."""
    body = compose_kda_layer_decode(spec, reference_parts("kda_layer_decode", spec, dtype), dtype)
    o = x.new_empty((x.shape[0], spec.num_heads, spec.head_dim), dtype=dtype)
    for part in spans(x.shape[0], KDA_ROWS):
        rows = (x[part], raw_g[part], raw_beta[part], out_gate[part])
        o[part] = body(*rows, weights, conv_state, state, state_ids[part])
    return o


# --- moe_layer ------------------------------------------------------------------------------------------


def compose_moe_layer(
    spec: MoELayerSpec,
    parts: Parts,
    group: Group | None = None,
    *,
    wide: torch.dtype = torch.float32,
    narrow: torch.dtype = torch.float32,
) -> Callable[..., Any]:
    """Return ``body(x, weights, num_tokens, more) -> y`` over the given parts; y is in ``wide``.

    Args:
        spec: the composite's Spec.
        parts: functions for ``moe_route`` and ``moe_experts``.
        group: required where ``spec.tp`` is above 1.
        wide: of the router, of the norm, of activations and of sums.
        narrow: of the operands of the other matrix products.
    """

    def project(x: Tensor, weight: Tensor) -> Tensor:
        return x.to(narrow) @ weight.to(narrow).T

    def whole(x: Tensor) -> Tensor:
        return x.to(wide) if group is None else sum_in_rank_order(group, x.to(wide))

    def body(
        x: Tensor, weights: list[Tensor], num_tokens: Tensor | None = None, *, more: More = NO_MORE
    ) -> Tensor:
        gate, bias, down, up, norm, shared_w13, shared_w2, *experts = weights
        logits = x.to(wide) @ gate.to(wide).T
        routes = parts["moe_route"](logits, bias, num_tokens, **more.get("moe_route", {}))
        z = project(x, down)
        y = whole(parts["moe_experts"](z, *routes, experts, **more.get("moe_experts", {})))
        first, second = project(x, shared_w13).to(wide).chunk(2, dim=-1)
        shared = whole(project(activate(spec.experts, first, second), shared_w2))
        result = project(rms_norm(y, norm, spec.norm_eps), up).to(wide) + shared
        return result if num_tokens is None else padded(result, num_tokens)

    return body


def sharers(spec: MoELayerSpec, group: Group | None) -> Group | None:
    """Return the group that adds up partial sums: none for one rank.

    Raises:
        GroupError: ``spec.tp`` is above 1 and the group is missing, or has another size.
    """
    if spec.tp == 1:
        return None
    if group is None:
        raise GroupError(f"tp={spec.tp} needs a group: hal.plan(…, group=TorchGroup(process_group))")
    if group.size() != spec.tp:
        raise GroupError(f"the Spec is for tp={spec.tp}, the group has {group.size()} ranks")
    return group


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``x · rsqrt(mean(x²) + eps) · weight`` over the last dimension, in x's dtype."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight.to(x.dtype)


def padded(y: Tensor, num_tokens: Tensor) -> Tensor:
    """Return ``y [T, …]`` with zeros from row ``num_tokens[0]`` on, whatever stands there."""
    row = torch.arange(y.shape[0], device=y.device)
    return y.masked_fill((row >= num_tokens)[:, None], 0.0)


def moe_layer(
    spec: MoELayerSpec,
    x: Tensor,
    weights: list[Tensor],
    num_tokens: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    group: Group | None = None,
) -> Tensor:
    """Run the layer some rows at a time; returns y in ``dtype``, with nothing rounded inside."""
    group = sharers(spec, group)
    parts = reference_parts("moe_layer", spec, dtype)
    body = compose_moe_layer(spec, parts, group, wide=dtype, narrow=dtype)
    y = x.new_empty(x.shape, dtype=dtype)
    for part in spans(x.shape[0], MOE_ROWS):
        y[part] = body(x[part], weights, None if num_tokens is None else num_tokens - part.start)
    return y
