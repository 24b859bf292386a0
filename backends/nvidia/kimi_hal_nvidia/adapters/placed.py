"""Scores of another library into the caller's buffer: a row's own columns alone, −inf for a key that has no page."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

PAGE = tl.constexpr(64)
#: Columns that a program moves.
BLOCK = 1024


@triton.jit
def _place(
    scores,
    counts,
    table,
    line,
    out,
    score_stride,
    table_stride,
    out_stride,
    pages,
    room,
    EACH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Move ``BLOCK`` columns of one row; nothing behind its keys is read or written."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = (column < tl.load(counts + row)) & (column < room)
    at = row // EACH
    if line is not None:
        at = tl.load(line + row).to(tl.int64)
    page = tl.load(table + at * table_stride + column // PAGE, mask=live, other=-1)
    score = tl.load(scores + row * score_stride + column, mask=live, other=0.0)
    score = tl.where((page >= 0) & (page < pages), score, float("-inf"))
    tl.store(out + row * out_stride + column, score, mask=live)


def place(
    scores: Tensor, counts: Tensor, table: Tensor, line: Any, each: int, pages: int, out: Tensor, room: int
) -> None:
    """Write ``scores [T, *]`` into ``out [T, L]``; there is at least one row.

    Args:
        scores: float32, as a library left them.
        counts: ``[T]`` int32 keys of each row.
        table: ``[lines, columns]`` int32 pages.
        line: ``[T]`` int32 line of each row, or None: ``each`` rows to a line.
        each: rows of a line.
        pages: of the cache.
        out: where they belong.
        room: columns that the table and ``out`` both have.
    """
    _place[(scores.shape[0], triton.cdiv(room, BLOCK))](
        scores,
        counts,
        table,
        line,
        out,
        scores.stride(0),
        table.stride(0),
        out.stride(0),
        pages,
        room,
        EACH=each,
        BLOCK=BLOCK,
    )
