"""The kernels of ``topk_select``: exact selection under rule 2, in ascending order of position.

One row is one program where it fits: its ordinals stay in registers, the k-th is found by counting, and the winners
are listed in order. Of the keys equal to the k-th the first ones win.

A longer row is first thinned out. Its columns form ``G`` = 2 k groups, each every ``G``-th column; at least k keys
reach the k-th largest of the groups' maxima, so all winners do, and with scores in no special order few others:
1.39 k in all. They are collected in ``CAP`` = 4 k words of scratch and selected from. Where more reach it (thousands
of equal scores), or NaN are among the winners, the row is selected by digits of its ordinals instead, eight bits a
pass: right for any scores, though by one program.

Scratch of a row, in int32 words: the maxima, then in their place the candidates, ``CAP``; first candidate of each
chunk of columns, ``CHUNKS``; their number, ``CHUNKS``; the threshold; how many candidates are taken. All counts are
sums of integers, so that nothing depends on who comes first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kimi_hal.triton.flags import last_at_most, packed, place_of
from kimi_hal.triton.order import NO_KEY, as_score, kth, ordinal, score_of
from kimi_hal.triton.shards import local_length

#: Arguments that change from step to step: no kernel is compiled anew for one that is 1 or a multiple of 16.
SIZES = ("requests", "width")
COUNTS = (*SIZES, "pages", "k")


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
def load_scores(at, first, end, OTHER: tl.constexpr, BLOCK: tl.constexpr, ROUND: tl.constexpr):
    """Return the scores of ``BLOCK`` positions from ``first`` on, ``OTHER`` from ``end`` on."""
    position = first + tl.arange(0, BLOCK)
    # Without a mask, loads are as wide as the target has them.
    if first + BLOCK <= end:  # noqa: SIM108
        x = tl.load(at + position)
    else:
        x = tl.load(at + position, mask=position < end, other=OTHER)
    return as_score(x, ROUND)


@triton.jit
def emit(
    at,
    key,
    position,
    first,
    threshold,
    needed,
    equals_before,
    written,
    out_at,
    scores_at,
    table_at,
    pages,
    BLOCK: tl.constexpr,
    HALVINGS: tl.constexpr,
    ROUND: tl.constexpr,
    PAGE: tl.constexpr,
    SLOTS: tl.constexpr,
    SELECTED: tl.constexpr,
):
    """Write a block's winners behind those ``written``; return how many equals and winners there are by now.

    Winners are the keys above ``threshold`` and the first ``needed`` of those equal to it. ``position`` holds
    their ascending positions, or is None where they begin at ``first`` without a gap.
    """
    WORDS: tl.constexpr = BLOCK // 32
    STEP: tl.constexpr = 1024 if BLOCK > 2048 else BLOCK // 2
    place = tl.arange(0, BLOCK)
    equal = (key == threshold) & (key != NO_KEY)
    equals = tl.sum(equal.to(tl.int32))
    last = BLOCK
    if equals_before + equals > needed:
        more = needed - equals_before - 1
        equal_words, equal_before, _ = packed(equal, BLOCK)
        nth = tl.zeros((32,), tl.int32) + tl.maximum(more, 0)
        last = tl.max(place_of(equal_words, equal_before, nth, WORDS, HALVINGS))
        last = tl.where(more < 0, -1, last)
    wins = (key > threshold) | (equal & (place <= last))
    if SLOTS:
        where = first + place if position is None else position
        where_page = tl.load(table_at + where // PAGE, mask=wins, other=-1)
        wins = wins & (where_page >= 0) & (where_page < pages)
    words, before, number = packed(wins, BLOCK)
    for start in range(0, number, STEP):
        n = start + tl.arange(0, STEP)
        live = n < number
        winner = place_of(words, before, n, WORDS, HALVINGS)
        winner = first + winner if position is None else tl.gather(position, winner, 0)
        value = winner
        if SLOTS:
            page = tl.load(table_at + winner // PAGE, mask=live, other=0)
            value = page * PAGE + winner % PAGE
        tl.store(out_at + written + n, value, mask=live)
        if SELECTED:
            x = as_score(tl.load(at + winner, mask=live, other=0.0), ROUND)
            tl.store(scores_at + written + n, x.to(scores_at.dtype.element_ty), mask=live)
    return equals_before + equals, written + number


@triton.jit
def fill(out_at, scores_at, written, k, SELECTED: tl.constexpr, BLOCK: tl.constexpr):
    """Fill the rest of a row of the outputs with −1 and −inf."""
    for first in range(written, k, BLOCK):
        place = first + tl.arange(0, BLOCK)
        tl.store(out_at + place, -1, mask=place < k)
        if SELECTED:
            tl.store(scores_at + place, float("-inf"), mask=place < k)


@triton.jit(do_not_specialize=COUNTS)
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
    HALVINGS: tl.constexpr,
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
    at = scores + row * scores_row + start
    x = load_scores(at, 0, count, 0.0, BLOCK, ROUND)
    key = ordinal(x, tl.arange(0, BLOCK) < count, LOW)
    threshold = kth(key, count, k, LOW)
    needed = k - tl.sum((key > threshold).to(tl.int32))
    out_at = out + row * out_row
    scores_at = scores_out + row * scores_out_row
    table_at = block_table + request.to(tl.int64) * table_row if SLOTS else block_table
    _, written = emit(
        at,
        key,
        None,
        0,
        threshold,
        needed,
        0,
        0,
        out_at,
        scores_at,
        table_at,
        pages,
        BLOCK,
        HALVINGS,
        ROUND,
        PAGE,
        SLOTS,
        SELECTED,
    )
    fill(out_at, scores_at, written, k, SELECTED, BLOCK)


@triton.jit(do_not_specialize=SIZES)
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
    G: tl.constexpr,
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
    for first in range(0, count, G * STEPS):
        position = first + (tl.arange(0, STEPS) * G)[:, None] + group[None, :]
        if first + G * STEPS <= count:
            x = tl.load(at + position)
        else:
            x = tl.load(at + position, mask=position < count, other=float("-inf"))
        x = x.to(tl.float32)
        best = tl.maximum(best, tl.where(x == x, x, float("-inf")))
    most = tl.max(best, axis=0)
    tl.store(scratch + row * scratch_row + group, most.to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=("k",))
def group_threshold(
    scratch,
    scratch_row,
    k,
    G: tl.constexpr,
    CAP: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROUND: tl.constexpr,
    LOW: tl.constexpr,
    COARSE: tl.constexpr,
):
    """Write a score that at least k keys of a row reach, and that no candidate is taken yet."""
    words = scratch + tl.program_id(0).to(tl.int64) * scratch_row
    best = tl.load(words + tl.arange(0, G)).to(tl.float32, bitcast=True)
    key = ordinal(as_score(best, ROUND), tl.full((G,), True, tl.int1), LOW)
    threshold = score_of(kth(key, G, k, COARSE))
    tl.store(words + CAP + 2 * CHUNKS, threshold.to(tl.int32, bitcast=True))
    tl.store(words + CAP + 2 * CHUNKS + 1, 0)


@triton.jit
def reaching(at, first, end, threshold, BLOCK: tl.constexpr, ROUND: tl.constexpr):
    """Return which scores of a block reach a threshold, which NaN does not, as ``packed`` flags."""
    return packed(load_scores(at, first, end, float("nan"), BLOCK, ROUND) >= threshold, BLOCK)


@triton.jit
def append(
    room,
    first,
    words,
    before,
    number,
    place,
    CAP: tl.constexpr,
    BLOCK: tl.constexpr,
    HALVINGS: tl.constexpr,
):
    """Write the positions of a block's candidates from ``place`` on, as far as there is room."""
    WORDS: tl.constexpr = BLOCK // 32
    fit = tl.minimum(number, CAP - place)
    for start in range(0, fit, WORDS):
        n = start + tl.arange(0, WORDS)
        position = first + place_of(words, before, n, WORDS, HALVINGS)
        tl.store(room + place + n, position, mask=n < fit)


@triton.jit(do_not_specialize=SIZES)
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
    HALVINGS: tl.constexpr,
    SINGLE: tl.constexpr,
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
        room = scratch + row * scratch_row
        threshold = tl.load(room + CAP + 2 * CHUNKS).to(tl.float32, bitcast=True)
        at = scores + row * scores_row + start
        if SINGLE:
            words, before, found = reaching(at, begin, end, threshold, BLOCK, ROUND)
        else:
            found = 0
            for first in range(begin, end, BLOCK):
                found += tl.sum(
                    (load_scores(at, first, end, float("nan"), BLOCK, ROUND) >= threshold).to(tl.int32)
                )
        tl.store(room + CAP + CHUNKS + chunk, found)
        if found > 0:
            place = tl.atomic_add(room + CAP + 2 * CHUNKS + 1, found)
            tl.store(room + CAP + chunk, place)
            if SINGLE:
                append(room, begin, words, before, found, place, CAP, BLOCK, HALVINGS)
            else:
                for first in range(begin, end, BLOCK):
                    some, some_before, number = reaching(at, first, end, threshold, BLOCK, ROUND)
                    append(room, first, some, some_before, number, place, CAP, BLOCK, HALVINGS)
                    place += number


@triton.jit
def select_candidates(
    at,
    room,
    places,
    before,
    total,
    k,
    out_at,
    scores_at,
    table_at,
    pages,
    SIZE: tl.constexpr,
    SIZE_HALVINGS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK_HALVINGS: tl.constexpr,
    ROUND: tl.constexpr,
    LOW: tl.constexpr,
    PAGE: tl.constexpr,
    SLOTS: tl.constexpr,
    SELECTED: tl.constexpr,
):
    """Select from at most ``SIZE`` candidates, taken chunk by chunk; return the number of winners."""
    i = tl.arange(0, SIZE)
    chunk = last_at_most(before, i, CHUNKS, CHUNK_HALVINGS)
    live = i < total
    position = tl.load(room + tl.gather(places - before, chunk, 0) + i, mask=live, other=0)
    x = as_score(tl.load(at + position, mask=live, other=0.0), ROUND)
    key = ordinal(x, live, LOW)
    threshold = kth(key, total, k, LOW)
    needed = k - tl.sum((key > threshold).to(tl.int32))
    _, written = emit(
        at,
        key,
        position,
        0,
        threshold,
        needed,
        0,
        0,
        out_at,
        scores_at,
        table_at,
        pages,
        SIZE,
        SIZE_HALVINGS,
        ROUND,
        PAGE,
        SLOTS,
        SELECTED,
    )
    return written


@triton.jit(do_not_specialize=COUNTS)
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
    CAP_HALVINGS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK_HALVINGS: tl.constexpr,
    BLOCK: tl.constexpr,
    HALVINGS: tl.constexpr,
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
        room = scratch + row * scratch_row
        chunk = tl.arange(0, CHUNKS)
        found = tl.load(room + CAP + CHUNKS + chunk, mask=chunk * span < count, other=0)
        total = tl.sum(found)
        told = (total <= CAP) & (total >= tl.minimum(k, count))
        if told:
            places = tl.load(room + CAP + chunk, mask=found > 0, other=0)
            before = tl.cumsum(found, 0) - found
            if total <= CAP // 2:
                written = select_candidates(
                    at,
                    room,
                    places,
                    before,
                    total,
                    k,
                    out_at,
                    scores_at,
                    table_at,
                    pages,
                    CAP // 2,
                    CAP_HALVINGS - 1,
                    CHUNKS,
                    CHUNK_HALVINGS,
                    ROUND,
                    LOW,
                    PAGE,
                    SLOTS,
                    SELECTED,
                )
            else:
                written = select_candidates(
                    at,
                    room,
                    places,
                    before,
                    total,
                    k,
                    out_at,
                    scores_at,
                    table_at,
                    pages,
                    CAP,
                    CAP_HALVINGS,
                    CHUNKS,
                    CHUNK_HALVINGS,
                    ROUND,
                    LOW,
                    PAGE,
                    SLOTS,
                    SELECTED,
                )
    if not told:
        threshold, needed = digits(at, count, tl.minimum(k, count), BLOCK, ROUND, LOW)
        equals = 0
        for first in range(0, count, BLOCK):
            x = load_scores(at, first, count, 0.0, BLOCK, ROUND)
            key = ordinal(x, first + tl.arange(0, BLOCK) < count, LOW)
            equals, written = emit(
                at,
                key,
                None,
                first,
                threshold,
                needed,
                equals,
                written,
                out_at,
                scores_at,
                table_at,
                pages,
                BLOCK,
                HALVINGS,
                ROUND,
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
            live = first + tl.arange(0, BLOCK) < count
            x = load_scores(at, first, count, 0.0, BLOCK, ROUND)
            pattern = ordinal(x, live, LOW) ^ NO_KEY
            if digit > 0:
                live = live & (((pattern ^ found) >> (shift + 8)) == 0)
            number += tl.histogram((pattern >> shift) & 255, 256, mask=live)
        above = tl.cumsum(number, 0, reverse=True)
        here = tl.sum((above >= needed).to(tl.int32)) - 1
        needed -= tl.sum(tl.where(value > here, number, 0))
        found = found | (here << shift)
    return found ^ NO_KEY, needed
