"""How the portable latent kernels are cut for a Spec: formats, blocks of heads, tiles and parts of keys, bytes.

All of it follows from Spec, Limits and architecture, before a device exists; no number of a call changes it.
So a row's bits depend on nothing but the row. Imports neither torch nor Triton.
"""

from __future__ import annotations

from dataclasses import dataclass

from kimi_hal.dispatch.contract import Sizes
from kimi_hal.ops.sparse_mla import SparseMLASpec
from kimi_hal.ops.spec import Limits


@dataclass(frozen=True)
class Format:
    """What the attention kernel is told of a latent format.

    Args:
        kind: what the kernels call it.
        group: numbers whose order a word's decoding interleaves with as many others, of the latents.
        shared_group: the same of the key part.
        run: numbers of a row in one thread's 16 bytes, of the latents.
        shared_run: the same of the key part.
        small: exponent by which decoded keys may be left smaller than they are; 0: they are as they are.
        count: latents multiplied at once: 128 where each 128 have a scale, or rows are long; else 256.
        tuned: whether it is cut in the forms that pay most: blocks of 32 heads, and a single tile whose loads
            stand before the query's. With the other formats the assembler of Triton 3.6 lets the second form's last
            products read beyond shared memory (that of CUDA 13.0 does not); they keep to loops.
    """

    kind: str
    group: int
    shared_group: int
    run: int
    shared_run: int
    small: int
    count: int
    tuned: bool


FORMATS = {
    "latent.fp8.e4m3fn.tensor": Format("e4m3fn", 2, 2, 16, 16, 120, 256, True),
    "latent.fp8.e4m3fnuz.tensor": Format("e4m3fnuz", 2, 2, 16, 16, 119, 256, True),
    "latent.nvfp4.352": Format("nvfp4", 4, 2, 32, 16, 120, 256, True),
    "latent.flashmla.656": Format("flashmla", 2, 1, 16, 8, 0, 128, False),
    "latent.bf16": Format("bf16", 1, 1, 8, 8, 0, 128, False),
}
#: Architectures on which the kernels ran: there keys are left small, and loads run two tiles ahead.
MEASURED = ("sm_90",)
#: Heads of a block: a power of two, from the dot's least to what the registers hold.
LEAST_HEADS, MOST_HEADS = 16, 32
#: The most parts of a row's keys.
MOST_SPLITS = 32
#: What a program costs beside its tiles, in tiles: the query, the output, and its share of adding the parts.
FIXED = 1.5


@dataclass(frozen=True)
class Cut:
    """The sizes of one plan's launches.

    Args:
        small: exponent by which keys are left smaller than they are.
        heads: heads of a program.
        keys: keys of a tile.
        splits: parts of a row's keys, a power of two.
        chunk: indices of a part, whole tiles.
        single: a part is one tile, and its loads stand before the query's.
        warps: warps of a program.
        stages: depth of the loads' pipeline.
    """

    small: int
    heads: int
    keys: int
    splits: int
    chunk: int
    single: bool
    warps: int
    stages: int


def cut(spec: SparseMLASpec, limits: Limits, arch: str) -> Cut:
    """Return the sizes for a Spec, Limits and architecture (``""``: unknown)."""
    fmt, measured = FORMATS[spec.latent], arch in MEASURED
    tuned = measured and fmt.tuned
    heads = head_block(spec.num_heads, MOST_HEADS if tuned else LEAST_HEADS)
    wide = heads == MOST_HEADS
    keys = 128 if wide else 64
    tiles = -(-spec.topk // keys)
    programs = limits.max_rows * -(-spec.num_heads // heads)
    splits = split_count(tiles, programs, slots=132 if wide else 264)
    chunk = -(-tiles // splits) * keys
    return Cut(
        small=fmt.small if measured else 0,
        heads=heads,
        keys=keys,
        splits=splits,
        chunk=chunk,
        single=tuned and not wide and chunk == keys,
        warps=8 if wide else 4,
        stages=3 if measured else 1,
    )


def head_block(num_heads: int, most: int) -> int:
    """Return the largest block up to ``most`` whose multiples reach ``num_heads`` with less than 16 of padding."""
    blocks = -(-num_heads // LEAST_HEADS)
    return min(LEAST_HEADS * (blocks & -blocks), most)


def split_count(tiles: int, programs: int, slots: int) -> int:
    """Return into how many parts a row's tiles are split, a power of two: what takes the least time.

    A device runs ``slots`` programs at once (132 multiprocessors, two each, or one of twice the size), in as
    many rounds as it takes.
    """
    choices = [1 << n for n in range(MOST_SPLITS.bit_length()) if 1 << n <= tiles]

    def cost(splits: int) -> float:
        return -(-programs * splits // slots) * (-(-tiles // splits) + FIXED)

    return min(choices, key=cost, default=1)


def partial_floats(spec: SparseMLASpec, splits: int, rows: int) -> tuple[int, int]:
    """Return the float32 that the parts' outputs and LSEs take; none where there is one part."""
    states = rows * splits * spec.num_heads if splits > 1 else 0
    return states * spec.kv_rank, states


def sparse_mla(spec: SparseMLASpec, limits: Limits, arch: str) -> Sizes:
    """Return the sizes of a plan of ``sparse_mla``: the parts, where keys are split."""
    return Sizes(workspace=4 * sum(partial_floats(spec, cut(spec, limits, arch).splits, limits.max_rows)))
