"""Operands of the KDA operators, made of one encoder layer's queries, keys, values and hidden states."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_hal.model import K3_1_PRO
from kimi_hal.workload import maps, noise
from kimi_hal.workload.attention import HIDDEN_BITS, VALUE_BITS, WIDTH

#: Joined heads that one layer of the encoder gives.
GROUPS = 3

HEADS, DIM, TAPS = K3_1_PRO.kda_heads, K3_1_PRO.kda_dim, K3_1_PRO.conv_width


@dataclass(frozen=True)
class KDAInputs:
    """Operands of the KDA operators for T rows and H heads, C = 3·H·128.

    ``x [T, C]`` raw ``[q|k|v]`` before the convolution, ``raw_g [T, H, 128]``, ``raw_beta [T, H]``,
    ``out_gate [T, H, 128]`` and ``conv_weight [C, 4]`` are in the dtype asked for. ``A_log [H]``,
    ``dt_bias [H·128]`` and ``norm_weight [128]`` are float32.
    """

    x: Tensor
    raw_g: Tensor
    raw_beta: Tensor
    out_gate: Tensor
    conv_weight: Tensor
    A_log: Tensor
    dt_bias: Tensor
    norm_weight: Tensor


def mix(seed: int, projected: tuple[Tensor, Tensor, Tensor], heads: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x [T, 3·H·128]`` from q, k and v ``[T, 384]``, float64 integers.

    Head i takes four of the encoder's heads, those from 4·(i mod 3) on, joined, in an order and with signs of
    its own, the same for q and k: their dot product is the encoder's.
    """
    x = torch.empty(len(projected[0]), 3, len(heads), DIM, dtype=dtype)
    for column, head in enumerate(heads.tolist()):
        both, own = (maps.shuffle(seed, f"kda.{name}/{head}", DIM) for name in ("qk", "v"))
        for part, (order, sign) in enumerate((both, both, own)):
            group = projected[part][:, head % GROUPS * DIM :][:, :DIM]
            x[:, part, column] = group[:, order] * (sign * 2.0**-VALUE_BITS)
    return x.flatten(1)


def gate(seed: int, name: str, hidden: Tensor, heads: Tensor, dtype: torch.dtype) -> Tensor:
    """Return hidden states widened to all 96 · 128 channels, those of the chosen heads: ``[T, H, 128]``."""
    whole = maps.isometry(seed, f"kda.{name}", WIDTH, HEADS * DIM)
    part = whole.columns(channels(heads))
    return part.expand(hidden, part.gain * 2.0**-HIDDEN_BITS, dtype).view(len(hidden), len(heads), DIM)


def beta(seed: int, hidden: Tensor, heads: Tensor, dtype: torch.dtype) -> Tensor:
    """Return one hidden channel a head: ``[T, H]``."""
    own = noise.permutation(seed, "kda.beta", WIDTH)[heads]
    return (hidden[:, own] * 2.0**-HIDDEN_BITS).to(dtype)


def convolution(seed: int, heads: Tensor, dtype: torch.dtype) -> Tensor:
    """Return taps ``[3·H·128, 4]``, oldest first: three in [−¼, ¼) and the token's own in [½, 1)."""
    taps = noise.uniform(seed, "kda.conv", 3 * HEADS * DIM * TAPS).view(3, -1, TAPS)[:, channels(heads)]
    low = torch.tensor([-0.5] * (TAPS - 1) + [1.0], dtype=torch.float64)
    return ((taps.flatten(0, 1) + low) * 0.5).to(dtype)


def norm_weight(seed: int) -> Tensor:
    """Return the weight of the output norm, ``[128]`` float32 in [¾, 1¼)."""
    return (noise.uniform(seed, "kda.norm", DIM) * 0.5 + 0.75).float()


def channels(heads: Tensor) -> Tensor:
    """Return the channels of the chosen heads among all 96 · 128."""
    return (heads[:, None] * DIM + torch.arange(DIM)).flatten()
