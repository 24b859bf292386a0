"""One decode step of K3.1's layers as each device of a slice runs it, under ``shard_map`` and ``layout.py``.

The products are plain XLA: these programs are there for what devices exchange, and say the layers' mathematics without
the parts that no layout touches (residuals, input norms). Selection and merge are given: XLA's own anywhere, or the
kernels of a TPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from kimi_hal.ops import spec
from kimi_hal.ops.topk_merge import TopKMergeSpec
from kimi_hal_tpu.layout import DCP, GROUP, TP, Layout
from kimi_hal_tpu.pallas import aot, merge, selection
from kimi_hal_tpu.pallas.mode import Array, Mode
from kimi_hal_tpu.pallas.ring import Ring
from kimi_hal_tpu.pallas.selection import SIGN

Given = Mapping[str, Array]
#: Values of the codes of MXFP4.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True)
class Parts:
    """What selects, and what merges selections.

    Args:
        select: scores ``[T, L]``, keys of each row ``[T]``, k -> positions ``[T, k]``, −1 where there is none.
        merge: candidates ``[2, T, k]`` as ``merge.candidates`` gives them, ranks, k -> own winners' global positions
            in the candidates' places, −1 elsewhere.
    """

    select: Callable[[Array, Array, int], Array]
    merge: Callable[[Array, int, int], Array]


def xla_select(scores: Array, count: Array, k: int) -> Array:
    """Select by XLA's own top-k, whose smaller position wins a tie."""
    live = jnp.arange(scores.shape[1]) < count[:, None]
    best, index = jax.lax.top_k(jnp.where(live, scores, -jnp.inf), min(k, scores.shape[1]))
    index = jnp.where((best > -jnp.inf) & (index < count[:, None]), index, -1)
    return jnp.pad(index.astype(jnp.int32), ((0, 0), (0, k - index.shape[1])), constant_values=-1)


def xla_merge(planes: Array, world: int, k: int) -> Array:
    """Merge by an all-gather of candidates, then bisection of score and position."""
    del world
    everyone = jax.lax.all_gather(planes, DCP)
    order, position = everyone[:, 0], everyone[:, 1]
    zero = jnp.zeros((order.shape[1], 1), jnp.int32)

    def count(mask: Array) -> Array:
        return jnp.sum(mask.astype(jnp.int32), axis=(0, 2))[:, None]

    wanted = jnp.minimum(count(position >= 0), k)
    cut = merge.bits(31, 32, zero, lambda c: count(order >= c ^ SIGN) >= wanted) ^ SIGN
    ties = wanted - count(order > cut)
    bound = merge.bits(30, 31, zero, lambda b: count((order == cut) & (position < b)) < ties)
    won = (planes[0] > cut) | ((planes[0] == cut) & (planes[1] <= bound))
    return jnp.where((planes[1] >= 0) & won, planes[1], -1)


XLA = Parts(xla_select, xla_merge)


def kernels(*, ring: bool) -> Parts:
    """Return the parts of a TPU: selection on SparseCore, and the merge around a ring or by XLA's all-gather."""
    mode = Mode()

    def select(scores: Array, count: Array, k: int) -> Array:
        return selection.select(scores, jnp.zeros_like(count), count, k, mode)

    def around(planes: Array, world: int, k: int) -> Array:
        ranks = TopKMergeSpec(dcp=spec.DCP(world=world), topk=k, return_global=False)
        return merge.merge(Ring(DCP, world), planes, ranks, mode)[0]

    return Parts(select, around if ring else xla_merge)


def program(
    layer: str, layout: Layout, mesh: Mesh, parts: Parts = XLA
) -> Callable[[Given], dict[str, Array]]:
    """Return one layer's step over whole operands by name; ``layout.results`` says what it returns.

    Args:
        layer: ``"kda"``, ``"dsa"`` or ``"moe"``.
        layout: of the slice.
        mesh: of ``layout.sizes``.
        parts: of ``"dsa"``.
    """
    steps: dict[str, Callable[..., dict[str, Array]]] = {
        "kda": kda,
        "dsa": partial(dsa, parts=parts),
        "moe": moe,
    }
    given = {name: operand.spec for name, operand in layout.operands(layer).items()}
    sharded: Callable[[Given], dict[str, Array]] = jax.shard_map(
        partial(steps[layer], layout),
        mesh=mesh,
        in_specs=(given,),
        out_specs=layout.results(layer),
        check_vma=False,
    )
    return sharded


def kda(layout: Layout, a: Given) -> dict[str, Array]:
    """Advance the own heads' states by one token; sum the output projection over all devices."""
    m, ids = layout.model, a["state_ids"]
    projected = jnp.einsum("tm,mhcd->thcd", a["x"], a["qkv"])
    taken, raw_gate, out_gate = projected[:, :, :3], projected[:, :, 3], projected[:, :, 4]
    window = jnp.concatenate((a["conv_state"][ids], taken[:, :, None]), axis=2)
    mixed = jnp.sum(window.astype(jnp.float32) * jnp.swapaxes(a["conv"], 0, 1).astype(jnp.float32), axis=2)
    q, k, v = (jax.nn.silu(mixed[:, :, i]) for i in range(3))
    q, k = _unit(q) * m.kda_dim**-0.5, _unit(k)
    rate = jnp.exp(a["A_log"])[:, None]
    decay = jnp.exp(m.gate_lower_bound * jax.nn.sigmoid(rate * (raw_gate.astype(jnp.float32) + a["dt_bias"])))
    beta = jax.nn.sigmoid((a["x"] @ a["beta"]).astype(jnp.float32))[..., None]
    state = a["state"][ids] * decay[:, :, None]  # [T, H, V, K]
    u = beta * (v - jnp.einsum("thvk,thk->thv", state, k))
    state = state + u[..., None] * k[:, :, None]
    o = _normed(jnp.einsum("thvk,thk->thv", state, q), m.norm_eps) * a["norm"]
    o = (o * jax.nn.sigmoid(out_gate.astype(jnp.float32))).astype(jnp.bfloat16)
    return {
        "y": _summed(jnp.einsum("thd,hdm->tm", o, a["out"], preferred_element_type=jnp.float32)),
        "conv_state": a["conv_state"].at[ids].set(window[:, :, 1:]),
        "state": a["state"].at[ids].set(state),
    }


def dsa(layout: Layout, a: Given, parts: Parts) -> dict[str, Array]:
    """Store a token, select over the context of all devices, attend to the own winners, and merge what comes back."""
    caches = _stored(layout, a)
    mine = winners(layout, {**a, **caches}, parts)
    own = jnp.einsum("tm,mhd->thd", a["x"], a["q"])
    heads = jax.lax.all_gather(own, DCP, axis=1, tiled=True)
    out, lse = _attended(layout, heads, caches["latents"][_slots(layout, a["block_table"], mine)], mine)
    received = jax.lax.all_to_all(_by_owner(out, layout), DCP, 0, 0)  # [parts, T, own heads, 512]
    lses = jax.lax.all_to_all(_by_owner(lse, layout), DCP, 0, 0)
    share = jnp.exp(lses - jax.nn.logsumexp(lses, axis=0))
    share = jnp.where(jnp.isneginf(lses), 0.0, share)  # no winner here, or none at all
    merged = jnp.sum(received.astype(jnp.float32) * share[..., None], axis=0).astype(jnp.bfloat16)
    value = jnp.einsum("thc,hcv->thv", merged, a["value"])
    y = jnp.einsum("thv,hvm->tm", value, a["out"], preferred_element_type=jnp.float32)
    return {"y": _summed(y)} | caches


def _stored(layout: Layout, a: Given) -> dict[str, Array]:
    """Return the caches with each row's new token on the device that owns its position."""
    run, rank = layout.dcp * layout.interleave, jax.lax.axis_index(DCP)
    position = a["row_len"] - 1
    here = (position >= 0) & (position // layout.interleave % layout.dcp == rank)
    local = position // run * layout.interleave + position % layout.interleave
    slot = _slots(layout, a["block_table"], jnp.where(here, local, -1)[:, None])[:, 0]
    slot = jnp.where(here, slot, layout.slots)  # beyond the last: written nowhere
    key = (a["x"] @ a["index_k"]).astype(jnp.float32)
    scale = jnp.maximum(jnp.max(jnp.abs(key), axis=1), 1e-4) / 448.0
    fp8 = jnp.float8_e4m3fn
    return {
        "latents": a["latents"].at[slot].set((a["x"] @ a["kv"]).astype(fp8), mode="drop"),
        "index": a["index"].at[slot].set((key / scale[:, None]).astype(fp8), mode="drop"),
        "index_scale": a["index_scale"].at[slot].set(scale, mode="drop"),
    }


def winners(layout: Layout, a: Given, parts: Parts = XLA) -> Array:
    """Return this device's winners of every row as local positions ``[T, k]``, −1 elsewhere."""
    m, ours = layout.model, layout.rows // layout.groups
    first = jax.lax.axis_index(GROUP) * ours
    x, length, table = (
        jax.lax.dynamic_slice_in_dim(a[n], first, ours) for n in ("x", "row_len", "block_table")
    )
    rank, owned = jax.lax.axis_index(DCP), spec.DCP(world=layout.dcp, interleave=layout.interleave)
    count = merge.local_length(length, owned, rank)
    held = layout.context // layout.dcp
    every = jnp.broadcast_to(jnp.arange(held, dtype=jnp.int32), (ours, held))
    slot = _slots(layout, table, every)
    q = jnp.einsum("tm,mhd->thd", x, a["index_q"]).astype(jnp.float8_e4m3fn).astype(jnp.bfloat16)
    dots = jnp.einsum(
        "thd,tld->thl", q, a["index"][slot].astype(jnp.bfloat16), preferred_element_type=jnp.float32
    )
    weights = (x @ a["index_w"]).astype(jnp.float32)
    scores = jnp.sum(jax.nn.relu(dots) * weights[..., None], axis=1) * a["index_scale"][slot]
    index = parts.select(scores, count, m.topk)
    chosen = jnp.take_along_axis(scores, jnp.maximum(index, 0), axis=1)
    planes = merge.candidates(chosen, index, owned, rank)
    won = parts.merge(planes, layout.dcp, m.topk)[:ours, : m.topk]
    return jax.lax.all_gather(jnp.where(won >= 0, index, -1), GROUP, axis=0, tiled=True)


def _slots(layout: Layout, table: Array, position: Array) -> Array:
    """Return the slots of local positions ``[T, n]``; those of −1 are some slot."""
    at = jnp.maximum(position, 0)
    page = jnp.take_along_axis(table, at // layout.page, axis=1)
    return page * layout.page + at % layout.page


def _attended(layout: Layout, heads: Array, latents: Array, mine: Array) -> tuple[Array, Array]:
    """Return attention of all heads of the group over the own winners, and its LSE; −inf where there is none."""
    m, live = layout.model, (mine >= 0)[:, None]
    keys = latents.astype(jnp.bfloat16)
    logits = jnp.einsum("thd,tkd->thk", heads, keys, preferred_element_type=jnp.float32) * m.softmax_scale
    logits = jnp.where(live, logits, -jnp.inf)
    lse = jax.nn.logsumexp(logits, axis=2)
    weights = jnp.where(live, jnp.exp(logits - jnp.where(jnp.isneginf(lse), 0.0, lse)[..., None]), 0.0)
    values = keys[..., : m.kv_rank]
    out = jnp.einsum("thk,tkc->thc", weights.astype(jnp.bfloat16), values, preferred_element_type=jnp.float32)
    return out.astype(jnp.bfloat16), lse


def _by_owner(x: Array, layout: Layout) -> Array:
    """Return ``[T, W·H, …]`` as ``[W, T, H, …]``: what goes to each device of the group."""
    return jnp.moveaxis(x.reshape(x.shape[0], layout.dcp, -1, *x.shape[2:]), 1, 0)


def moe(layout: Layout, a: Given) -> dict[str, Array]:
    """Run the own experts on all rows, give each device its columns of their sum, and project those back."""
    m, x = layout.model, a["x"]
    z = jax.lax.all_gather(x @ a["down"], TP, axis=1, tiled=True)
    weight = _routed(layout, x, a)
    y = jax.lax.psum_scatter(_experts(layout, z, weight, a), TP, scatter_dimension=1, tiled=True)
    squares = jax.lax.psum(jnp.sum(y * y, axis=1), TP)
    normed = y * jax.lax.rsqrt(squares / m.moe_hidden + m.norm_eps)[:, None] * a["norm"]
    shared = _situ(layout, x @ a["shared_w1"], x @ a["shared_w3"])
    wide = jnp.float32
    back = jnp.matmul(normed.astype(jnp.bfloat16), a["up"], preferred_element_type=wide)
    return {"y": _summed(back + jnp.matmul(shared, a["shared_w2"], preferred_element_type=wide))}


def _routed(layout: Layout, x: Array, a: Given) -> Array:
    """Return the weight of each of the own experts in each row, float32 ``[T, E / devices]``."""
    m = layout.model
    score = jax.nn.sigmoid(jnp.matmul(x.astype(jnp.float32), a["gate"], precision="highest"))
    _, ids = jax.lax.top_k(score + a["bias"], m.experts_per_token)
    chosen = jnp.take_along_axis(score, ids, axis=1)
    chosen = chosen / jnp.sum(chosen, axis=1, keepdims=True)
    own = m.experts // layout.tp
    expert = jax.lax.axis_index(TP) * own + jnp.arange(own)
    return jnp.sum(jnp.where(ids[:, :, None] == expert, chosen[:, :, None], 0.0), axis=1)


def _experts(layout: Layout, z: Array, weight: Array, a: Given) -> Array:
    """Return the weighted sum of the own experts over all rows, float32 ``[T, hidden of the experts]``."""

    def one(total: Array, each: tuple[Array, ...]) -> tuple[Array, None]:
        w13, s13, w2, s2, factor = each
        gate, up = jnp.split(z @ _mxfp4(w13, s13).T, 2, axis=1)
        result = jnp.matmul(_situ(layout, gate, up), _mxfp4(w2, s2).T, preferred_element_type=jnp.float32)
        return total + result * factor[:, None], None

    start = jnp.zeros(z.shape, jnp.float32)
    total: Array = jax.lax.scan(one, start, (a["w13"], a["w13_scale"], a["w2"], a["w2_scale"], weight.T))[0]
    return total


def _mxfp4(codes: Array, scale: Array) -> Array:
    """Return weights ``[n, m]`` of codes ``[n, m / 2]``, the low half first, and e8m0 scales of 32 each."""
    pair = jnp.stack((codes & 15, codes >> 4), axis=-1).reshape(codes.shape[0], -1)
    power = jnp.exp2(scale.astype(jnp.float32) - 127.0)
    values = jnp.asarray(E2M1, jnp.float32)[pair.astype(jnp.int32)]
    return (values * jnp.repeat(power, 32, axis=1)).astype(jnp.bfloat16)


def _situ(layout: Layout, gate: Array, up: Array) -> Array:
    beta, linear = layout.model.situ_beta, layout.model.situ_linear_beta
    g, u = gate.astype(jnp.float32), up.astype(jnp.float32)
    return (beta * jnp.tanh(g / beta) * jax.nn.sigmoid(g) * linear * jnp.tanh(u / linear)).astype(
        jnp.bfloat16
    )


def _summed(partial: Array) -> Array:
    """Return the sum over all devices in bfloat16: XLA sends no more where the next layer reads no more."""
    return jax.lax.psum(partial.astype(jnp.bfloat16), TP)


def _unit(x: Array) -> Array:
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def _normed(x: Array, eps: float) -> Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


def compiled(layer: str, layout: Layout, mesh: Mesh, parts: Parts) -> aot.Code:
    """Compile one layer's step for the devices of a mesh that are not here."""
    operands = layout.operands(layer)
    run, names = program(layer, layout, mesh, parts), list(operands)
    given = [(operand.shape, operand.dtype, operand.spec) for operand in operands.values()]
    return aot.compile_on(mesh, lambda *arrays: run(dict(zip(names, arrays, strict=True))), given)
