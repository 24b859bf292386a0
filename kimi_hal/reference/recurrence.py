"""The KDA recurrence, token by token over many sequences at once, each with bits of its own.

States are ``[n, H, K, V]`` here, so that the sums over K add whole rows; the pool's value-major layout is
turned at load and save. A step is single multiplications and additions in one order (``pointwise.py``):
prefill, decode, verify and commit share it, and therefore agree in every bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_hal.ops.kda import KDASpec
from kimi_hal.reference.pointwise import (
    l2_normalized,
    log_softplus,
    sigmoid,
    softplus,
    times_exp,
    tree_sum,
)

#: Elements of the states advanced together: 16 Mi x 8 bytes = 128 MB in float64.
STATES = 1 << 24
#: Elements of one operand prepared at once for the steps to come.
PREPARED = 1 << 22


def gate(spec: KDASpec, raw_g: Tensor, A_log: Tensor, dt_bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the natural-log decay of ``raw_g [..., H, K]``."""
    log_rate = A_log.to(dtype)[:, None]
    argument = raw_g.to(dtype) + dt_bias.to(dtype).view(spec.num_heads, spec.head_dim)
    if spec.lower_bound is None:
        return -times_exp(softplus(argument), log_rate, log_softplus(argument))
    size = argument.abs()
    product = times_exp(size, log_rate, torch.log(size))
    return spec.lower_bound * sigmoid(torch.where(argument < 0, -product, product))


def decay(
    spec: KDASpec, g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return what a step multiplies the state with, exp(g), for raw or finished gates."""
    if A_log is not None and dt_bias is not None:
        return torch.exp(gate(spec, g, A_log, dt_bias, dtype))
    return torch.exp(g.to(dtype))


def key(spec: KDASpec, k: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the key that enters the state."""
    return l2_normalized(k.to(dtype)) if spec.qk_norm else k.to(dtype)


@dataclass(frozen=True)
class Tokens:
    """The operands of T rows as a call gives them: q, k, v, raw_g ``[T, H, ·]``, raw_beta ``[T, H]``."""

    spec: KDASpec
    q: Tensor
    k: Tensor
    v: Tensor
    raw_g: Tensor
    raw_beta: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None

    def at(self, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return normalised q and k, v, the decay and beta of some rows, in ``dtype``."""
        spec = self.spec
        q = self.q[rows].to(dtype)
        q = (l2_normalized(q) if spec.qk_norm else q) * spec.scale
        beta = self.raw_beta[rows].to(dtype)
        beta = sigmoid(beta) if spec.gate == "raw" else beta
        fade = decay(spec, self.raw_g[rows], self.A_log, self.dt_bias, dtype)
        return q, key(spec, self.k[rows], dtype), self.v[rows].to(dtype), fade, beta


def read(states: Tensor, x: Tensor) -> Tensor:
    """Return Sᵀ x: states ``[n, H, K, V]``, x ``[n, H, K]``."""
    return tree_sum(states * x[..., None], dim=-2)


def write(states: Tensor, k: Tensor, u: Tensor) -> None:
    """Add k uᵀ to states that have decayed, in place."""
    states += k[..., None] * u[..., None, :]


def walk(
    tokens: Tokens, start: Tensor, length: Tensor, states: Tensor, dtype: torch.dtype
) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """Advance ``states`` in place, one row of every sequence at a time.

    Args:
        tokens: the operands.
        start: int64 ``[n]``, first rows.
        length: int64 ``[n]``, descending.
        states: ``[n, H, K, V]``.
        dtype: of the computation.

    Yields:
        After each step ``(t, live, u, o)``: row t of the first ``live`` sequences is done, with corrections
        ``u`` and outputs ``o`` ``[live, H, V]``.
    """
    rows_of = length.tolist()
    longest, width = max(rows_of, default=0), tokens.spec.num_heads * tokens.spec.head_dim
    first, live = 0, len(rows_of)
    while first < longest:
        live = _still(rows_of, live, first)
        steps = min(max(1, PREPARED // (live * width)), longest - first)
        place = torch.arange(first, first + steps, device=start.device)
        # A sequence that ends inside the block repeats its last row; those steps leave it alone.
        rows = start[:live, None] + torch.minimum(place, length[:live, None] - 1)
        block = tokens.at(rows, dtype)
        for t in range(steps):
            live = _still(rows_of, live, first + t)
            q, k, v, fade, beta = (operand[:live, t] for operand in block)
            S = states[:live]
            S *= fade[..., None]
            u = beta[..., None] * (v - read(S, k))
            write(S, k, u)
            yield first + t, live, u, read(S, q)
        first += steps


def replay(k: Tensor, fade: Tensor, u: Tensor, length: Tensor, states: Tensor) -> Iterator[tuple[int, int]]:
    """Advance ``states`` in place by recorded corrections; yields ``(t, live)`` after each step.

    Args:
        k: normalised keys ``[n, H, Q, K]``.
        fade: decays ``[n, H, Q, K]``.
        u: corrections ``[n, H, Q, V]``.
        length: int64 ``[n]``, descending: rows to replay.
        states: ``[n, H, K, V]``.
    """
    rows_of = length.tolist()
    live = len(rows_of)
    for t in range(max(rows_of, default=0)):
        live = _still(rows_of, live, t)
        S = states[:live]
        S *= fade[:live, :, t, :, None]
        write(S, k[:live, :, t], u[:live, :, t])
        yield t, live


def _still(lengths: list[int], live: int, t: int) -> int:
    """Return how many of the first ``live`` sequences, longest first, have a row t."""
    while lengths[live - 1] <= t:
        live -= 1
    return live


def together(pool: Tensor) -> int:
    """Return how many of a pool's states are advanced together."""
    return max(1, STATES // max(1, pool[:1].numel()))


def load(pool: Tensor, slot: Tensor, dtype: torch.dtype, fresh: Tensor | None = None) -> Tensor:
    """Return the states of some slots as ``[n, H, K, V]``; where ``fresh`` (bool ``[n]``) they are zero."""
    states = pool[slot].to(dtype).transpose(-1, -2).contiguous()
    if fresh is not None:
        states[fresh] = 0
    return states


def save(pool: Tensor, slot: Tensor, states: Tensor) -> None:
    """Write states into their slots, rounded once; a slot of −1 is written nowhere."""
    kept = slot >= 0
    pool[slot[kept]] = states[kept].transpose(-1, -2).to(pool.dtype)
