"""Portable Triton kernels of the kda family: the gate and the decode step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from kimi_hal.dispatch.contract import BuildContext

#: State elements that one program of the decode step holds: 32 values x 128 channels, 16 KiB.
STATE_TILE = 4096
NO_BOUND = 0.0
#: The smallest normal float32.
TINY = tl.constexpr(2.0**-126)


@triton.jit
def sigmoid(x):
    """Return the logistic function without overflow on either side."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0 / (1.0 + small), small / (1.0 + small))


@triton.jit
def times_exp(x, y, log_x):
    """Return x · exp(y) for x ≥ 0: through logarithms where a factor is beyond the normal numbers, else directly."""
    factor = tl.exp(y)
    direct = (x >= TINY) & (factor >= TINY) & (factor < float("inf"))
    return tl.where(direct, x * factor, tl.exp(y + log_x))


@triton.jit
def decay(raw, log_rate, LOWER_BOUND: tl.constexpr):
    """Return the natural-log decay of raw gates that already carry their bias; 0.0 means no lower bound."""
    if LOWER_BOUND != 0.0:
        size = tl.abs(raw)
        product = times_exp(size, log_rate, tl.log(size))
        return LOWER_BOUND * sigmoid(tl.where(raw < 0, -product, product))
    # softplus: log(1 + x) loses the digits of a small x, ln(1 + x) = 2 artanh(x / (2 + x)) does not
    small = tl.exp(-tl.abs(raw))
    z = small / (2.0 + small)
    artanh = z + z * z * z * (1 / 3 + z * z * (1 / 5 + z * z * (1 / 7)))
    log1p = tl.where(small < 0.25, 2.0 * artanh, tl.log(1.0 + small))
    softplus = tl.where(raw > 20.0, raw, tl.maximum(raw, 0.0) + log1p)
    return -times_exp(softplus, log_rate, tl.where(raw < -40.0, raw, tl.log(softplus)))


@triton.jit
def _gate(
    raw_g,
    raw_beta,
    A_log,
    dt_bias,
    g_out,
    beta_out,
    g_row,
    g_head,
    beta_row,
    g_out_row,
    g_out_head,
    beta_out_row,
    heads,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    LOWER_BOUND: tl.constexpr,
):
    """Finish the gate of one row and head."""
    program = tl.program_id(0)
    row = (program // heads).to(tl.int64)
    head = (program % heads).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    inside = channel < K
    raw = tl.load(raw_g + row * g_row + head * g_head + channel, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(dt_bias + head * K + channel, mask=inside, other=0.0)
    g = decay(raw + bias, tl.load(A_log + head), LOWER_BOUND)
    tl.store(g_out + row * g_out_row + head * g_out_head + channel, g, mask=inside)
    beta = tl.load(raw_beta + row * beta_row + head).to(tl.float32)
    tl.store(beta_out + row * beta_out_row + head, sigmoid(beta))


def build_kda_gate(ctx: BuildContext) -> Callable[..., Any]:
    """Make the run function of ``kda_gate``: one program a row and head."""
    spec, check = ctx.spec, ctx.check
    heads, channels = spec.num_heads, spec.head_dim
    block = triton.next_power_of_2(channels)
    bound = NO_BOUND if spec.lower_bound is None else spec.lower_bound

    def run(
        raw_g: Any, raw_beta: Any, A_log: Any, dt_bias: Any, *, g_out: Any = None, beta_out: Any = None
    ) -> Any:
        check(raw_g=raw_g, raw_beta=raw_beta, A_log=A_log, dt_bias=dt_bias, g_out=g_out, beta_out=beta_out)
        rows = raw_g.shape[0]
        if g_out is None:
            g_out = raw_g.new_empty((rows, heads, channels), dtype=torch.float32)
        if beta_out is None:
            beta_out = raw_g.new_empty((rows, heads), dtype=torch.float32)
        if rows:
            _gate[(rows * heads,)](
                raw_g,
                raw_beta,
                A_log,
                dt_bias,
                g_out,
                beta_out,
                *raw_g.stride()[:2],
                raw_beta.stride(0),
                *g_out.stride()[:2],
                beta_out.stride(0),
                heads,
                K=channels,
                BLOCK=block,
                LOWER_BOUND=bound,
            )
        return g_out, beta_out

    return run


@triton.jit
def unit(x, NORM: tl.constexpr):
    """Return x over its L2 norm, 1e-6 added to the sum of squares."""
    return x / tl.sqrt(tl.sum(x * x) + 1e-6) if NORM else x


@triton.jit
def _decode(
    q,
    k,
    v,
    gate,
    beta,
    A_log,
    dt_bias,
    state,
    state_ids,
    out,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    gate_row,
    gate_head,
    beta_row,
    state_slot,
    state_head,
    state_value,
    id_stride,
    out_row,
    out_head,
    slots,
    heads,
    scale,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    RAW_GATE: tl.constexpr,
    LOWER_BOUND: tl.constexpr,
    NORM: tl.constexpr,
):
    """Advance ``BLOCK_V`` value rows of one head's state by one token, and read them out."""
    program = tl.program_id(0)
    row = (program // heads).to(tl.int64)
    head = (program % heads).to(tl.int64)
    value = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    channel = tl.arange(0, BLOCK_K)
    inside_k, inside_v = channel < K, value < K
    out_at = out + row * out_row + head * out_head + value
    slot = tl.load(state_ids + row * id_stride).to(tl.int64)
    if (slot < 0) | (slot >= slots):
        tl.store(out_at, tl.zeros((BLOCK_V,), out.dtype.element_ty), mask=inside_v)
    else:
        qs = tl.load(q + row * q_row + head * q_head + channel, mask=inside_k, other=0.0).to(tl.float32)
        ks = tl.load(k + row * k_row + head * k_head + channel, mask=inside_k, other=0.0).to(tl.float32)
        vs = tl.load(v + row * v_row + head * v_head + value, mask=inside_v, other=0.0).to(tl.float32)
        g = tl.load(gate + row * gate_row + head * gate_head + channel, mask=inside_k, other=0.0).to(
            tl.float32
        )
        b = tl.load(beta + row * beta_row + head).to(tl.float32)
        if RAW_GATE:
            g += tl.load(dt_bias + head * K + channel, mask=inside_k, other=0.0)
            g = decay(g, tl.load(A_log + head), LOWER_BOUND)
            b = sigmoid(b)
        qs, ks = unit(qs, NORM) * scale, unit(ks, NORM)
        mask = inside_v[:, None] & inside_k[None, :]
        at = state + slot * state_slot + head * state_head + value[:, None] * state_value + channel[None, :]
        s = tl.load(at, mask=mask, other=0.0)
        # Several threads hold one element of a small tile: none may store it before all have read it.
        tl.debug_barrier()
        s *= tl.exp(g)[None, :]
        u = b * (vs - tl.sum(s * ks[None, :], axis=1))
        s += u[:, None] * ks[None, :]
        tl.store(at, s, mask=mask)
        tl.store(out_at, tl.sum(s * qs[None, :], axis=1).to(out.dtype.element_ty), mask=inside_v)


def build_kda_decode(ctx: BuildContext) -> Callable[..., Any]:
    """Make the run function of ``kda_decode``: one program a row, head and block of value rows."""
    spec, check = ctx.spec, ctx.check
    heads, channels, raw = spec.num_heads, spec.head_dim, spec.gate == "raw"
    block_k = triton.next_power_of_2(channels)
    block_v = min(block_k, max(1, STATE_TILE // block_k))
    bound = NO_BOUND if spec.lower_bound is None else spec.lower_bound
    blocks = triton.cdiv(channels, block_v)

    def run(
        q: Any,
        k: Any,
        v: Any,
        raw_g: Any,
        raw_beta: Any,
        A_log: Any,
        dt_bias: Any,
        state: Any,
        state_ids: Any,
        *,
        out: Any = None,
    ) -> Any:
        check(
            q=q,
            k=k,
            v=v,
            raw_g=raw_g,
            raw_beta=raw_beta,
            A_log=A_log,
            dt_bias=dt_bias,
            state=state,
            state_ids=state_ids,
            out=out,
        )
        rows = q.shape[0]
        if out is None:
            out = q.new_empty((rows, heads, channels))
        if rows:
            _decode[(rows * heads, blocks)](
                q,
                k,
                v,
                raw_g,
                raw_beta,
                A_log,
                dt_bias,
                state,
                state_ids,
                out,
                *q.stride()[:2],
                *k.stride()[:2],
                *v.stride()[:2],
                *raw_g.stride()[:2],
                raw_beta.stride(0),
                *state.stride()[:3],
                state_ids.stride(0),
                *out.stride()[:2],
                state.shape[0],
                heads,
                spec.scale,
                K=channels,
                BLOCK_K=block_k,
                BLOCK_V=block_v,
                RAW_GATE=raw,
                LOWER_BOUND=bound,
                NORM=spec.qk_norm,
            )
        return out

    return run
