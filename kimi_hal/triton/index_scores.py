"""The kernels of ``indexer_logits``: ``S[t, j] = Σ_h w[t, h] · relu(q[t, h] · k_j)`` on tensor cores.

Keys are the tall operand ``[BN keys, 128]`` and the heads of ``BM`` rows the wide one ``[BM · HP, 128]``, so that
one row alone fills a matrix instruction, and rows of one request read a key page once. FP8 is multiplied as
float16, MXFP4 with its scales as bfloat16: both hold every factor exactly, and products are added in float32.
FP8 instructions are not used, since some add with fewer bits than the contract asks for.

A score's bits depend on its row and its key alone: work is cut by keys and rows, never inside a sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kimi_hal.triton.index_pages import element_offset, scale_offset
from kimi_hal.triton.minifloat import decode_e2m1, decode_e8m0, decode_fp8
from kimi_hal.triton.shards import local_length

#: Arguments that change from step to step: no kernel is compiled anew for one that is 1 or a multiple of 16.
COUNTS = ("rows", "requests", "pages", "room")
#: Above every request's number.
NO_REQUEST = tl.constexpr(2147483647)


@triton.jit
def row_bounds(
    row,
    row_req,
    row_len,
    req_stride,
    len_stride,
    rows,
    requests,
    room,
    WORLD: tl.constexpr,
    RANK: tl.constexpr,
    INTERLEAVE: tl.constexpr,
):
    """Return each row's local keys, clamped to ``room``, and its request; no keys where that does not exist."""
    at = row.to(tl.int64)
    length = tl.load(row_len + at * len_stride, mask=row < rows, other=0)
    keys = tl.minimum(local_length(length, WORLD, RANK, INTERLEAVE), room)
    request = tl.load(row_req + at * req_stride, mask=keys > 0, other=-1)
    return tl.where((request >= 0) & (request < requests), keys, 0), request


@triton.jit
def scaled_e2m1(code, scale, SHAPE: tl.constexpr):
    """Return e2m1 codes times float32 scales as bfloat16 ``SHAPE``."""
    value = decode_e2m1(code).to(tl.float32) * tl.reshape(scale, SHAPE)
    return value.to(tl.bfloat16)


@triton.jit
def spread(scale, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """Repeat the scale of each group for its 16 bytes: ``[ROWS, GROUPS]`` to ``[ROWS, GROUPS, 16]``."""
    return tl.broadcast_to(scale[:, :, None], (ROWS, GROUPS, 16))


@triton.jit
def load_scale(
    page_at,
    token,
    present,
    SCALE: tl.constexpr,
    PAGE: tl.constexpr,
    BYTES: tl.constexpr,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
):
    """Return the scales of keys as float32: ``[keys, 4]`` for e8m0, else ``[keys]``; 1 where there is no key."""
    if SCALE == "e8m0":
        four = tl.arange(0, 4)
        at = page_at[:, None] + scale_offset(token[:, None], four[None, :], PAGE, BYTES, TILE, LANES)
        scale = decode_e8m0(tl.load(at, mask=present[:, None], other=127))
    elif SCALE == "ue8m0x4":
        at = page_at + scale_offset(token, 0, PAGE, BYTES, TILE, LANES)
        scale = decode_e8m0(tl.load(at, mask=present, other=127))
    else:
        at = page_at + scale_offset(token, 0, PAGE, BYTES, TILE, LANES)
        scale = tl.load(at.to(tl.pointer_type(tl.float32), bitcast=True), mask=present, other=1.0)
    return scale


@triton.jit
def score_rows(
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
    block,
    start,
    stop,
    H: tl.constexpr,
    HP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    PAGE: tl.constexpr,
    BYTES: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    LANES: tl.constexpr,
    NATIVE: tl.constexpr,
    WORLD: tl.constexpr,
    RANK: tl.constexpr,
    INTERLEAVE: tl.constexpr,
):
    """Score the ``BM`` rows of a block against local positions ``start`` to ``stop`` of their requests."""
    N: tl.constexpr = BM * HP
    row = block * BM + tl.arange(0, BM)
    keys, request = row_bounds(
        row, row_req, row_len, req_stride, len_stride, rows, requests, room, WORLD, RANK, INTERLEAVE
    )
    n = tl.arange(0, N)
    q_at_row = (block * BM + n // HP).to(tl.int64)
    head = n % HP
    live = (q_at_row < rows) & (head < H)
    byte = tl.arange(0, BYTES)
    q_at = q + (q_at_row * q_row + head * q_head)[:, None] + byte[None, :]
    q_code = tl.load(q_at, mask=live[:, None], other=0)
    w = tl.load(weights + q_at_row * weights_row + head, mask=live, other=0.0).to(tl.float32)
    if ELEMENT == "e2m1":
        group = tl.arange(0, 4)
        scales_at = q_scale + (q_at_row * q_scale_row + head * q_scale_head)[:, None] + group[None, :]
        qs = spread(decode_e8m0(tl.load(scales_at, mask=live[:, None], other=127)), N, 4)
        q_low = tl.trans(scaled_e2m1(q_code.to(tl.int16) & 15, qs, (N, BYTES)))
        q_high = tl.trans(scaled_e2m1(q_code.to(tl.int16) >> 4, qs, (N, BYTES)))
    else:
        q_all = tl.trans(decode_fp8(q_code, ELEMENT, NATIVE))

    todo = tl.where(keys > 0, request, NO_REQUEST)
    current = tl.min(todo)
    while current != NO_REQUEST:
        mine = todo == current
        longest = tl.minimum(tl.max(tl.where(mine, keys, 0)), stop)
        table = block_table + current.to(tl.int64) * table_row
        for first in tl.range(start, longest, BN, num_stages=STAGES):
            position = first + tl.arange(0, BN)
            page = tl.load(table + position // PAGE, mask=position < longest, other=-1)
            present = (page >= 0) & (page < pages)
            page_at = cache + page.to(tl.int64) * cache_page
            token = position % PAGE
            at = page_at[:, None] + element_offset(token[:, None], byte[None, :], BYTES, TILE, CHUNK)
            code = tl.load(at, mask=present[:, None], other=0)
            scale = load_scale(page_at, token, present, SCALE, PAGE, BYTES, TILE, LANES)
            if ELEMENT == "e2m1":
                ks = spread(scale, BN, 4)
                wide = code.to(tl.int16)
                dots = tl.dot(scaled_e2m1(wide & 15, ks, (BN, BYTES)), q_low)
                dots = tl.dot(scaled_e2m1(wide >> 4, ks, (BN, BYTES)), q_high, dots)
            else:
                dots = tl.dot(decode_fp8(code, ELEMENT, NATIVE), q_all)
            terms = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL) * w[None, :]
            if HP != H:
                terms = tl.where((head < H)[None, :], terms, 0.0)
            score = tl.sum(tl.reshape(terms, (BN, BM, HP)), axis=2)
            if ELEMENT != "e2m1":
                score *= scale[:, None]
            score = tl.where(present[:, None], score, float("-inf"))
            out_at = out + row.to(tl.int64)[None, :] * out_row + position[:, None]
            wanted = mine[None, :] & (position[:, None] < tl.minimum(keys, stop)[None, :])
            tl.store(out_at, score.to(out.dtype.element_ty), mask=wanted)
        todo = tl.where(mine, NO_REQUEST, todo)
        current = tl.min(todo)


@triton.jit(do_not_specialize=COUNTS)
def scores_by_place(
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
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    LANES: tl.constexpr,
    NATIVE: tl.constexpr,
    WORLD: tl.constexpr,
    RANK: tl.constexpr,
    INTERLEAVE: tl.constexpr,
):
    """Score one block of rows against ``span`` local positions; beyond the block's last key nothing is done.

    Programs that run together share their keys, not their rows: a page is read from memory once.
    """
    start = tl.program_id(1) * span
    score_rows(
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
        tl.program_id(0),
        start,
        start + span,
        H,
        HP,
        BM,
        BN,
        STAGES,
        ELEMENT,
        SCALE,
        PAGE,
        BYTES,
        TILE,
        CHUNK,
        LANES,
        NATIVE,
        WORLD,
        RANK,
        INTERLEAVE,
    )


@triton.jit(do_not_specialize=COUNTS)
def scores_balanced(
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
    unit,
    programs,
    BLOCKS: tl.constexpr,
    H: tl.constexpr,
    HP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    PAGE: tl.constexpr,
    BYTES: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    LANES: tl.constexpr,
    NATIVE: tl.constexpr,
    WORLD: tl.constexpr,
    RANK: tl.constexpr,
    INTERLEAVE: tl.constexpr,
):
    """Score an equal share of all rows' keys, counted in units of ``unit`` local positions, whoever has them."""
    block = tl.arange(0, BLOCKS)
    row = block[:, None] * BM + tl.arange(0, BM)[None, :]
    length = tl.load(row_len + row.to(tl.int64) * len_stride, mask=row < rows, other=0)
    keys = tl.max(tl.minimum(local_length(length, WORLD, RANK, INTERLEAVE), room), axis=1)
    units = (keys + unit - 1) // unit
    ends = tl.cumsum(units, 0)
    total = tl.sum(units)
    share = (total + programs - 1) // programs
    now = tl.program_id(0) * share
    last = tl.minimum(now + share, total)
    while now < last:
        mine = tl.sum((ends <= now).to(tl.int32))
        end = tl.sum(tl.where(block == mine, ends, 0))
        begin = end - tl.sum(tl.where(block == mine, units, 0))
        stop = tl.minimum(last, end)
        score_rows(
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
            mine,
            (now - begin) * unit,
            (stop - begin) * unit,
            H,
            HP,
            BM,
            BN,
            STAGES,
            ELEMENT,
            SCALE,
            PAGE,
            BYTES,
            TILE,
            CHUNK,
            LANES,
            NATIVE,
            WORLD,
            RANK,
            INTERLEAVE,
        )
        now = stop
