"""The scale rules of ``docs/contract.md`` rule 6: amax in float32, one division, exponents read from bits."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_hal.formats import minifloat

#: The smallest amax of an FP8 index key or query: a zero row gets a small finite scale.
AMAX_FLOOR = 1e-4

#: What amax is divided by: the largest value an encoded element should have.
FP8_TARGET = {"e4m3fn": 448.0, "e4m3fnuz": 224.0}

#: Elements that share one e8m0 scale.
MX_GROUP = 32


def amax(x: Tensor) -> Tensor:
    """Return the largest magnitude along the last dimension, float32; NaN elements don't count."""
    magnitude = x.to(torch.float32).abs()
    return torch.where(torch.isnan(magnitude), 0.0, magnitude).amax(dim=-1)


def divide(x: Tensor, divisor: float) -> Tensor:
    """Divide by a constant, correctly rounded: some devices multiply by the reciprocal of a Python number."""
    return x / torch.full_like(x, divisor)


def groups(x: Tensor, size: int) -> Tensor:
    """View the last dimension as groups of ``size``: ``[..., K]`` to ``[..., K / size, size]``."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def ceil_log2(x: Tensor) -> Tensor:
    """Return ⌈log2 x⌉ of float32 ``x`` ≥ 0 as int32, read from the bits and clamped to [−126, 127]."""
    bits = x.view(torch.int32)
    exponent = (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0)
    return exponent.clamp(-126, 127)


def exp2(exponent: Tensor) -> Tensor:
    """Return ``2**exponent`` as float32, for int32 exponents in [−126, 127]."""
    return ((exponent + 127) << 23).view(torch.float32)


def fp8_raw(largest: Tensor, element: str) -> Tensor:
    """Return the scale ``max(amax, 1e-4) / 448`` (224 for fnuz)."""
    return divide(largest.clamp(min=AMAX_FLOOR), FP8_TARGET[element])


def fp8_exponent(largest: Tensor, element: str) -> Tensor:
    """Return the exponent of the power-of-two scale ``2**⌈log2(max(amax, 1e-4) / 448)⌉`` (224 for fnuz)."""
    return ceil_log2(fp8_raw(largest, element))


def mx_encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise blocks of 32 along the last dimension to MXFP4, exponent ⌈log2(amax / 6)⌉.

    Returns packed e2m1 ``[..., K/2]`` and e8m0 ``[..., K/32]``, uint8. An all-zero block gets scale byte 1.
    A block with a NaN gets scale byte 255 and zero codes, since e2m1 has no NaN.
    """
    blocks = groups(x.to(torch.float32), MX_GROUP)
    exponent = ceil_log2(divide(amax(blocks), 6.0))
    scale = torch.where(torch.isnan(blocks).any(dim=-1), torch.nan, exp2(exponent))
    codes = minifloat.encode(blocks / scale[..., None], minifloat.E2M1)
    scale_code = torch.where(torch.isnan(scale), 255, exponent + 127).to(torch.uint8)
    return minifloat.pack_nibbles(codes.flatten(-2)), scale_code


def mx_decode(packed: Tensor, scale: Tensor, dtype: torch.dtype, group: int = MX_GROUP) -> Tensor:
    """Return e2m1 · 2^(code − 127) for ``[..., K/2]`` bytes and ``[..., K/32]`` scales, in ``dtype``."""
    values = groups(minifloat.decode_nibbles(packed, dtype), group)
    return (values * minifloat.decode_e8m0(scale, dtype)[..., None]).flatten(-2)
