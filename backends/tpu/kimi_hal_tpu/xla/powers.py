"""e8m0 scales for a device that takes subnormal float32 numbers for 0: a power of two in two normal factors.

Code 0 is 2^−127, a subnormal, and so is half of what stands under code 1. Codes of elements are multiplied as they are;
what comes out takes one factor after the other, so that only a result that is subnormal itself is lost.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_hal_tpu.scales import SMALL

#: The exponent of 1 in float32, and in e8m0; float32's fraction bits; the e8m0 code of NaN, and NaN's bits.
BIAS, FRACTION, NAN_CODE, NAN = 127, 23, 255, 0x7FC00000


def halves(codes: Tensor) -> tuple[Tensor, Tensor]:
    """Return two float32 factors from 2^−64 to 2^64 whose product is 2^(code − 127), of uint8 ``codes``; 255: NaN."""
    code = codes.to(torch.int32)
    most = (code + 1) >> 1
    return power(code, most + 63), power(code, code - most + 64)


def power(code: Tensor, exponent: Tensor) -> Tensor:
    """Return 2^(exponent − 127) float32 of biased exponents from 1 to 254, NaN where the code is NaN's."""
    return torch.where(code == NAN_CODE, NAN, exponent << FRACTION).to(torch.int32).view(torch.float32)


def of_large(codes: Tensor) -> Tensor:
    """Return 2^(code − 127), and 0 for small codes."""
    code = codes.to(torch.int32)
    return power(code, torch.where(code < SMALL, 0, code))


def of_small(codes: Tensor) -> Tensor:
    """Return 2^(code − 63) of small codes, 0 for others."""
    code = codes.to(torch.int32)
    return (torch.where(code < SMALL, code + 64, 0) << FRACTION).view(torch.float32)


def scaled(x: Tensor, *factors: Tensor | float) -> Tensor:
    """Multiply by one factor after the other."""
    for factor in factors:
        x = x * factor
    return x
