"""Rows of the latent cache inside kernels: where an index points, and what a row's bytes mean, in bfloat16.

Every latent format is exact in bfloat16 up to a power of two and, in FlashMLA's record, the scale of a
quarter. So the bytes are moved into bfloat16's places two at a time, by integer arithmetic on whole words:
a target needs no FP8 type, and no number is rounded. Moved so, an FP8 number is 2^120 (fnuz: 2^119) too
small. ``RAISED`` multiplies that back; without it the attention scales queries and probabilities up instead,
which costs nothing for each key, but needs matrix units that keep subnormal bfloat16 numbers.

A word's numbers come out in the order that the moves leave them in, not in the row's: the row's order
is ``[words, 2, GROUP]``, the tile's ``[words, GROUP, 2]``. ``to_tile`` and ``from_tile`` turn queries and
outputs, of which there are few, instead of keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Numbers of a quarter of the latent: one tile, and one scale of FlashMLA's record.
QUARTER = tl.constexpr(128)
#: Numbers of the shared key part.
SHARED = tl.constexpr(64)
#: Masks of the two numbers of a bfloat16 pair.
SIGNS = tl.constexpr(-0x7FFF8000)  # 0x80008000 as a signed word
HIGH_HALF = tl.constexpr(-0x10000)
NANS = tl.constexpr(0x7FC07FC0)
TOP_BITS = tl.constexpr(-0x7F7F7F80)  # 0x80808080


@triton.jit
def locate(
    index,
    live,
    table,
    columns,
    pages,
    SPACE: tl.constexpr,
    PAGE: tl.constexpr,
    WORLD: tl.constexpr,
    RANK: tl.constexpr,
    INTERLEAVE: tl.constexpr,
):
    """Return the page, the place inside it, and which of the ``live`` indices name a key of this cache.

    ``table`` points to the row of the block table, ``columns`` long; neither is looked at for slots.
    """
    live = live & (index >= 0)
    if SPACE == "position":
        live = live & (index // INTERLEAVE % WORLD == RANK)
        index = index // (WORLD * INTERLEAVE) * INTERLEAVE + index % INTERLEAVE
    page = index // PAGE
    if SPACE != "slot":
        live = live & (page < columns)
        page = tl.load(table + page, mask=live, other=-1)
        live = live & (page >= 0)
    live = live & (page < pages)
    return page.to(tl.int64), index % PAGE, live


@triton.jit
def words(at, live, OFFSET: tl.constexpr, COUNT: tl.constexpr):
    """Return ``[rows, COUNT]`` int32 words from byte ``OFFSET`` of the rows on; 0 for what is not live."""
    first = (at + OFFSET).to(tl.pointer_type(tl.int32))
    return tl.load(first[:, None] + tl.arange(0, COUNT)[None, :], mask=live[:, None], other=0)


@triton.jit
def float_at(at, live, OFFSET: tl.constexpr):
    """Return the float32 at byte ``OFFSET`` of each row."""
    return tl.load((at + OFFSET).to(tl.pointer_type(tl.float32)), mask=live, other=0.0)


@triton.jit
def scaled(pair, factor):
    """Multiply both numbers of bfloat16 pairs by a float32 factor; the products must be bfloat16 numbers."""
    low = ((pair << 16).to(tl.float32, bitcast=True) * factor).to(tl.int32, bitcast=True)
    high = ((pair & HIGH_HALF).to(tl.float32, bitcast=True) * factor).to(tl.int32, bitcast=True)
    return ((low >> 16) & 0xFFFF) | (high & HIGH_HALF)


@triton.jit
def numbers(pairs, ROWS: tl.constexpr, COUNT: tl.constexpr):
    """Return words of bfloat16 pairs as the ``[ROWS, COUNT]`` numbers that they are, low halves first."""
    halves = tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16))
    return tl.reshape(halves, (ROWS, COUNT)).to(tl.bfloat16, bitcast=True)


@triton.jit
def fp8_nan(word, ELEMENT: tl.constexpr):
    """Return words that are not 0 where one of four FP8 numbers is NaN."""
    if ELEMENT == "e4m3fnuz":
        other = word ^ TOP_BITS
        found = (other - 0x01010101) & ~other & TOP_BITS  # a byte that is 0 borrows
    else:
        found = ((word & 0x7F7F7F7F) + 0x01010101) & TOP_BITS  # 127 alone carries
    return found


@triton.jit
def fp8_numbers(code, ELEMENT: tl.constexpr):
    """Return the float32 of uint8 FP8 codes."""
    word = code.to(tl.int32)
    small = (((word & 0x80) << 24) | ((word & 0x7F) << 20)).to(tl.float32, bitcast=True)
    if ELEMENT == "e4m3fnuz":
        value = tl.where(word == 0x80, float("nan"), small * 2.0**119)
    else:
        value = tl.where((word & 0x7F) == 0x7F, float("nan"), small * 2.0**120)
    return value


@triton.jit
def fp8_tile(word, ELEMENT: tl.constexpr, RAISED: tl.constexpr, ROWS: tl.constexpr, COUNT: tl.constexpr):
    """Return ``[ROWS, COUNT]`` bfloat16 of words of four FP8 numbers; GROUP is 2."""
    even = ((word << 8) & SIGNS) | ((word << 4) & 0x07F007F0)
    odd = (word & SIGNS) | ((word >> 4) & 0x07F007F0)
    if RAISED:
        factor = 2.0**119 if ELEMENT == "e4m3fnuz" else 2.0**120
        even, odd = scaled(even, factor), scaled(odd, factor)
    # One NaN makes the whole key NaN, so it may stand in any of the word's numbers.
    even = tl.where(fp8_nan(word, ELEMENT) != 0, NANS, even)
    return numbers(tl.join(even, odd), ROWS, COUNT)


@triton.jit
def nvfp4_tile(word, factor, RAISED: tl.constexpr, ROWS: tl.constexpr, COUNT: tl.constexpr):
    """Return ``[ROWS, COUNT]`` bfloat16 of words of eight e2m1 numbers, each word with its scale; GROUP is 4."""
    a = ((word << 12) & SIGNS) | ((word << 6) & 0x01C001C0)
    b = ((word << 8) & SIGNS) | ((word << 2) & 0x01C001C0)
    c = ((word << 4) & SIGNS) | ((word >> 2) & 0x01C001C0)
    d = (word & SIGNS) | ((word >> 6) & 0x01C001C0)
    if RAISED:  # by 2^126 in two steps, since 2^126 times the largest scale is no float32
        a, b, c, d = scaled(a, 2.0**100), scaled(b, 2.0**100), scaled(c, 2.0**100), scaled(d, 2.0**100)
        factor = factor * 2.0**26
    else:  # to 2^-120, as the key part is
        factor = factor * 2.0**6
    a, b, c, d = scaled(a, factor), scaled(b, factor), scaled(c, factor), scaled(d, factor)
    pairs = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (ROWS, COUNT // 2))
    return numbers(pairs, ROWS, COUNT)


@triton.jit
def nvfp4_scales(at, live, PART: tl.constexpr):
    """Return the float32 scales ``[rows, 16]`` of the 16 words of quarter ``PART``: two words share one.

    Scale ``s`` stands at byte ``320 + 8 (s & 3) + (s >> 2)``: each of four lanes has two of a quarter's eight
    beside each other. A lane's word is read for a row, and words choose theirs, so that no byte is read apart.
    """
    lanes = (at + 320).to(tl.pointer_type(tl.int32)) + PART // 2
    word = tl.arange(0, 16)[None, :]
    lane = (word >> 1) & 3
    low = tl.where(lane == 0, tl.load(lanes, live, 0)[:, None], tl.load(lanes + 2, live, 0)[:, None])
    high = tl.where(lane == 2, tl.load(lanes + 4, live, 0)[:, None], tl.load(lanes + 6, live, 0)[:, None])
    code = tl.where(lane < 2, low, high) >> (8 * (PART % 2 * 2 + (word >> 3)))
    return fp8_numbers(code & 0xFF, "e4m3fn")


@triton.jit
def quarter(at, live, PART: tl.constexpr, FORMAT: tl.constexpr, RAISED: tl.constexpr, ROWS: tl.constexpr):
    """Return quarter ``PART`` of the rows' latents, ``[ROWS, 128]`` bfloat16, in the tile's order."""
    if FORMAT == "bf16":
        tile = numbers(words(at, live, PART * 256, 64), ROWS, QUARTER)
    elif FORMAT == "nvfp4":
        word = words(at, live, PART * 64, 16)
        tile = nvfp4_tile(word, nvfp4_scales(at, live, PART), RAISED, ROWS, QUARTER)
    elif FORMAT == "flashmla":
        tile = fp8_tile(words(at, live, PART * 128, 32), "e4m3fn", RAISED, ROWS, QUARTER)
    else:
        tile = fp8_tile(words(at, live, PART * 128, 32), FORMAT, RAISED, ROWS, QUARTER)
    return tile


@triton.jit
def shared_part(at, live, FORMAT: tl.constexpr, RAISED: tl.constexpr, ROWS: tl.constexpr):
    """Return the rows' shared key part, ``[ROWS, 64]`` bfloat16, in the tile's order."""
    if FORMAT == "bf16":
        tile = numbers(words(at, live, 1024, 32), ROWS, SHARED)
    elif FORMAT == "flashmla":
        tile = numbers(words(at, live, 528, 32), ROWS, SHARED)
    elif FORMAT == "nvfp4":
        tile = fp8_tile(words(at, live, 256, 16), "e4m3fn", RAISED, ROWS, SHARED)
    else:
        tile = fp8_tile(words(at, live, 512, 16), FORMAT, RAISED, ROWS, SHARED)
    return tile


@triton.jit
def to_tile(x, ROWS: tl.constexpr, COUNT: tl.constexpr, GROUP: tl.constexpr):
    """Bring ``[ROWS, COUNT]`` from the row's order into the tile's."""
    if GROUP > 1:
        parts = tl.reshape(x, (ROWS, COUNT // (2 * GROUP), 2, GROUP))
        x = tl.reshape(tl.permute(parts, (0, 1, 3, 2)), (ROWS, COUNT))
    return x


@triton.jit
def from_tile(x, ROWS: tl.constexpr, COUNT: tl.constexpr, GROUP: tl.constexpr):
    """Bring ``[ROWS, COUNT]`` from the tile's order back into the row's."""
    if GROUP > 1:
        parts = tl.reshape(x, (ROWS, COUNT // (2 * GROUP), GROUP, 2))
        x = tl.reshape(tl.permute(parts, (0, 1, 3, 2)), (ROWS, COUNT))
    return x
