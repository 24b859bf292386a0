"""The kernels of ``topk_select``: exact selection under rule 2, in ascending order of position.

One row is one program where it fits: its ordinals stay in registers, the k-th is found bit by bit, and a prefix
sum gives each winner its place. Of the keys equal to the k-th the first ones win.

A longer row is first thinned out. Its columns form ``CAP`` groups, each every ``CAP``-th column; at least k keys
reach the k-th largest of the groups' maxima, so all winners do, and with scores in no special order few others
(1.15 k with ``CAP`` = 4 k). They are collected in ``CAP`` words of scratch and selected from. Where more than
``CAP`` reach it (thousands of equal scores), or NaN are among the winners, the row is selected by digits of its
ordinals instead, eight bits a pass: right for any scores, though by one program.

Scratch of a row, in int32 words: the maxima, then in their place the candidates, ``CAP``; first candidate of each
chunk of columns, ``CHUNKS``; their number, ``CHUNKS``; the threshold; how many candidates are taken. All counts are
sums of integers, so that nothing depends on who comes first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kimi_hal.triton.order import NO_KEY, as_score, kth, ordinal, score_of
from kimi_hal.triton.shards import local_length

#: Bits of a threshold that the maxima need not tell: 2^-15 of its size.
COARSE = tl.constexpr(8)


@triton.jit
def window(
    row,
    row_len,
    row_start,
    row_req,
    len_stride,
    start_stride,
    req_stride,
    requests,
    width,
    HAS_START: tl.constexpr,
    HAS_REQUEST: tl.constexpr,
    WORLD: tl.constexpr,
    RANK: tl.constexpr,
    INTERLEAVE: tl.constexpr,
):
    """Return a row's first column, its number of keys, and its request; none where that does not exist."""
    count = local_length(tl.load(row_len + row * len_stride), WORLD, RANK, INTERLEAVE)
    start = 0
    if HAS_START:
        start = tl.minimum(tl.maximum(tl.load(row_start + row * start_stride), 0), width)
    count = tl.minimum(count, width - start)
    request = -1
    if HAS_REQUEST:
        request = tl.load(row_req + row * req_stride, mask=count > 0, other=-1)
        count = tl.where((request >= 0) & (request < requests), count, 0)
    return start, count, request


@triton.jit
def emit(
    x,
    key,
    position,
    threshold,
    needed,
    equals_before,
    written,
    out_at,
    scores_at,
    table_at,
    pages,
    PAGE: tl.constexpr,
    SLOTS: tl.constexpr,
    SELECTED: tl.constexpr,
):
    """Write a block's winners behind those ``written``; return how many equals and winners there are by now.

    Winners are the keys above ``threshold`` and the first ``needed`` of those equal to it.
    """
    above = (key > threshold).to(tl.int32)
    equal = ((key == threshold) & (key != NO_KEY)).to(tl.int32)
    both = tl.cumsum(above + (equal << 16), 0)
    equals = equals_before + (both >> 16)
    wins = (above == 1) | ((equal == 1) & (equals <= needed))
    if SLOTS:
        page = tl.load(table_at + position // PAGE, mask=wins, other=-1)
        wins = wins & (page >= 0) & (page < pages)
        place = written + tl.cumsum(wins.to(tl.int32), 0) - 1
        value = page * PAGE + position % PAGE
    else:
        skipped = tl.minimum(equals_before, needed)
        place = written + (both & 0xFFFF) + tl.minimum(equals, needed) - skipped - 1
        value = position
    tl.store(out_at + place, value, mask=wins)
    if SELECTED:
        tl.store(scores_at + place, x.to(scores_at.dtype.element_ty), mask=wins)
    return equals_before + tl.sum(equal), written + tl.sum(wins.to(tl.int32))


@triton.jit
def fill(out_at, scores_at, written, k, SELECTED: tl.constexpr, BLOCK: tl.constexpr):
    """Fill the rest of a row of the outputs with −1 and −inf."""
    for first in range(written, k, BLOCK):
        place = first + tl.arange(0, BLOCK)
        tl.store(out_at + place, -1, mask=place < k)
        if SELECTED:
            tl.store(scores_at + place, float("-inf"), mask=place < k)


@triton.jit
def select_short(
    scores,
    row_len,
    row_start,
    out,
    scores_out,
    block_table,
    row_req,
    scores_row,
    len_stride,
    start_stride,
    out_row,
    scores_out_row,
    table_row,
    req_stride,
    requests,
    pages,
    width,
    k,
    BLOCK: tl.constexpr,
    ROUND: tl.constexpr,
    LOW: tl.constexpr,
    HAS_START: tl.constexpr,
    HAS_REQUEST: tl.constexpr,
    PAGE: tl.constexpr,
    SLOTS: tl.constexpr,
    SELECTED: tl.constexpr,
    WORLD: tl.constexpr,
    RANK: tl.constexpr,
    INTERLEAVE: tl.constexpr,
):
    """Select from one row of at most ``BLOCK`` columns."""
    row = tl.program_id(0).to(tl.int64)
    start, count, request = window(
        row,
        row_len,
        row_start,
        row_req,
        len_stride,
        start_stride,
        req_stride,
        requests,
        width,
        HAS_START,
        HAS_REQUEST,
        WORLD,
        RANK,
        INTERLEAVE,
    )
    position = tl.arange(0, BLOCK)
    live = position < count
    x = as_score(tl.load(scores + row * scores_row + start + position, mask=live, other=0.0), ROUND)
    key = ordinal(x, live, LOW)
    threshold = kth(key, k, LOW)
    needed = k - tl.sum((key > threshold).to(tl.int32))
    out_at = out + row * out_row
    scores_at = scores_out + row * scores_out_row
    table_at = block_table + request.to(tl.int64) * table_row if SLOTS else block_table
    _, written = emit(
        x,
        key,
        position,
        threshold,
        needed,
        0,
        0,
        out_at,
        scores_at,
        table_at,
        pages,
        PAGE,
        SLOTS,
        SELECTED,
    )
    fill(out_at, scores_at, written, k, SELECTED, BLOCK)


@triton.jit
def group_maxima(
    scores,
    row_len,
    row_start,
    row_req,
    scratch,
    scores_row,
    len_stride,
    start_stride,
    req_stride,
    scratch_row,
    requests,
    width,
    CAP: tl.constexpr,
    GROUPS: tl.constexpr,
    STEPS: tl.constexpr,
    HAS_START: tl.constexpr,
    HAS_REQUEST: tl.constexpr,
    WORLD: tl.constexpr,
    RANK: tl.constexpr,
    INTERLEAVE: tl.constexpr,
):
    """Write the maxima of ``GROUPS`` groups of a row, NaN left out, −inf for an empty group."""
    row = tl.program_id(1).to(tl.int64)
    start, count, _ = window(
        row,
        row_len,
        row_start,
        row_req,
        len_stride,
        start_stride,
        req_stride,
        requests,
        width,
        HAS_START,
        HAS_REQUEST,
        WORLD,
        RANK,
        INTERLEAVE,
    )
    at = scores + row * scores_row + start
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    best = tl.full((STEPS, GROUPS), float("-inf"), tl.float32)
    for first in range(0, count, CAP * STEPS):
        position = first + (tl.arange(0, STEPS) * CAP)[:, None] + group[None, :]
        x = tl.load(at + position, mask=position < count, other=float("-inf")).to(tl.float32)
        best = tl.maximum(best, tl.where(x == x, x, float("-inf")))
    most = tl.max(best, axis=0)
    tl.store(scratch + row * scratch_row + group, most.to(tl.int32, bitcast=True))


@triton.jit
def group_threshold(
    scratch,
    scratch_row,
    k,
    CAP: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROUND: tl.constexpr,
):
    """Write a score that at least k keys of a row reach, and that no candidate is taken yet."""
    words = scratch + tl.program_id(0).to(tl.int64) * scratch_row
    best = tl.load(words + tl.arange(0, CAP)).to(tl.float32, bitcast=True)
    key = ordinal(as_score(best, ROUND), tl.full((CAP,), True, tl.int1), 16 if ROUND else 0)
    threshold = score_of(kth(key, k, 16 if ROUND else COARSE))
    tl.store(words + CAP + 2 * CHUNKS, threshold.to(tl.int32, bitcast=True))
    tl.store(words + CAP + 2 * CHUNKS + 1, 0)


@triton.jit
def collect(
    scores,
    row_len,
    row_start,
    row_req,
    scratch,
    scores_row,
    len_stride,
    start_stride,
    req_stride,
    scratch_row,
    requests,
    width,
    span,
    CAP: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUND: tl.constexpr,
    HAS_START: tl.constexpr,
    HAS_REQUEST: tl.constexpr,
    WORLD: tl.constexpr,
    RANK: tl.constexpr,
    INTERLEAVE: tl.constexpr,
):
    """Append the positions of one chunk's candidates, ``span`` columns, to those of its row."""
    row = tl.program_id(1).to(tl.int64)
    chunk = tl.program_id(0)
    start, count, _ = window(
        row,
        row_len,
        row_start,
        row_req,
        len_stride,
        start_stride,
        req_stride,
        requests,
        width,
        HAS_START,
        HAS_REQUEST,
        WORLD,
        RANK,
        INTERLEAVE,
    )
    begin = chunk * span
    end = tl.minimum(begin + span, count)
    if begin < end:
        words = scratch + row * scratch_row
        threshold = tl.load(words + CAP + 2 * CHUNKS).to(tl.float32, bitcast=True)
        at = scores + row * scores_row + start
        found = 0
        for first in range(begin, end, BLOCK):
            position = first + tl.arange(0, BLOCK)
            x = as_score(tl.load(at + position, mask=position < end, other=float("nan")), ROUND)
            found += tl.sum((x >= threshold).to(tl.int32))
        tl.store(words + CAP + CHUNKS + chunk, found)
        if found > 0:
            place = tl.atomic_add(words + CAP + 2 * CHUNKS + 1, found)
            tl.store(words + CAP + chunk, place)
            for first in range(begin, end, BLOCK):
                position = first + tl.arange(0, BLOCK)
                x = as_score(tl.load(at + position, mask=position < end, other=float("nan")), ROUND)
                reaches = (x >= threshold).to(tl.int32)
                to = place + tl.cumsum(reaches, 0) - 1
                tl.store(words + to, position, mask=(reaches == 1) & (to < CAP))
                place += tl.sum(reaches)


@triton.jit
def select_long(
    scores,
    row_len,
    row_start,
    out,
    scores_out,
    scratch,
    block_table,
    row_req,
    scores_row,
    len_stride,
    start_stride,
    out_row,
    scores_out_row,
    scratch_row,
    table_row,
    req_stride,
    requests,
    pages,
    width,
    span,
    k,
    CAP: tl.constexpr,
    CHUNKS: tl.constexpr,
    HALVINGS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUND: tl.constexpr,
    LOW: tl.constexpr,
    HAS_START: tl.constexpr,
    HAS_REQUEST: tl.constexpr,
    PAGE: tl.constexpr,
    SLOTS: tl.constexpr,
    SELECTED: tl.constexpr,
    WORLD: tl.constexpr,
    RANK: tl.constexpr,
    INTERLEAVE: tl.constexpr,
):
    """Select from the candidates of one row; with ``CAP`` 0, or where they do not tell, from all its columns."""
    row = tl.program_id(0).to(tl.int64)
    start, count, request = window(
        row,
        row_len,
        row_start,
        row_req,
        len_stride,
        start_stride,
        req_stride,
        requests,
        width,
        HAS_START,
        HAS_REQUEST,
        WORLD,
        RANK,
        INTERLEAVE,
    )
    at = scores + row * scores_row + start
    out_at = out + row * out_row
    scores_at = scores_out + row * scores_out_row
    table_at = block_table + request.to(tl.int64) * table_row if SLOTS else block_table
    written = 0
    told = False
    if CAP > 0:
        words = scratch + row * scratch_row
        chunk = tl.arange(0, CHUNKS)
        chunks = (count + span - 1) // span
        found = tl.load(words + CAP + CHUNKS + chunk, mask=chunk < chunks, other=0)
        total = tl.sum(found)
        told = (total <= CAP) & (total >= tl.minimum(k, count))
        if told:
            places = tl.load(words + CAP + chunk, mask=found > 0, other=0)
            # Candidates in order of position: the i-th is in the last chunk that begins at or before i.
            before = tl.cumsum(found, 0) - found
            i = tl.arange(0, CAP)
            mine = tl.zeros((CAP,), tl.int32)
            for halving in tl.static_range(HALVINGS):
                probe = mine + (CHUNKS >> (halving + 1))
                mine = tl.where(tl.gather(before, probe, 0) <= i, probe, mine)
            live = i < total
            where = tl.gather(places - before, mine, 0) + i
            position = tl.load(words + where, mask=live, other=0)
            x = as_score(tl.load(at + position, mask=live, other=0.0), ROUND)
            key = ordinal(x, live, LOW)
            threshold = kth(key, k, LOW)
            needed = k - tl.sum((key > threshold).to(tl.int32))
            _, written = emit(
                x,
                key,
                position,
                threshold,
                needed,
                0,
                0,
                out_at,
                scores_at,
                table_at,
                pages,
                PAGE,
                SLOTS,
                SELECTED,
            )
    if not told:
        threshold, needed = digits(at, count, tl.minimum(k, count), BLOCK, ROUND, LOW)
        equals = 0
        for first in range(0, count, BLOCK):
            position = first + tl.arange(0, BLOCK)
            live = position < count
            x = as_score(tl.load(at + position, mask=live, other=0.0), ROUND)
            equals, written = emit(
                x,
                ordinal(x, live, LOW),
                position,
                threshold,
                needed,
                equals,
                written,
                out_at,
                scores_at,
                table_at,
                pages,
                PAGE,
                SLOTS,
                SELECTED,
            )
    fill(out_at, scores_at, written, k, SELECTED, BLOCK)


@triton.jit
def digits(at, count, k, BLOCK: tl.constexpr, ROUND: tl.constexpr, LOW: tl.constexpr):
    """Return the ordinal of the k-th best of ``count`` scores, and how many equal to it are among the k."""
    value = tl.arange(0, 256)
    needed = k
    found = 0  # a pattern: an ordinal with its sign bit flipped
    for digit in tl.static_range((32 - LOW) // 8):
        shift = 24 - 8 * digit
        number = tl.zeros((256,), tl.int32)
        for first in range(0, count, BLOCK):
            position = first + tl.arange(0, BLOCK)
            live = position < count
            x = as_score(tl.load(at + position, mask=live, other=0.0), ROUND)
            pattern = ordinal(x, live, LOW) ^ NO_KEY
            if digit > 0:
                live = live & (((pattern ^ found) >> (shift + 8)) == 0)
            number += tl.histogram((pattern >> shift) & 255, 256, mask=live)
        above = tl.cumsum(number, 0, reverse=True)
        here = tl.sum((above >= needed).to(tl.int32)) - 1
        needed -= tl.sum(tl.where(value > here, number, 0))
        found = found | (here << shift)
    return found ^ NO_KEY, needed
