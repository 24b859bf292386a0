"""Bytes of workspace that the portable kernels need, known without a device. Imports neither torch nor Triton."""

from __future__ import annotations

from kimi_hal.dispatch.contract import Sizes
from kimi_hal.ops.indexer import IndexerTopKSpec, logits_width
from kimi_hal.ops.spec import Limits
from kimi_hal.ops.topk_merge import TopKSpec

#: Rows that one launch selects from, so that scratch stays small however many rows there are.
SELECT_ROWS = 1024
#: Candidates of a row, at most: more would not stay in one program's registers.
MOST_CANDIDATES = 16384
#: Chunks of columns that a row's candidates are counted by; a power of two.
CHUNKS = 64
#: Bytes of scores that ``indexer_topk`` holds at once, unless one row has more.
SCORES = 256 << 20


def candidates(topk: int) -> int:
    """Return the room for candidates of a row, a power of two: 4 k; 0 where k is too large for it."""
    room = max(256, 1 << (4 * topk - 1).bit_length())
    return room if room <= MOST_CANDIDATES else 0


def scratch_words(topk: int) -> int:
    """Return the int32 words of one row's selection: candidates, two words a chunk, two more; whole 256 bytes."""
    room = candidates(topk)
    return -(-(room + 2 * CHUNKS + 2) // 64) * 64 if room else 0


def scratch(topk: int, rows: int) -> int:
    """Return the bytes that selecting ``topk`` from ``rows`` rows needs."""
    return 4 * scratch_words(topk) * min(rows, SELECT_ROWS)


def score_rows(width: int, itemsize: int, rows: int) -> int:
    """Return how many rows of ``width`` scores are held at once."""
    return min(rows, SELECT_ROWS, max(1, SCORES // max(1, width * itemsize)))


def score_bytes(width: int, itemsize: int, rows: int) -> int:
    """Return the bytes of the scores held at once, in whole 256."""
    return -(-score_rows(width, itemsize, rows) * width * itemsize // 256) * 256


def topk_select(spec: TopKSpec, limits: Limits, arch: str) -> Sizes:
    """Return the sizes of a plan of ``topk_select``."""
    return Sizes(workspace=scratch(spec.topk, limits.max_rows))


def indexer_topk(spec: IndexerTopKSpec, limits: Limits, arch: str) -> Sizes:
    """Return the sizes of a plan of ``indexer_topk``: the scores of some rows, and what selecting from them needs."""
    itemsize = 4 if spec.score == "float32" else 2
    width = logits_width(spec, limits, 0)
    held = min(max(SCORES, width * itemsize), width * itemsize * min(limits.max_rows, SELECT_ROWS))
    return Sizes(workspace=-(-held // 256) * 256 + scratch(spec.topk, limits.max_rows))
