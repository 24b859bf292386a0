"""An independent encoder of every format in numpy: grids of values and byte formulas, no torch, no casts."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

#: element -> (mantissa bits, bias, largest value)
ELEMENTS = {"e2m1": (1, 1, 6.0), "e4m3fn": (3, 7, 448.0), "e4m3fnuz": (3, 8, 240.0)}


def grid(element: str) -> NDArray[np.float64]:
    """Return the finite magnitudes of an element type; the index is the code."""
    mantissa, bias, largest = ELEMENTS[element]
    values: list[float] = []
    while not values or values[-1] < largest:
        exponent, fraction = divmod(len(values), 1 << mantissa)
        significand = fraction / (1 << mantissa) + (1 if exponent else 0)
        values.append(significand * 2.0 ** (max(exponent, 1) - bias))
    return np.array(values)


def encode(x: Floats, element: str) -> Bytes:
    """Round to the nearest grid value, ties to the even code, saturating; NaN as the contract says."""
    values = grid(element)
    middle = (values[:-1] + values[1:]) / 2
    with np.errstate(invalid="ignore"):  # signalling NaNs become quiet ones
        magnitude = np.abs(x.astype(np.float64))
    code = np.searchsorted(middle, np.where(np.isnan(magnitude), 0.0, magnitude), side="left")
    tie = (code < len(middle)) & (magnitude == middle[np.minimum(code, len(middle) - 1)])
    code = np.where(tie & (code % 2 == 1), code + 1, code)
    sign = np.signbit(x) if element != "e4m3fnuz" else np.signbit(x) & (code > 0)
    code = code | (sign.astype(np.int64) << (3 if element == "e2m1" else 7))
    nan = {"e2m1": 0, "e4m3fn": 0x7F, "e4m3fnuz": 0x80}[element]
    return np.where(np.isnan(x), nan, code).astype(np.uint8)


def decode(codes: Bytes, element: str) -> NDArray[np.float64]:
    """Return the value of each code."""
    width = 4 if element == "e2m1" else 8
    half = 1 << (width - 1)
    magnitude = np.full(half, np.nan)
    magnitude[: len(grid(element))] = grid(element)
    table = np.concatenate((magnitude, -magnitude))
    if element == "e4m3fnuz":
        table[0x80] = np.nan
    return table[codes]


def ceil_log2(x: float) -> int:
    """Return ⌈log2 x⌉ clamped to [−126, 127]."""
    if x == 0:
        return -126
    if math.isinf(x):
        return 127
    fraction, exponent = math.frexp(x)
    return min(max(exponent - (fraction == 0.5), -126), 127)


def fp8_scale(amax: np.float32, element: str, power: bool) -> np.float32:
    """Return the scale of an FP8 key."""
    quotient = np.maximum(amax, np.float32(1e-4)) / np.float32(448 if element == "e4m3fn" else 224)
    return np.float32(2.0 ** ceil_log2(float(quotient))) if power else quotient


def pack_nibbles(codes: Bytes) -> Bytes:
    """Two codes a byte, the even one low."""
    return (codes[0::2] + 16 * codes[1::2]).astype(np.uint8)


def mx_row(x: Floats) -> tuple[Bytes, Bytes]:
    """Return packed elements and scale bytes of one MXFP4 row."""
    codes, scales = [], []
    for start in range(0, len(x), 32):
        block = x[start : start + 32]
        exponent = ceil_log2(float(np.max(np.abs(block)) / np.float32(6)))
        codes.append(encode((block / np.float32(2.0**exponent)).astype(np.float32), "e2m1"))
        scales.append(exponent + 127)
    return pack_nibbles(np.concatenate(codes)), np.array(scales, dtype=np.uint8)


def index_row(x: Floats, element: str, scale: str) -> tuple[Bytes, Bytes]:
    """Return element bytes and the four scale bytes of one index key."""
    if element == "e2m1":
        return mx_row(x)
    factor = fp8_scale(np.max(np.abs(x)), element, scale != "f32")
    codes = encode((x / factor).astype(np.float32), element)
    if scale == "ue8m0x4":
        return codes, np.full(4, math.frexp(float(factor))[1] - 1 + 127, dtype=np.uint8)
    return codes, np.frombuffer(factor.astype("<f4").tobytes(), dtype=np.uint8)


def index_bytes(name: str, token: int, elements: Bytes, scale: Bytes) -> dict[int, int]:
    """Return page offset -> byte of one key, by the formulas of ``docs/formats.md``."""
    width = len(elements)
    spread: dict[int, int] = {}
    for b in range(width):
        if "shuffled" in name:  # [64/16, 128/16, 16 tokens, 16 bytes]
            at = (token // 16) * 2048 + (b // 16) * 256 + (token % 16) * 16 + b % 16
        elif "gfx950" in name:  # [2 runs, 4 chunks, 32 tokens, 16 bytes]
            at = (token // 32) * 2048 + (b // 16) * 512 + (token % 32) * 16 + b % 16
        else:
            at = token * width + b
        spread[at] = int(elements[b])
    for s in range(4):
        at = token * 4 + s
        if "gfx950" in name:  # [2 runs, scale % 2, 32 tokens, scale // 2]
            at = (token // 32) * 128 + (s % 2) * 64 + (token % 32) * 2 + s // 2
        spread[64 * width + at] = int(scale[s])
    return spread


def nvfp4_row(kv_c: Floats, k_pe: Floats) -> Bytes:
    """Return the 352 bytes of one NVFP4 latent."""
    row = np.zeros(352, dtype=np.uint8)
    values = grid("e4m3fn")
    codes = []
    for s in range(32):
        block = kv_c[16 * s : 16 * s + 16]
        needed = np.clip(np.max(np.abs(block)) / np.float32(6), np.float32(2**-9), np.float32(448))
        code = int(np.searchsorted(values, float(needed), side="left"))
        inverse = np.float32(1) / np.float32(values[code])
        codes.append(encode(block * inverse, "e2m1"))
        row[320 + 8 * (s & 3) + (s >> 2)] = code
    row[:256] = pack_nibbles(np.concatenate(codes))
    row[256:320] = encode(k_pe, "e4m3fn")
    return row


def flashmla_row(kv_c: Floats, k_pe: Floats) -> Bytes:
    """Return the 656 bytes of one FlashMLA record."""
    codes, scales = [], []
    for start in range(0, 512, 128):
        block = kv_c[start : start + 128]
        needed = np.maximum(np.max(np.abs(block)) / np.float32(448), np.float32(1e-4))
        factor = np.float32(2.0 ** ceil_log2(float(needed)))
        codes.append(encode((block / factor).astype(np.float32), "e4m3fn"))
        scales.append(factor)
    tail = np.array(scales, dtype="<f4").tobytes() + bf16_bytes(k_pe).tobytes()
    return np.concatenate((*codes, np.frombuffer(tail, dtype=np.uint8)))


def bf16_bytes(x: Floats) -> Bytes:
    """Return the little-endian bf16 bytes of finite values, rounded to nearest even."""
    bits = x.astype("<f4").view("<u4").astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return rounded.astype("<u2").view(np.uint8)
