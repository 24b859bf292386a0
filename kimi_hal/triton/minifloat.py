"""Small floats inside kernels, by integer arithmetic on their bits: a target needs no FP8 type of its own.

The same rules as ``kimi_hal/formats/minifloat.py`` and ``scales.py``, code for code (rule 6 of
``docs/contract.md``). Nothing here rounds but ``encode`` and the one division of a scale.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kimi_hal.formats.scales import AMAX_FLOOR, FP8_TARGET

FLOOR = tl.constexpr(AMAX_FLOOR)
FN_TARGET = tl.constexpr(FP8_TARGET["e4m3fn"])
FNUZ_TARGET = tl.constexpr(FP8_TARGET["e4m3fnuz"])
#: 2^23: a float32 of this size has no fraction, so adding it rounds to a whole number, ties to even.
WHOLE = tl.constexpr(8388608.0)


@triton.jit
def is_nan(x):
    """Tell which float32 are NaN, by their bits."""
    return (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) > 0x7F800000


@triton.jit
def encode_as(
    x,
    WIDTH: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    LARGEST: tl.constexpr,
    NAN: tl.constexpr,
    SIGNED_ZERO: tl.constexpr,
):
    """Return int32 codes of float32 ``x``: to nearest, ties to even, saturating."""
    DROP: tl.constexpr = 23 - MANTISSA
    bits = x.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(tl.abs(x), LARGEST)
    kept = magnitude.to(tl.int32, bitcast=True)
    normal = (kept + ((1 << (DROP - 1)) - 1) + ((kept >> DROP) & 1)) >> DROP
    normal -= (127 - BIAS) << MANTISSA
    tiny = (magnitude * (2.0 ** (BIAS - 1 + MANTISSA)) + WHOLE).to(tl.int32, bitcast=True) & 0x7FFFFF
    code = tl.where(magnitude < 2.0 ** (1 - BIAS), tiny, normal)
    sign = ((bits >> 31) & 1) << (WIDTH - 1)
    if not SIGNED_ZERO:
        sign = tl.where(code == 0, 0, sign)
    return tl.where(is_nan(x), NAN, code | sign)


@triton.jit
def encode(x, ELEMENT: tl.constexpr):
    """Return int32 codes of float32 ``x`` in ``"e4m3fn"``, ``"e4m3fnuz"`` or ``"e2m1"``."""
    if ELEMENT == "e4m3fn":
        code = encode_as(x, 8, 3, 7, 448.0, 0x7F, True)
    elif ELEMENT == "e4m3fnuz":
        code = encode_as(x, 8, 3, 8, 240.0, 0x80, False)
    else:
        code = encode_as(x, 4, 1, 1, 6.0, 0, True)
    return code


@triton.jit
def decode_fp8(code, ELEMENT: tl.constexpr, NATIVE: tl.constexpr):
    """Return uint8 FP8 codes as float16, which holds every e4m3 number exactly.

    ``NATIVE``: the target converts this type itself. Otherwise the bits are shifted into float16's places,
    which makes each number 2^8 (fnuz: 2^7) too small, and multiplied back.
    """
    if NATIVE and ELEMENT == "e4m3fn":
        value = code.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    elif NATIVE:
        value = code.to(tl.float8e4b8, bitcast=True).to(tl.float16)
    else:
        wide = code.to(tl.int16)
        half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
        if ELEMENT == "e4m3fn":
            value = tl.where((wide & 0x7F) == 0x7F, float("nan"), half * 256.0).to(tl.float16)
        else:
            value = tl.where(wide == 0x80, float("nan"), half * 128.0).to(tl.float16)
    return value


@triton.jit
def decode_e2m1(code):
    """Return the low four bits of int16 ``code`` as float16, exactly."""
    half = (((code & 8) << 12) | ((code & 7) << 9)).to(tl.float16, bitcast=True)
    return half * 16384.0


@triton.jit
def decode_e8m0(code):
    """Return uint8 scale codes as float32: 2^(code − 127), 0 the subnormal 2^−127, 255 NaN."""
    wide = code.to(tl.int32)
    bits = tl.where(wide == 0, 0x00400000, wide << 23)
    return tl.where(wide == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def divide(x, y):
    """Divide float32, correctly rounded."""
    return tl.div_rn(x, y)


@triton.jit
def amax(x, AXIS: tl.constexpr):
    """Return the largest magnitude along an axis; NaN elements don't count."""
    return tl.max(tl.where(is_nan(x), 0.0, tl.abs(x)), axis=AXIS)


@triton.jit
def ceil_log2(x):
    """Return ⌈log2 x⌉ of float32 ``x`` ≥ 0 as int32, read from the bits, within [−126, 127]."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0).to(tl.int32)
    return tl.minimum(tl.maximum(exponent, -126), 127)


@triton.jit
def exp2(exponent):
    """Return 2^exponent as float32, for int32 exponents within [−126, 127]."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def fp8_raw(largest, ELEMENT: tl.constexpr):
    """Return the scale max(amax, 1e-4) / 448, or 224 for fnuz."""
    target = FN_TARGET if ELEMENT == "e4m3fn" else FNUZ_TARGET
    return divide(tl.maximum(largest, FLOOR), tl.full(largest.shape, target, tl.float32))


@triton.jit
def mx_encode(x, ROWS: tl.constexpr, D: tl.constexpr):
    """Quantise ``[ROWS, D]`` to MXFP4: packed codes ``[ROWS, D / 2]`` and scale codes ``[ROWS, D / 32]``, int32."""
    even, odd = tl.split(tl.reshape(x, (ROWS, D // 32, 16, 2)))
    largest = tl.maximum(amax(even, 2), amax(odd, 2))
    exponent = ceil_log2(divide(largest, tl.full(largest.shape, 6.0, tl.float32)))
    broken = tl.max((is_nan(even) | is_nan(odd)).to(tl.int32), axis=2)
    scale = tl.where(broken == 1, float("nan"), exp2(exponent))
    low = encode(divide(even, tl.broadcast_to(scale[:, :, None], even.shape)), "e2m1")
    high = encode(divide(odd, tl.broadcast_to(scale[:, :, None], odd.shape)), "e2m1")
    packed = tl.reshape(low | (high << 4), (ROWS, D // 2))
    return packed, tl.where(broken == 1, 255, exponent + 127)
