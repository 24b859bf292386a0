"""Operands of the KDA operators, and the same mathematics written another way, to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kimi_hal.ops.kda import KDASpec
from kimi_hal.reference import kda

F64 = torch.float64


def ids(*values: int) -> Tensor:
    """Return an int32 tensor."""
    return torch.tensor(values, dtype=torch.int32)


def flags(*values: bool) -> Tensor:
    """Return a bool tensor."""
    return torch.tensor(values, dtype=torch.bool)


def cuts(*lengths: int) -> Tensor:
    """Return the ``cu_seqlens`` of sequences of these lengths."""
    return ids(0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist())


@dataclass(frozen=True)
class Rows:
    """Random operands of T rows; ``some(…)`` takes a part of them."""

    x: Tensor
    raw_g: Tensor
    raw_beta: Tensor
    q: Tensor
    k: Tensor
    v: Tensor

    @classmethod
    def random(cls, spec: KDASpec, rows: int, seed: int = 0) -> Rows:
        """Return rows whose gates are raw, or finished with ``gate="log"``."""
        random = torch.Generator().manual_seed(seed)
        H, D = spec.num_heads, spec.head_dim

        def normal(*shape: int) -> Tensor:
            return torch.randn(rows, *shape, generator=random).bfloat16()

        x, g, beta, qkv = normal(spec.channels), normal(H, D), normal(H), normal(3, H, D)
        if spec.gate == "log":
            g, beta = -torch.nn.functional.softplus(g.float()), torch.sigmoid(beta.float())
        return cls(x, g, beta, *qkv.unbind(1))

    def some(self, rows: slice | Tensor) -> Rows:
        """Return some of the rows."""
        return Rows(*(getattr(self, name)[rows] for name in ("x", "raw_g", "raw_beta", "q", "k", "v")))

    def __len__(self) -> int:
        return len(self.x)


@dataclass(frozen=True)
class Layer:
    """One layer's parameters: convolution weight, A_log and dt_bias (None with ``gate="log"``)."""

    spec: KDASpec
    weight: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None

    @classmethod
    def random(cls, spec: KDASpec, seed: int = 1) -> Layer:
        """Return random parameters."""
        random = torch.Generator().manual_seed(seed)
        weight = torch.randn(spec.channels, spec.conv_width, generator=random).bfloat16()
        A_log = torch.randn(spec.num_heads, generator=random)
        dt_bias = torch.randn(spec.num_heads * spec.head_dim, generator=random)
        return cls(spec, weight, A_log, dt_bias) if spec.gate == "raw" else cls(spec, weight, None, None)

    def pool(self, slots: int, seed: int = 2) -> Tensor:
        """Return random recurrent states."""
        H, D = self.spec.num_heads, self.spec.head_dim
        return torch.randn(slots, H, D, D, generator=torch.Generator().manual_seed(seed))

    def conv_pool(self, slots: int, seed: int = 3) -> Tensor:
        """Return random convolution states in the Spec's layout."""
        random = torch.Generator().manual_seed(seed)
        states = torch.randn(slots, 3, self.spec.channels, generator=random).bfloat16()
        by_channel = self.spec.conv_layout == "channel_width"
        return states.transpose(1, 2).contiguous() if by_channel else states

    def prefill(self, rows: Rows, state: Tensor, state_ids: Tensor, cu: Tensor, **more: Any) -> Tensor:
        """Call the reference's prefill."""
        r = rows
        return kda.kda_prefill(
            self.spec,
            r.q,
            r.k,
            r.v,
            r.raw_g,
            r.raw_beta,
            self.A_log,
            self.dt_bias,
            state,
            state_ids,
            cu,
            **more,
        )

    def decode(self, rows: Rows, state: Tensor, state_ids: Tensor, **more: Any) -> Tensor:
        """Call the reference's decode."""
        r = rows
        return kda.kda_decode(
            self.spec, r.q, r.k, r.v, r.raw_g, r.raw_beta, self.A_log, self.dt_bias, state, state_ids, **more
        )

    def conv(self, rows: Rows, conv_state: Tensor, state_ids: Tensor, cu: Tensor, **more: Any) -> Tensor:
        """Call the reference's convolution."""
        return kda.kda_conv(self.spec, rows.x, self.weight, conv_state, state_ids, cu, **more)

    def verify(
        self,
        rows: Rows,
        conv_state: Tensor,
        state: Tensor,
        state_ids: Tensor,
        cu: Tensor,
        records: Tensor,
        **more: Any,
    ) -> Tensor:
        """Call the reference's verify."""
        parameters = (self.weight, rows.raw_g, rows.raw_beta, self.A_log, self.dt_bias)
        return kda.kda_verify(
            self.spec, rows.x, *parameters, conv_state, state, state_ids, cu, records, **more
        )

    def commit(
        self,
        conv_state: Tensor,
        state: Tensor,
        records: Tensor,
        state_ids: Tensor,
        accepted: Tensor,
        **more: Any,
    ) -> None:
        """Call the reference's commit for this layer alone."""
        gate = (None, None) if self.A_log is None or self.dt_bias is None else ([self.A_log], [self.dt_bias])
        kda.kda_commit(self.spec, [conv_state], [state], [records], *gate, state_ids, accepted, **more)

    def convolved(self, rows: Rows, y: Tensor) -> Rows:
        """Return the rows with q, k and v from a convolution's output, rounded as the operator rounds it."""
        parts = y.bfloat16().view(len(rows), 3, self.spec.num_heads, self.spec.head_dim)
        return Rows(rows.x, rows.raw_g, rows.raw_beta, *parts.unbind(1))

    def stepwise(
        self, rows: Rows, conv_state: Tensor, state: Tensor, slot: int, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Convolve and decode one row after another in one slot; returns their outputs."""
        outputs = [state.new_zeros((0, self.spec.num_heads, self.spec.head_dim), dtype=dtype)]
        for t in range(len(rows)):
            row = rows.some(slice(t, t + 1))
            y = self.conv(row, conv_state, ids(slot), ids(0, 1), dtype=dtype)
            outputs.append(self.decode(self.convolved(row, y), state, ids(slot), dtype=dtype))
        return torch.cat(outputs)


def expected(layer: Layer, rows: Rows, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs and final state ``[H, V, K]`` of one sequence in float64, in matrix form.

    ``S' = S · diag(exp g) · (I − beta k kᵀ) + beta v kᵀ`` and ``o = S' q``, by torch's own functions.
    """
    spec, S = layer.spec, state.to(F64)
    q, k, v, g, beta = (x.to(F64) for x in (rows.q, rows.k, rows.v, rows.raw_g, rows.raw_beta))
    if spec.qk_norm:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    if layer.A_log is not None and layer.dt_bias is not None:
        bias, rate = layer.dt_bias.to(F64).view(g.shape[1:]), layer.A_log.to(F64).exp()[:, None]
        if spec.lower_bound is None:
            g = -rate * torch.nn.functional.softplus(g + bias)
        else:
            g = spec.lower_bound * torch.sigmoid(rate * (g + bias))
        beta = torch.sigmoid(beta)
    eye, out = torch.eye(spec.head_dim, dtype=F64), []
    for t in range(len(q)):
        kk = beta[t, :, None, None] * k[t, :, :, None] * k[t, :, None, :]
        S = (
            S * g[t].exp()[:, None, :] @ (eye - kk)
            + beta[t, :, None, None] * v[t, :, :, None] * k[t, :, None]
        )
        out.append((S @ q[t, :, :, None])[..., 0] * spec.scale)
    return torch.stack(out) if out else v, S


def convolution(layer: Layer, x: Tensor, past: Tensor) -> Tensor:
    """Return the convolution of a sequence ``[T, C]`` after ``past [3, C]`` in float64, by torch's conv1d."""
    joined = torch.cat([past, x]).to(F64).T[None]
    taps = layer.weight.to(F64)[:, None]
    return torch.nn.functional.silu(torch.nn.functional.conv1d(joined, taps, groups=len(taps)))[0].T


def distance(a: Tensor, b: Tensor) -> float:
    """Return |a − b| / |b| in norm."""
    return float((a.to(F64) - b.to(F64)).norm() / b.to(F64).norm())


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors hold the same bytes, NaN and the sign of zero included."""
    return a.dtype == b.dtype and torch.equal(_bytes(a), _bytes(b))


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().flatten().view(torch.uint8)


def one_by_one(lengths: Sequence[int]) -> list[slice]:
    """Return the rows of consecutive pieces of these lengths."""
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]
