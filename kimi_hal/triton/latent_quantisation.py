"""The kernel that quantises latents and writes each into its slot: the bytes of ``kimi_hal/formats``."""

from __future__ import annotations

import triton
import triton.language as tl

from kimi_hal.triton.minifloat import amax, ceil_log2, decode_fp8, divide, encode, exp2, is_nan

#: FlashMLA's smallest scale, and NVFP4's.
FLASHMLA_FLOOR = tl.constexpr(1e-4)
NVFP4_FLOOR = tl.constexpr(2.0**-9)


@triton.jit
def by_constant(x, CONSTANT: tl.constexpr):
    """Divide by a constant, correctly rounded: a compiler may multiply by the reciprocal of a scalar."""
    return divide(x, tl.full(x.shape, CONSTANT, tl.float32))


@triton.jit
def put_bytes(at, code, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Store ``COUNT`` codes as the bytes from ``FIRST`` of a row on."""
    tl.store(at + FIRST + tl.arange(0, COUNT), code.to(tl.uint8))


@triton.jit
def put_wide(at, x, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Store ``COUNT`` bfloat16 from byte ``FIRST`` of a row on; every NaN is 0x7FC0."""
    bits = tl.where(is_nan(x), 0x7FC0, x.to(tl.bfloat16).to(tl.int16, bitcast=True))
    to = (at + FIRST).to(tl.pointer_type(tl.int16))
    tl.store(to + tl.arange(0, COUNT), bits.to(tl.int16))


@triton.jit
def put_scaled(at, x, shared, scale, ELEMENT: tl.constexpr):
    """Write 512 and 64 FP8 codes of ``x / scale``."""
    put_bytes(at, encode(divide(x, tl.broadcast_to(scale, x.shape)), ELEMENT), 0, 512)
    put_bytes(at, encode(divide(shared, tl.broadcast_to(scale, shared.shape)), ELEMENT), 512, 64)


@triton.jit
def put_nvfp4(at, x, shared):
    """Write 512 e2m1, two a byte, 64 e4m3 of the key part, and the scales of 16 in the order of their lanes."""
    even, odd = tl.split(tl.reshape(x, (32, 8, 2)))
    most = tl.maximum(amax(even, 1), amax(odd, 1))
    needed = tl.minimum(tl.maximum(by_constant(most, 6.0), NVFP4_FLOOR), 448.0)
    code = encode(needed, "e4m3fn")
    code += (decode_fp8(code.to(tl.uint8), "e4m3fn", False).to(tl.float32) < needed).to(tl.int32)
    broken = tl.max((is_nan(even) | is_nan(odd)).to(tl.int32), axis=1)
    code = tl.where(broken == 1, 0x7F, code)
    scale = decode_fp8(code.to(tl.uint8), "e4m3fn", False).to(tl.float32)
    inverse = divide(tl.full(scale.shape, 1.0, tl.float32), scale)[:, None]
    packed = encode(even * inverse, "e2m1") | (encode(odd * inverse, "e2m1") << 4)
    put_bytes(at, tl.reshape(packed, (256,)), 0, 256)
    put_bytes(at, encode(shared, "e4m3fn"), 256, 64)
    group = tl.arange(0, 32)
    tl.store(at + 320 + 8 * (group & 3) + (group >> 2), code.to(tl.uint8))


@triton.jit
def put_flashmla(at, x, shared):
    """Write 512 e4m3fn, four float32 powers of two, and the key part in bfloat16."""
    parts = tl.reshape(x, (4, 128))
    needed = tl.maximum(by_constant(amax(parts, 1), 448.0), FLASHMLA_FLOOR)
    scale = exp2(ceil_log2(needed))
    code = encode(divide(parts, tl.broadcast_to(scale[:, None], parts.shape)), "e4m3fn")
    put_bytes(at, tl.reshape(code, (512,)), 0, 512)
    tl.store((at + 512).to(tl.pointer_type(tl.float32)) + tl.arange(0, 4), scale)
    put_wide(at, shared, 528, 64)


@triton.jit
def store(
    kv_c,
    k_pe,
    slots,
    cache,
    k_scale,
    kv_row,
    pe_row,
    slot_stride,
    page_stride,
    capacity,
    FORMAT: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Quantise one token's latent and write it into its slot, if it has one."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token * slot_stride)
    if (slot >= 0) & (slot < capacity):
        at = cache + slot // PAGE * page_stride + slot % PAGE * ROW_BYTES
        x = tl.load(kv_c + token * kv_row + tl.arange(0, 512)).to(tl.float32)
        shared = tl.load(k_pe + token * pe_row + tl.arange(0, 64)).to(tl.float32)
        if FORMAT == "nvfp4":
            put_nvfp4(at, x, shared)
        elif FORMAT == "flashmla":
            put_flashmla(at, x, shared)
        elif FORMAT == "bf16":
            put_wide(at, x, 0, 512)
            put_wide(at, shared, 1024, 64)
        else:
            put_scaled(at, x, shared, tl.load(k_scale), FORMAT)
