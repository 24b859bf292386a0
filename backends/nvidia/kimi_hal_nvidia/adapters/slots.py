"""Indices of any space as FlashMLA takes them: rows of its cache, −1 for what contributes nothing, in whole tiles."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kimi_hal.ops.sparse_mla import SparseMLASpec
from kimi_hal.triton.latent_rows import locate

#: Indices that a program turns.
BLOCK = 1024


@triton.jit
def _turn(
    indices,
    index_len,
    block_table,
    row_req,
    out,
    index_stride,
    len_stride,
    table_stride,
    req_stride,
    count,
    padded,
    requests,
    columns,
    pages,
    page_units,
    row_units,
    SPACE: tl.constexpr,
    PAGE: tl.constexpr,
    WORLD: tl.constexpr,
    RANK: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Turn ``BLOCK`` indices of one row; what does not count is −1."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < count
    if index_len is not None:
        live = live & (column < tl.load(index_len + row * len_stride))
    index = tl.load(indices + row * index_stride + column, mask=live, other=-1)
    live = live & (index >= 0)
    table = block_table
    if SPACE != "slot":
        request = tl.load(row_req + row * req_stride)
        live = live & (request >= 0) & (request < requests)
        table = (
            block_table
            + tl.where((request >= 0) & (request < requests), request, 0).to(tl.int64) * table_stride
        )
    page, place, live = locate(index, live, table, columns, pages, SPACE, PAGE, WORLD, RANK, INTERLEAVE)
    slot = tl.where(live, page * page_units + place * row_units, -1).to(tl.int32)
    tl.store(out + row * padded + column, slot, mask=column < padded)


def turn(
    spec: SparseMLASpec,
    indices: Tensor,
    index_len: Any,
    block_table: Any,
    row_req: Any,
    pages: int,
    multiple: int,
    units: tuple[int, int],
) -> Tensor:
    """Return ``[T, k']`` int32 rows of the cache, ``k'`` the next multiple; there is at least one row.

    Args:
        spec: what an index means.
        indices: ``[T, k]`` int32.
        index_len: ``[T]`` int32 or None.
        block_table: ``[R, blocks]`` int32 or None.
        row_req: ``[T]`` int32 or None.
        pages: of the cache.
        multiple: that FlashMLA takes.
        units: how far a page and a row of it are, in what FlashMLA's indices count.
    """
    rows, count = indices.shape
    padded = max(multiple, -(-count // multiple) * multiple)
    out = indices.new_empty((rows, padded))
    table = (0, 0) if block_table is None else block_table.shape
    _turn[(rows, triton.cdiv(padded, BLOCK))](
        indices,
        index_len,
        block_table,
        row_req,
        out,
        indices.stride(0),
        0 if index_len is None else index_len.stride(0),
        0 if block_table is None else block_table.stride(0),
        0 if row_req is None else row_req.stride(0),
        count,
        padded,
        *table,
        pages,
        *units,
        SPACE=spec.index_space,
        PAGE=spec.page,
        WORLD=spec.dcp.world,
        RANK=spec.dcp.rank,
        INTERLEAVE=spec.dcp.interleave,
        BLOCK=BLOCK,
    )
    return out
