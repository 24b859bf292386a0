"""Blackwell's kernel of ``indexer_logits``: FP8 and MXFP4 numbers go to the matrix unit as they stand in memory.

Keys are the tall operand ``[KEYS, 128]`` and the heads of some rows the wide one. An FP8 key is multiplied without its
scale, which multiplies the score; MXFP4 keys and queries are multiplied with theirs, one for each 32 numbers, by the
unit itself (``tcgen05.mma`` of kind ``f8f6f4`` and ``mxf4.block_scale``). Sums stand in tensor memory and are read back
a key a thread, so that ReLU, weights and the sum over heads stay inside a thread.

Nothing is decoded, so a tile of keys goes from global to shared memory by asynchronous copies alone. The unit cuts what
it adds instead of rounding it (``docs/nvidia.md`` says what is known), hence the numerics class ``logits=fp8_sum``.

A score's bits depend on its row and its key alone: work is cut by keys and rows, never inside a sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kimi_hal.triton.index_scores import COUNTS, NO_REQUEST, load_scale, row_bounds

#: The unit's instructions have 128 rows of keys.
KEYS = 128


@triton.jit
def load_numbers(at, wanted, ELEMENT: tl.constexpr):
    """Load bytes as what the matrix unit takes: FP8 numbers, or pairs of e2m1; zeros where nothing is wanted."""
    if ELEMENT == "e2m1":
        numbers = tl.load(at, mask=wanted, other=0)
    else:
        numbers = tl.load(at.to(tl.pointer_type(tl.float8e4nv), bitcast=True), mask=wanted, other=0.0)
    return numbers


@triton.jit(do_not_specialize=COUNTS)
def scores(
    q,
    q_scale,
    weights,
    cache,
    block_table,
    row_req,
    row_len,
    out,
    q_row,
    q_head,
    q_scale_row,
    q_scale_head,
    weights_row,
    cache_page,
    table_row,
    req_stride,
    len_stride,
    out_row,
    rows,
    requests,
    pages,
    room,
    span,
    H: tl.constexpr,
    HP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    PAGE: tl.constexpr,
    BYTES: tl.constexpr,
    WORLD: tl.constexpr,
    RANK: tl.constexpr,
    INTERLEAVE: tl.constexpr,
):
    """Score a block of ``BM`` rows against ``span`` local positions of each of their requests.

    Programs that run together share their keys, not their rows: a page is read from memory once.
    """
    N: tl.constexpr = BM * HP
    start = tl.program_id(1) * span
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    keys, request = row_bounds(
        row, row_req, row_len, req_stride, len_stride, rows, requests, room, WORLD, RANK, INTERLEAVE
    )
    n = tl.arange(0, N)
    q_at_row = (tl.program_id(0) * BM + n // HP).to(tl.int64)
    head = n % HP
    live = (q_at_row < rows) & (head < H)
    byte = tl.arange(0, BYTES)
    group = tl.arange(0, 4)
    q_at = q + (q_at_row * q_row + head * q_head)[:, None] + byte[None, :]
    queries = tl.trans(load_numbers(q_at, live[:, None], ELEMENT))
    w = tl.load(weights + q_at_row * weights_row + head, mask=live, other=0.0).to(tl.float32)
    if ELEMENT == "e2m1":
        scales_at = q_scale + (q_at_row * q_scale_row + head * q_scale_head)[:, None] + group[None, :]
        query_scales = tl.load(scales_at, mask=live[:, None], other=0)

    todo = tl.where(keys > start, request, NO_REQUEST)
    current = tl.min(todo)
    while current != NO_REQUEST:
        mine = todo == current
        bound = tl.where(mine, tl.minimum(keys, start + span), 0)
        longest = tl.max(bound)
        table = block_table + current.to(tl.int64) * table_row
        for first in tl.range(start, longest, BN, num_stages=STAGES):
            position = first + tl.arange(0, BN)
            page = tl.load(table + position // PAGE, mask=position < longest, other=-1)
            present = (page >= 0) & (page < pages)
            page_at = cache + page.to(tl.int64) * cache_page
            token = position % PAGE
            at = page_at[:, None] + (token * BYTES)[:, None] + byte[None, :]
            numbers = load_numbers(at, present[:, None], ELEMENT)
            if ELEMENT == "e2m1":
                scale_at = page_at[:, None] + (PAGE * BYTES + token * 4)[:, None] + group[None, :]
                key_scales = tl.load(scale_at, mask=present[:, None], other=0)
                dots = tl.dot_scaled(numbers, key_scales, "e2m1", queries, query_scales, "e2m1")
            else:
                scale = load_scale(page_at, token, present, SCALE, PAGE, BYTES, 1, 1)
                dots = tl.dot(numbers, queries)
            terms = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL) * w[None, :]
            if HP != H:
                terms = tl.where((head < H)[None, :], terms, 0.0)
            score = tl.sum(tl.reshape(terms, (BN, BM, HP)), axis=2)
            if ELEMENT != "e2m1":
                score *= scale[:, None]
            score = tl.where(present[:, None], score, float("-inf"))
            out_at = out + row.to(tl.int64)[None, :] * out_row + position[:, None]
            tl.store(out_at, score.to(out.dtype.element_ty), mask=position[:, None] < bound[None, :])
        todo = tl.where(mine, NO_REQUEST, todo)
        current = tl.min(todo)
