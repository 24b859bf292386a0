"""Bytes of workspace that the CUDA kernels need, known without a device. Imports neither torch nor the driver."""

from __future__ import annotations

from kimi_hal.dispatch.contract import Sizes
from kimi_hal.ops.indexer import IndexerTopKSpec, logits_width
from kimi_hal.ops.spec import Limits
from kimi_hal.triton.sizes import SCORES, SELECT_ROWS


def indexer_topk(spec: IndexerTopKSpec, limits: Limits, arch: str) -> Sizes:
    """Return the sizes of a plan of ``indexer_topk``: the scores of some rows, in whole pages."""
    itemsize = 4 if spec.score == "float32" else 2
    width = -(-logits_width(spec, limits, 0) // spec.page) * spec.page
    held = min(max(SCORES, width * itemsize), width * itemsize * min(limits.max_rows, SELECT_ROWS))
    return Sizes(workspace=-(-held // 256) * 256)
