"""The small element types, encoded and decoded exactly: e2m1, e4m3fn, e4m3fnuz, and the e8m0 scale.

Written with integer arithmetic on float32 bits instead of casts, because casts differ between devices and
versions (one ships a NaN for what overflows, one a saturated value, one is off by a unit in 0.4 % of codes).
Sources: OCP Microscaling Formats v1.0 (e2m1, e8m0); OCP 8-bit Floating Point v1.0 (e4m3fn); Noune et al.,
arXiv:2206.02915 (fnuz).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class MiniFloat:
    """One element type: sign, exponent and ``mantissa`` bits; all else follows.

    Args:
        width: bits of a code.
        mantissa: bits of the fraction.
        bias: of the exponent.
        largest: the largest finite magnitude; encoding saturates there.
        nan: the code that encoding gives to NaN; None where the type has none, and NaN encodes as 0.
        nan_mask: the bits of a code that must equal ``nan`` for it to mean NaN.
        signed_zero: False where −0 does not exist.
    """

    width: int
    mantissa: int
    bias: int
    largest: float
    nan: int | None
    nan_mask: int
    signed_zero: bool


E2M1 = MiniFloat(width=4, mantissa=1, bias=1, largest=6.0, nan=None, nan_mask=0, signed_zero=True)
E4M3FN = MiniFloat(width=8, mantissa=3, bias=7, largest=448.0, nan=0x7F, nan_mask=0x7F, signed_zero=True)
E4M3FNUZ = MiniFloat(width=8, mantissa=3, bias=8, largest=240.0, nan=0x80, nan_mask=0xFF, signed_zero=False)

ELEMENTS = {"e2m1": E2M1, "e4m3fn": E4M3FN, "e4m3fnuz": E4M3FNUZ}


def encode(x: Tensor, kind: MiniFloat) -> Tensor:
    """Round float32 ``x`` to the nearest code, ties to even, beyond the largest magnitude to the largest.

    Returns uint8 of the same shape, one code an element. The sign of zero is kept where the type has one;
    NaN of either sign gives the type's NaN code, or 0 where there is none.
    """
    x = x.to(torch.float32)
    magnitude = x.abs().clamp(max=kind.largest)
    drop = 23 - kind.mantissa
    bits = magnitude.view(torch.int32)
    # Adding half a unit minus one, plus the lowest kept bit, and cutting is rounding to nearest even.
    normal = (bits + ((1 << (drop - 1)) - 1) + ((bits >> drop) & 1)) >> drop
    normal = normal - ((127 - kind.bias) << kind.mantissa)
    # Below the normals codes count units of the smallest one; multiplying by a power of two is exact.
    unit = 2.0 ** (kind.bias - 1 + kind.mantissa)
    subnormal = torch.round(magnitude * unit).to(torch.int32)
    code = torch.where(magnitude < 2.0 ** (1 - kind.bias), subnormal, normal)
    sign = (torch.signbit(x) & (kind.signed_zero | (code != 0))).to(torch.int32) << (kind.width - 1)
    return torch.where(torch.isnan(x), kind.nan or 0, code | sign).to(torch.uint8)


def encode_up(x: Tensor, kind: MiniFloat) -> Tensor:
    """Return the code of the smallest value that is at least ``x``, for ``0 <= x <= kind.largest``."""
    code = encode(x, kind)
    return code + (decode(code, kind) < x).to(torch.uint8)


def table(kind: MiniFloat, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Return the value of each of the ``2**width`` codes, in ``dtype``; each is exact in bf16 and wider."""
    return torch.tensor(_values(kind), dtype=dtype, device=device)


@cache
def _values(kind: MiniFloat) -> tuple[float, ...]:
    """Return the value of each code: a tensor is not kept, which some caller could write or trace."""
    return tuple(_value(code, kind) for code in range(1 << kind.width))


def _value(code: int, kind: MiniFloat) -> float:
    if kind.nan is not None and code & kind.nan_mask == kind.nan:
        return math.nan
    exponent = (code & ((1 << (kind.width - 1)) - 1)) >> kind.mantissa
    fraction = code & ((1 << kind.mantissa) - 1)
    normal = fraction + (1 << kind.mantissa) if exponent else fraction
    magnitude = math.ldexp(normal, max(exponent, 1) - kind.bias - kind.mantissa)
    return -magnitude if code >> (kind.width - 1) else magnitude


def decode(codes: Tensor, kind: MiniFloat, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values of uint8 ``codes`` (one an element) in ``dtype``: a table lookup on plain bytes."""
    values = table(kind, dtype, codes.device)
    return values.index_select(0, codes.reshape(-1).to(torch.int32)).reshape(codes.shape)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Put two e2m1 codes in a byte, the even element in the low nibble: ``[..., K]`` to ``[..., K/2]``."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def decode_nibbles(packed: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the e2m1 values of packed bytes, ``[..., K/2]`` to ``[..., K]``, both nibbles by one lookup."""
    pairs = torch.tensor(_pairs(), dtype=dtype, device=packed.device).view(256, 2)
    looked_up = pairs.index_select(0, packed.reshape(-1).to(torch.int32))
    return looked_up.reshape(*packed.shape[:-1], packed.shape[-1] * 2)


@cache
def _pairs() -> tuple[float, ...]:
    """Return the two values of each byte after one another, the low nibble's first."""
    values = _values(E2M1)
    return tuple(value for byte in range(256) for value in (values[byte & 15], values[byte >> 4]))


def decode_e8m0(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return ``2**(code - 127)`` in ``dtype``; 0 gives the subnormal 2^−127 and 255 gives NaN."""
    code = codes.to(torch.int32)
    bits = torch.where(code == 0, 0x00400000, code << 23)
    bits = torch.where(code == 255, 0x7FC00000, bits)
    return bits.view(torch.float32).to(dtype)
