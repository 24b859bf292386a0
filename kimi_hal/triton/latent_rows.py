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
def any_of_four(word, ROWS: tl.constexpr):
    """Return ``[ROWS, 4]``: the bits of each four of 16 words together."""
    left, right = tl.split(tl.reshape(word, (ROWS, 4, 2, 2)))
    first, second = tl.split(left | right)
    return first | second


@triton.jit
def fp8_tile(word, ELEMENT: tl.constexpr, RAISED: tl.constexpr, ROWS: tl.constexpr):
    """Return ``[ROWS, 64]`` bfloat16 of 16 words of four FP8 numbers; GROUP is 2.

    A NaN anywhere in a key makes its logit and its row NaN, so that of four words, which one thread holds, may
    stand in the first.
    """
    even = ((word << 8) & SIGNS) | ((word << 4) & 0x07F007F0)
    odd = (word & SIGNS) | ((word >> 4) & 0x07F007F0)
    if RAISED:
        factor = 2.0**119 if ELEMENT == "e4m3fnuz" else 2.0**120
        even, odd = scaled(even, factor), scaled(odd, factor)
    found = any_of_four(fp8_nan(word, ELEMENT), ROWS) != 0
    first = (tl.arange(0, 4) == 0)[None, None, :] & found[:, :, None]
    even = tl.where(tl.reshape(first, (ROWS, 16)), NANS, even)
    return numbers(tl.join(even, odd), ROWS, SHARED)


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
def nvfp4_lanes(at, live):
    """Return the eight words of scales, two of each of four lanes, ``[rows]`` each."""
    lanes = (at + 320).to(tl.pointer_type(tl.int32))
    return (
        tl.load(lanes, live, 0),
        tl.load(lanes + 1, live, 0),
        tl.load(lanes + 2, live, 0),
        tl.load(lanes + 3, live, 0),
        tl.load(lanes + 4, live, 0),
        tl.load(lanes + 5, live, 0),
        tl.load(lanes + 6, live, 0),
        tl.load(lanes + 7, live, 0),
    )


@triton.jit
def nvfp4_scales(lanes, PART: tl.constexpr):
    """Return the float32 scales ``[rows, 16]`` of the 16 words of quarter ``PART``: two words share one.

    Scale ``s`` stands at byte ``320 + 8 (s & 3) + (s >> 2)``: each of four lanes has two of a quarter's eight
    beside each other. A lane's word is read for a row, and words choose theirs, so that no byte is read apart.
    """
    HALF: tl.constexpr = PART // 2
    word = tl.arange(0, 16)[None, :]
    lane = (word >> 1) & 3
    low = tl.where(lane == 0, lanes[HALF][:, None], lanes[2 + HALF][:, None])
    high = tl.where(lane == 2, lanes[4 + HALF][:, None], lanes[6 + HALF][:, None])
    code = tl.where(lane < 2, low, high) >> (8 * (PART % 2 * 2 + (word >> 3)))
    return fp8_numbers(code & 0xFF, "e4m3fn")


@triton.jit
def beside(left, right, ROWS: tl.constexpr, COUNT: tl.constexpr):
    """Put two ``[ROWS, COUNT / 2]`` tiles side by side."""
    both = tl.permute(tl.join(left, right), (0, 2, 1))
    return tl.reshape(both, (ROWS, COUNT))


@triton.jit
def raw_row(at, live, FORMAT: tl.constexpr):
    """Return the words of whole rows, ``[rows, 16]`` each, and NVFP4's words of scales: a tuple."""
    if FORMAT == "bf16":
        raw = raw_tiles(at, live, 0, 16) + raw_tiles(at, live, 1024, 2)
    elif FORMAT == "flashmla":
        raw = raw_tiles(at, live, 0, 8) + raw_tiles(at, live, 528, 2)
    elif FORMAT == "nvfp4":
        raw = raw_tiles(at, live, 0, 5) + nvfp4_lanes(at, live)
    else:
        raw = raw_tiles(at, live, 0, 9)
    return raw


@triton.jit
def raw_tiles(at, live, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Return ``COUNT`` runs of 16 words from byte ``FIRST`` of the rows on."""
    raw = ()
    for i in tl.static_range(COUNT):
        raw = raw + (words(at, live, FIRST + 64 * i, 16),)
    return raw


@triton.jit
def fp8_quarter(raw, PART: tl.constexpr, ELEMENT: tl.constexpr, RAISED: tl.constexpr, ROWS: tl.constexpr):
    """Return 128 FP8 numbers of the rows."""
    left = fp8_tile(raw[2 * PART], ELEMENT, RAISED, ROWS)
    right = fp8_tile(raw[2 * PART + 1], ELEMENT, RAISED, ROWS)
    return beside(left, right, ROWS, QUARTER)


@triton.jit
def bf16_half(raw, FIRST: tl.constexpr, ROWS: tl.constexpr):
    """Return 64 bfloat16 numbers of the rows, of two runs of words."""
    left, right = numbers(raw[FIRST], ROWS, 32), numbers(raw[FIRST + 1], ROWS, 32)
    return beside(left, right, ROWS, SHARED)


@triton.jit
def quarter(raw, PART: tl.constexpr, FORMAT: tl.constexpr, RAISED: tl.constexpr, ROWS: tl.constexpr):
    """Return quarter ``PART`` of the rows' latents, ``[ROWS, 128]`` bfloat16, in the tile's order."""
    if FORMAT == "bf16":
        tile = beside(bf16_half(raw, 4 * PART, ROWS), bf16_half(raw, 4 * PART + 2, ROWS), ROWS, QUARTER)
    elif FORMAT == "nvfp4":
        tile = nvfp4_tile(raw[PART], nvfp4_scales(raw[5:], PART), RAISED, ROWS, QUARTER)
    elif FORMAT == "flashmla":
        tile = fp8_quarter(raw, PART, "e4m3fn", RAISED, ROWS)
    else:
        tile = fp8_quarter(raw, PART, FORMAT, RAISED, ROWS)
    return tile


@triton.jit
def latents(raw, FORMAT: tl.constexpr, RAISED: tl.constexpr, ROWS: tl.constexpr, COUNT: tl.constexpr):
    """Return the rows' latents as tiles of ``COUNT`` numbers, 128 or 256, keys in order: a tuple."""
    tiles = ()
    for part in tl.static_range(512 // COUNT):
        if COUNT == 256:
            left = quarter(raw, 2 * part, FORMAT, RAISED, ROWS)
            tile = beside(left, quarter(raw, 2 * part + 1, FORMAT, RAISED, ROWS), ROWS, COUNT)
        else:
            tile = quarter(raw, part, FORMAT, RAISED, ROWS)
        tiles = tiles + (in_order(tile, ROWS, COUNT),)
    return tiles


@triton.jit
def shared_part(raw, FORMAT: tl.constexpr, RAISED: tl.constexpr, ROWS: tl.constexpr):
    """Return the rows' shared key part, ``[ROWS, 64]`` bfloat16, keys in order."""
    if FORMAT == "bf16":
        tile = bf16_half(raw, 16, ROWS)
    elif FORMAT == "flashmla":
        tile = bf16_half(raw, 8, ROWS)
    elif FORMAT == "nvfp4":
        tile = fp8_tile(raw[4], "e4m3fn", RAISED, ROWS)
    else:
        tile = fp8_tile(raw[8], FORMAT, RAISED, ROWS)
    return in_order(tile, ROWS, SHARED)


@triton.jit
def loaded(key, KEYS: tl.constexpr):
    """Return the key that row ``key`` of a tile is loaded for; ``in_order`` brings it to its place."""
    return key % (KEYS // 2) // 8 * 16 + key // (KEYS // 2) * 8 + key % 8


@triton.jit
def in_order(x, ROWS: tl.constexpr, COUNT: tl.constexpr):
    """Bring the rows of a tile, loaded in the order of ``loaded``, into the order of keys."""
    parts = tl.permute(tl.reshape(x, (2, ROWS // 16, 8, COUNT)), (1, 0, 2, 3))
    return tl.reshape(parts, (ROWS, COUNT))


@triton.jit
def contracted(x, ROWS: tl.constexpr, COUNT: tl.constexpr, RUN: tl.constexpr):
    """Bring ``[ROWS, COUNT]`` from the tile's order into that in which keys and queries are multiplied.

    A thread holds ``RUN`` numbers in sequence, the quarter of a run of four threads; an instruction takes
    four from each of these. Any order gives the same sum, if keys and queries have the same.
    """
    parts = tl.reshape(x, (ROWS, COUNT // (4 * RUN), 4, RUN // 4, 2, 2))
    return tl.reshape(tl.permute(parts, (0, 1, 3, 4, 2, 5)), (ROWS, COUNT))


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
