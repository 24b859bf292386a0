"""How the portable latent kernels are cut for a Spec: formats, blocks of heads, tiles and splits of keys, bytes.

All of it follows from Spec, Limits and architecture, before a device exists; no number of a call changes it.
So a row's bits depend on nothing but the row. Imports neither torch nor Triton.
"""

from __future__ import annotations

from dataclasses import dataclass

from kimi_hal.dispatch.contract import Sizes
from kimi_hal.ops.sparse_mla import SparseMLASpec
from kimi_hal.ops.spec import Limits

#: Format -> what the kernels call it, GROUP of its latents, of its key part, the exponent it is left small by.
FORMATS = {
    "latent.fp8.e4m3fn.tensor": ("e4m3fn", 2, 2, 120),
    "latent.fp8.e4m3fnuz.tensor": ("e4m3fnuz", 2, 2, 119),
    "latent.nvfp4.352": ("nvfp4", 4, 2, 120),
    "latent.flashmla.656": ("flashmla", 2, 1, 0),
    "latent.bf16": ("bf16", 1, 1, 0),
}
#: Architectures whose matrix units are known to keep subnormal bfloat16 numbers.
SUBNORMAL = ("sm_90", "sm_100", "sm_103")
#: Heads of a block: a power of two, from the dot's least to what the registers hold.
LEAST_HEADS, MOST_HEADS = 16, 32
#: Programs that a decode plan aims at: two for each multiprocessor of a large device.
PROGRAMS = 264
#: The fewest keys of a split, and the most splits.
LEAST_CHUNK, MOST_SPLITS = 64, 32


@dataclass(frozen=True)
class Cut:
    """The sizes of one plan's launches.

    Args:
        small: exponent by which keys are left smaller than they are.
        heads: heads of a program.
        keys: keys of a tile.
        splits: parts of a row's keys, a power of two.
        chunk: indices of a part, whole tiles.
        warps: warps of a program.
        stages: depth of the loads' pipeline.
    """

    small: int
    heads: int
    keys: int
    splits: int
    chunk: int
    warps: int
    stages: int


def cut(spec: SparseMLASpec, limits: Limits, arch: str) -> Cut:
    """Return the sizes for a Spec, Limits and architecture (``""``: unknown)."""
    heads = head_block(spec.num_heads)
    keys = 64
    splits = split_count(spec.topk, keys, limits.max_rows * -(-spec.num_heads // heads))
    chunk = -(-spec.topk // (splits * keys)) * keys
    return Cut(
        small=FORMATS[spec.latent][3] if arch in SUBNORMAL else 0,
        heads=heads,
        keys=keys,
        splits=splits,
        chunk=chunk,
        warps=4 if heads == LEAST_HEADS else 8,
        stages=2,
    )


def head_block(num_heads: int) -> int:
    """Return the largest block whose multiples reach ``num_heads`` with fewer than 16 heads of padding."""
    blocks = -(-num_heads // LEAST_HEADS)
    return min(LEAST_HEADS * (blocks & -blocks), MOST_HEADS)


def split_count(topk: int, keys: int, programs: int) -> int:
    """Return into how many parts a row's keys are split, a power of two: enough programs, none without a tile."""
    most = min(MOST_SPLITS, PROGRAMS // max(1, programs), -(-topk // max(keys, LEAST_CHUNK)))
    return 1 << max(0, most.bit_length() - 1)


def partial_floats(spec: SparseMLASpec, splits: int, rows: int) -> tuple[int, int]:
    """Return the float32 that the parts' outputs and LSEs take; none where there is one part."""
    states = rows * splits * spec.num_heads if splits > 1 else 0
    return states * spec.kv_rank, states


def sparse_mla(spec: SparseMLASpec, limits: Limits, arch: str) -> Sizes:
    """Return the sizes of a plan of ``sparse_mla``: the parts, where keys are split."""
    return Sizes(workspace=4 * sum(partial_floats(spec, cut(spec, limits, arch).splits, limits.max_rows)))
