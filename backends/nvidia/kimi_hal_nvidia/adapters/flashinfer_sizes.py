"""Bytes that FlashInfer's attention wants, known without a device and without the library. Imports no torch.

Its kernels ask for one buffer and cut it up themselves; how large it must be is said by their launchers alone.
"""

from __future__ import annotations

from typing import Any

from kimi_hal import formats
from kimi_hal.dispatch.contract import Sizes
from kimi_hal.ops.sparse_mla import SparseMLASpec
from kimi_hal.ops.spec import Limits

#: Rows of a call that go to a library at a time. More than 64 the sm_120 kernels leave to others, of prefills, which
#: are compiled for some numbers of heads and indices, and of which hangs were reported.
TRTLLM_ROWS, RECORD_ROWS, XQA_ROWS = 256, 64, 64
#: TRT-LLM's kernels: counters of the blocks that share a row, 4 bytes for each row and head of a part.
COUNTERS = 4 * TRTLLM_ROWS * 128
#: What those blocks leave to each other: a launch fills the device once, 128 queries of 512 numbers a block at most.
PARTS = 128 << 20
#: With an LSE, 256 places of 8 bytes for each row and head, and a guard behind them.
PLACES, GUARD = 256 * 8, 1 << 20
#: The sm_120 kernels split a row's keys by 64, at most; a part leaves 512 bfloat16 and its LSE for each of whole
#: sixteens of heads.
SPLIT, PART, TILE = 64, 512 * 2 + 4, 16
#: More than aligning what they cut off takes.
ALIGNED = 1024
#: XQA: where its marks are kept, those of a part's rows, and what two blocks exchange for each row.
XQA_SEMAPHORES, XQA_MARKS, XQA_EXCHANGE = 8 << 20, 256 * XQA_ROWS, 1 << 15
XQA_OWN = XQA_SEMAPHORES + XQA_EXCHANGE * XQA_ROWS


def trtllm_heads(heads: int) -> int:
    """Return the heads that TRT-LLM's kernels take these as: there are none for 65 to 127."""
    return 128 if heads > 64 else heads


def cut(workspace: Any, size: int) -> tuple[Any, Any]:
    """Return the first bytes and the others."""
    return workspace[:size], workspace[size:]


def _padded(topk: int) -> int:
    return max(128, -(-topk // 128) * 128)


def rows(spec: SparseMLASpec, limits: Limits, arch: str) -> Sizes:
    """Return the sizes of a plan of TRT-LLM's kernels."""
    size = COUNTERS + PARTS
    if spec.return_lse:
        together = min(limits.max_rows, TRTLLM_ROWS)
        size += PLACES * together * trtllm_heads(spec.num_heads) + GUARD
    return Sizes(workspace=size)


def records(spec: SparseMLASpec, limits: Limits, arch: str) -> Sizes:
    """Return the sizes of a plan of the sm_120 kernels."""
    heads = -(-spec.num_heads // TILE) * TILE
    parts = heads * (_padded(spec.topk) // SPLIT) * PART
    sums = 4 * heads
    return Sizes(workspace=_whole(min(limits.max_rows, RECORD_ROWS) * (parts + sums)) + ALIGNED)


def pages(spec: SparseMLASpec, limits: Limits, arch: str) -> Sizes:
    """Return the sizes of a plan of XQA: its own, and the gathered rows."""
    together = min(limits.max_rows, XQA_ROWS)
    row_bytes = formats.latent(spec.latent).row_bytes
    return Sizes(workspace=_whole(XQA_OWN + together * _padded(spec.topk) * row_bytes))


def _whole(size: int) -> int:
    return -(-size // 256) * 256
