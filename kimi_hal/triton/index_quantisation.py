"""Kernels that quantise index queries and write quantised index keys into their pages."""

from __future__ import annotations

import triton
import triton.language as tl

from kimi_hal.triton.index_pages import element_offset, scale_offset
from kimi_hal.triton.minifloat import amax, ceil_log2, divide, encode, exp2, fp8_raw, mx_encode


@triton.jit
def hadamard(x, ROWS: tl.constexpr, D: tl.constexpr, STAGES: tl.constexpr):
    """Turn ``[ROWS, D]`` by the orthonormal Hadamard matrix in Sylvester's order; ``D`` is ``2**STAGES``."""
    for stage in tl.static_range(STAGES):
        pairs = tl.reshape(x, (ROWS, D // (2 << stage), 2, 1 << stage))
        low, high = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        x = tl.reshape(tl.permute(tl.join(low + high, low - high), (0, 1, 3, 2)), (ROWS, D))
    return x * D**-0.5


@triton.jit(do_not_specialize=("items",))
def quantize(
    q,
    weights,
    q_out,
    scale_out,
    weights_out,
    q_row,
    q_head,
    weights_row,
    q_out_row,
    q_out_head,
    scale_out_row,
    scale_out_head,
    weights_out_row,
    items,
    heads,
    weight_scale,
    ELEMENT: tl.constexpr,
    HADAMARD: tl.constexpr,
    D: tl.constexpr,
    STAGES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Quantise ``ROWS`` queries, each of one row and head, and fold their scales into the weights."""
    item = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = item < items
    row, head = item // heads, item % heads
    dim = tl.arange(0, D)
    at = q + (row * q_row + head * q_head)[:, None] + dim[None, :]
    x = tl.load(at, mask=live[:, None], other=0.0).to(tl.float32)
    if HADAMARD:
        x = hadamard(x, ROWS, D, STAGES)
    w = tl.load(weights + row * weights_row + head, mask=live, other=0.0).to(tl.float32) * weight_scale
    to = q_out + (row * q_out_row + head * q_out_head)[:, None]
    if ELEMENT == "e2m1":
        packed, scale = mx_encode(x, ROWS, D)
        byte = tl.arange(0, D // 2)
        group = tl.arange(0, D // 32)
        tl.store(to + byte[None, :], packed.to(tl.uint8), mask=live[:, None])
        scales_at = scale_out + (row * scale_out_row + head * scale_out_head)[:, None] + group[None, :]
        tl.store(scales_at, scale.to(tl.uint8), mask=live[:, None])
    else:
        scale = exp2(ceil_log2(fp8_raw(amax(x, 1), ELEMENT)))
        code = encode(divide(x, tl.broadcast_to(scale[:, None], x.shape)), ELEMENT)
        tl.store(to + dim[None, :], code.to(tl.uint8), mask=live[:, None])
        w *= scale
    w_at = weights_out + row * weights_out_row + head
    tl.store(w_at, w.to(weights_out.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=("tokens", "capacity"))
def store(
    k,
    slots,
    cache,
    k_row,
    slot_stride,
    cache_page,
    tokens,
    capacity,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    PAGE: tl.constexpr,
    BYTES: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    LANES: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Quantise ``ROWS`` keys and write each into its slot, if it has one."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots + token * slot_stride, mask=token < tokens, other=-1)
    live = (slot >= 0) & (slot < capacity)
    dim = tl.arange(0, D)
    x = tl.load(k + (token * k_row)[:, None] + dim[None, :], mask=live[:, None], other=0.0).to(tl.float32)
    page_at = cache + slot // PAGE * cache_page
    place = (slot % PAGE).to(tl.int32)
    byte = tl.arange(0, BYTES)
    four = tl.arange(0, 4)
    elements_at = page_at[:, None] + element_offset(place[:, None], byte[None, :], BYTES, TILE, CHUNK)
    scales_at = page_at[:, None] + scale_offset(place[:, None], four[None, :], PAGE, BYTES, TILE, LANES)
    if SCALE == "e8m0":
        code, scale_code = mx_encode(x, ROWS, D)
    else:
        scale = fp8_raw(amax(x, 1), ELEMENT)
        if SCALE != "f32":
            scale = exp2(ceil_log2(scale))
        code = encode(divide(x, tl.broadcast_to(scale[:, None], x.shape)), ELEMENT)
        bits = scale.to(tl.int32, bitcast=True)
        if SCALE == "ue8m0x4":
            scale_code = tl.broadcast_to((bits >> 23)[:, None], (ROWS, 4))
        else:
            scale_code = bits[:, None] >> (8 * four)[None, :]
    tl.store(elements_at, code.to(tl.uint8), mask=live[:, None])
    tl.store(scales_at, (scale_code & 255).to(tl.uint8), mask=live[:, None])
