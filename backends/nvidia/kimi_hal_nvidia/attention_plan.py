"""How ``sparse_mla`` is cut for a plan, from Spec and Limits alone: a row's bits depend on nothing but the row."""

from __future__ import annotations

from kimi_hal.ops.sparse_mla import SparseMLASpec
from kimi_hal.ops.spec import Limits

#: Keys of a tile, as in ``sparse_mla.cu``.
KEYS = 64
#: Multiprocessors, each of which has room for one block.
PROCESSORS = 132
#: Clusters that an H200 runs at once, by their blocks, which are the parts of a row: its multiprocessors stand in
#: groups of 16 and 18, and one of fewer.
CLUSTERS = {1: 132, 2: 66, 3: 43, 4: 31, 6: 20, 8: 15, 12: 7, 16: 7}
#: Microseconds of a tile of 16 and of 32 heads, and of everything else of a row that is not cut and of one that is:
#: measured on an H200.
TILE, WHOLE, CUT = {16: 1.3, 32: 1.9}, 2.0, 12.0


def heads_of(spec: SparseMLASpec) -> int:
    """Return the heads of a block: 16 or 32."""
    return 16 if spec.num_heads <= 16 else 32


def head_blocks(spec: SparseMLASpec) -> int:
    """Return the blocks of a row's heads."""
    return -(-spec.num_heads // heads_of(spec))


def tiles(spec: SparseMLASpec) -> int:
    """Return the tiles of a row's keys."""
    return -(-spec.topk // KEYS)


def parts_of(spec: SparseMLASpec, limits: Limits) -> int:
    """Return into how many parts a row's tiles are cut: what takes the least time."""
    every, items, tile = tiles(spec), limits.max_rows * head_blocks(spec), TILE[heads_of(spec)]

    def cost(parts: int) -> float:
        rounds = -(-items // CLUSTERS[parts])
        return rounds * (-(-every // parts) * tile + (WHOLE if parts == 1 else CUT))

    return min((parts for parts in CLUSTERS if parts <= every), key=cost, default=1)


def configurations(spec: SparseMLASpec, limits: Limits, arch: str) -> tuple[dict[str, int], ...]:
    """Return the ways of cutting that ``kimi-hal bench --tune`` tries beside the choice of ``parts_of``."""
    return tuple({"parts": parts} for parts in CLUSTERS if parts <= tiles(spec))
