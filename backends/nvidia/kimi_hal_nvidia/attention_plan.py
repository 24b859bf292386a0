"""How ``sparse_mla`` is cut for a plan, from Spec and Limits alone: a row's bits depend on nothing but the row."""

from __future__ import annotations

from kimi_hal.ops.sparse_mla import SparseMLASpec
from kimi_hal.ops.spec import Limits

#: Heads of a block and keys of a tile, as in ``sparse_mla.cu``.
HEADS, KEYS = 16, 64
#: Multiprocessors, each of which has room for two blocks.
PROCESSORS = 132
#: Microseconds that a tile takes of a block that has a multiprocessor for itself, and of one that shares it.
ALONE, SHARED = 2.4, 3.9
#: Microseconds of everything else, by parts of a row: measured on an H200, as all of these.
BESIDE = {1: 8.0, 2: 11.0, 4: 22.0, 8: 24.0, 16: 24.0}


def head_blocks(spec: SparseMLASpec) -> int:
    """Return the blocks of a row's heads."""
    return -(-spec.num_heads // HEADS)


def tiles(spec: SparseMLASpec) -> int:
    """Return the tiles of a row's keys."""
    return -(-spec.topk // KEYS)


def parts_of(spec: SparseMLASpec, limits: Limits) -> int:
    """Return into how many parts a row's tiles are cut, a power of two: what takes the least time."""
    every, programs = tiles(spec), limits.max_rows * head_blocks(spec)

    def cost(parts: int) -> float:
        each = -(-every // parts)
        pairs, single = divmod(-(-programs * parts // PROCESSORS), 2)
        return pairs * (each * SHARED + BESIDE[parts]) + single * (each * ALONE + BESIDE[parts])

    return min((parts for parts in BESIDE if parts <= every), key=cost, default=1)


def configurations(spec: SparseMLASpec, limits: Limits, arch: str) -> tuple[dict[str, int], ...]:
    """Return the ways of cutting that ``kimi-hal bench --tune`` tries beside the choice of ``parts_of``."""
    return tuple({"parts": parts} for parts in BESIDE if parts <= tiles(spec))
