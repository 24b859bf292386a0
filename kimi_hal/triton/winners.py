"""The kernels of ``topk_merge``: candidates of all ranks as integers, the cut between them, and who wins.

Candidates stand in two planes ``[W, T, C]``: ordinals (``order.py``), and positions, −1 where there is none. A row's
winners are those above its *cut*, and of those equal to it the ones whose position is at most its *bound*: rule 2
exactly, since no two candidates of a row have the same position. Counts are sums of integers and places are counted, so
that nothing depends on who comes first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kimi_hal.triton.order import NO_KEY, kth, ordinal
from kimi_hal.triton.shards import local_length, local_of, position_of

#: Beyond every position.
NO_BOUND = tl.constexpr(0x7FFFFFFF)
#: The ordinal of no candidate in 16 bits.
NO_NARROW = tl.constexpr(-(1 << 15))
#: Positions that 16 bits tell apart.
SEGMENT = tl.constexpr(1 << 16)
#: Arguments that change from step to step: no kernel is compiled anew for one that is 1 or a multiple of 16.
SIZES = ("columns", "total", "k", "held_columns")


@triton.jit(do_not_specialize=SIZES)
def offer(
    scores,
    indices,
    row_len,
    ordinals,
    positions,
    scores_row,
    indices_row,
    len_stride,
    ordinals_row,
    positions_row,
    columns,
    CONTEXT: tl.constexpr,
    GLOBAL: tl.constexpr,
    NARROW: tl.constexpr,
    LOW: tl.constexpr,
    WORLD: tl.constexpr,
    RANK: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write both planes of this rank's candidates, ``NARROW``: ordinals in 16 bits.

    ``GLOBAL``: positions of the sequence, else local ones. Rows longer than ``CONTEXT`` have none, unless it is 0.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    length = tl.load(row_len + row * len_stride)
    index = tl.load(indices + row * indices_row + column, mask=inside, other=-1)
    live = (index >= 0) & (index < local_length(length, WORLD, RANK, INTERLEAVE))
    if CONTEXT > 0:
        live = live & (length <= CONTEXT)
    x = tl.load(scores + row * scores_row + column, mask=live, other=0.0)
    key = ordinal(x.to(tl.float32), live, LOW)
    if NARROW:
        key = key >> 16
    index = tl.where(live, index, 0)
    if GLOBAL:
        index = position_of(index, RANK, WORLD, INTERLEAVE)
    tl.store(ordinals + row * ordinals_row + column, key.to(ordinals.dtype.element_ty), mask=inside)
    tl.store(positions + row * positions_row + column, tl.where(live, index, -1), mask=inside)


@triton.jit
def place_in(first, rank_stride, columns, BLOCK: tl.constexpr):
    """Return where candidates from ``first`` on stand in a row of a plane, those of all ranks behind each other.

    The planes of one message have fewer than 2^31 entries.
    """
    i = first + tl.arange(0, BLOCK)
    rank = i // columns
    return rank * (rank_stride - columns) + i


@triton.jit
def keys_at(
    at, first, rank_stride, columns, total, FLIPPED: tl.constexpr, NARROW: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the ordinals of ``BLOCK`` candidates; ``FLIPPED``: of positions, the smallest the greatest."""
    live = first + tl.arange(0, BLOCK) < total
    place = place_in(first, rank_stride, columns, BLOCK)
    if FLIPPED:
        x = tl.load(at + place, mask=live, other=-1)
        key = tl.where(x >= 0, ~x, NO_KEY)
    elif NARROW:
        key = tl.load(at + place, mask=live, other=NO_NARROW).to(tl.int32) << 16
    else:
        key = tl.load(at + place, mask=live, other=NO_KEY)
    return key


@triton.jit
def tied_at(
    at,
    positions_at,
    first,
    rank_stride,
    positions_rank,
    columns,
    total,
    threshold,
    NARROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the flipped positions of the candidates that equal a threshold, ``NO_KEY`` for the others."""
    key = keys_at(at, first, rank_stride, columns, total, False, NARROW, BLOCK)
    tied = (key == threshold) & (key != NO_KEY)
    place = place_in(first, positions_rank, columns, BLOCK)
    return tl.where(tied, ~tl.load(positions_at + place, mask=tied, other=0), NO_KEY)


@triton.jit(do_not_specialize=SIZES)
def cut_short(
    ordinals,
    positions,
    cut,
    bound,
    wanted,
    ordinals_rank,
    ordinals_row,
    positions_rank,
    positions_row,
    columns,
    total,
    k,
    FLIPPED: tl.constexpr,
    BOUND: tl.constexpr,
    NARROW: tl.constexpr,
    LOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the cut between the ``k`` best of at most ``BLOCK`` candidates and the others, and its bound.

    ``FLIPPED``: the ``ordinals`` are positions; write the ``wanted``-th smallest of a row as its bound.
    """
    row = tl.program_id(0).to(tl.int64)
    at = ordinals + row * ordinals_row
    key = keys_at(at, 0, ordinals_rank, columns, total, FLIPPED, NARROW, BLOCK)
    live = key != NO_KEY
    count = tl.sum(live.to(tl.int32))
    if FLIPPED:
        # The very position: ranks hold others, which they did not send, between it and the next that was sent.
        threshold = kth(key, count, tl.load(wanted + row), LOW)
        reached = tl.min(tl.where(live & (key >= threshold), key, NO_BOUND))
        tl.store(bound + row, ~reached)
    else:
        threshold = kth(key, count, k, LOW)
        tl.store(cut + row, threshold)
        if BOUND:
            above = tl.sum((key > threshold).to(tl.int32))
            equals = tl.sum((live & (key == threshold)).to(tl.int32))
            limit = NO_BOUND
            if above + equals > k:
                positions_at = positions + row * positions_row
                # 0, which the compiler doesn't know: else it keeps all addresses in registers up to here.
                first = tl.minimum(equals, 0)
                tied = tied_at(
                    at,
                    positions_at,
                    first,
                    ordinals_rank,
                    positions_rank,
                    columns,
                    total,
                    threshold,
                    NARROW,
                    BLOCK,
                )
                limit = ~kth(tied, equals, k - above, 0)
            tl.store(bound + row, limit)


@triton.jit
def kth_by_digits(
    at,
    positions_at,
    rank_stride,
    positions_rank,
    columns,
    total,
    threshold,
    k,
    TIED: tl.constexpr,
    FLIPPED: tl.constexpr,
    NARROW: tl.constexpr,
    LOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the k-th greatest of at least k keys of a row, and how many that equal it are among the k.

    Eight bits a pass over the row. ``TIED``: of the flipped positions of those that equal ``threshold``.
    """
    value = tl.arange(0, 256)
    needed = k
    found = 0  # a pattern: a key with its sign bit flipped
    for digit in tl.static_range((32 - LOW) // 8):
        shift = 24 - 8 * digit
        number = tl.zeros((256,), tl.int32)
        for first in range(0, total, BLOCK):
            if TIED:
                key = tied_at(
                    at,
                    positions_at,
                    first,
                    rank_stride,
                    positions_rank,
                    columns,
                    total,
                    threshold,
                    NARROW,
                    BLOCK,
                )
            else:
                key = keys_at(at, first, rank_stride, columns, total, FLIPPED, NARROW, BLOCK)
            live = key != NO_KEY
            pattern = key ^ NO_KEY
            if digit > 0:
                live = live & (((pattern ^ found) >> (shift + 8)) == 0)
            number += tl.histogram((pattern >> shift) & 255, 256, mask=live)
        above = tl.cumsum(number, 0, reverse=True)
        here = tl.sum((above >= needed).to(tl.int32)) - 1
        needed -= tl.sum(tl.where(value > here, number, 0))
        found = found | (here << shift)
    return found ^ NO_KEY, needed


@triton.jit(do_not_specialize=SIZES)
def cut_long(
    ordinals,
    positions,
    cut,
    bound,
    wanted,
    ordinals_rank,
    ordinals_row,
    positions_rank,
    positions_row,
    columns,
    total,
    k,
    FLIPPED: tl.constexpr,
    BOUND: tl.constexpr,
    NARROW: tl.constexpr,
    LOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Do what ``cut_short`` does for any number of candidates, a block at a time."""
    row = tl.program_id(0).to(tl.int64)
    at = ordinals + row * ordinals_row
    positions_at = positions + row * positions_row
    count = 0
    for first in range(0, total, BLOCK):
        key = keys_at(at, first, ordinals_rank, columns, total, FLIPPED, NARROW, BLOCK)
        count += tl.sum((key != NO_KEY).to(tl.int32))
    needed = k
    more = count > k
    if FLIPPED:
        needed = tl.load(wanted + row)
        more = count > 0
    threshold = NO_KEY
    among = 0
    if more:
        threshold, among = kth_by_digits(
            at,
            positions_at,
            ordinals_rank,
            positions_rank,
            columns,
            total,
            0,
            tl.minimum(needed, count),
            False,
            FLIPPED,
            NARROW,
            LOW,
            BLOCK,
        )
    if FLIPPED:
        tl.store(bound + row, ~threshold)
    else:
        tl.store(cut + row, threshold)
        if BOUND:
            limit = NO_BOUND
            if among > 0:
                flipped, _ = kth_by_digits(
                    at,
                    positions_at,
                    ordinals_rank,
                    positions_rank,
                    columns,
                    total,
                    threshold,
                    among,
                    True,
                    False,
                    NARROW,
                    0,
                    BLOCK,
                )
                limit = ~flipped
            tl.store(bound + row, limit)


@triton.jit(do_not_specialize=SIZES)
def ties(
    ordinals,
    cut,
    wanted,
    needed,
    ordinals_rank,
    ordinals_row,
    columns,
    total,
    k,
    NARROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write how many of all ranks' ties with the cut win, and how many some rank must send: 0 where all do."""
    row = tl.program_id(0).to(tl.int64)
    at = ordinals + row * ordinals_row
    threshold = tl.load(cut + row)
    left = k
    for first in range(0, total, BLOCK):
        key = keys_at(at, first, ordinals_rank, columns, total, False, NARROW, BLOCK)
        left -= tl.sum((key > threshold).to(tl.int32))
    all_ties, most = 0, 0
    for rank in range(0, total // columns):
        mine = 0
        rank_at = at + tl.cast(rank, tl.int64) * ordinals_rank
        for first in range(0, columns, BLOCK):
            key = keys_at(rank_at, first, 0, columns, columns, False, NARROW, BLOCK)
            mine += tl.sum(((key == threshold) & (key != NO_KEY)).to(tl.int32))
        all_ties += mine
        most = tl.maximum(most, tl.minimum(mine, left))
    tl.store(wanted + row, left)
    tl.store(needed + row, tl.where(all_ties > left, most, 0))


@triton.jit(do_not_specialize=SIZES)
def list_winners(
    ordinals,
    positions,
    cut,
    bound,
    listed,
    keys,
    number,
    ordinals_rank,
    ordinals_row,
    positions_rank,
    positions_row,
    listed_row,
    number_stride,
    columns,
    total,
    k,
    EVERY: tl.constexpr,
    TIED: tl.constexpr,
    KEYS: tl.constexpr,
    OWNED: tl.constexpr,
    NARROW: tl.constexpr,
    WORLD: tl.constexpr,
    RANK: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """List the positions of a row's winners, at most ``k``, in the order in which they stand, and their number.

    ``EVERY``: all candidates win. ``TIED``: those that equal the cut are listed. ``OWNED``: those of ``RANK`` alone.
    ``KEYS``: their ordinals are listed as well.
    """
    row = tl.program_id(0).to(tl.int64)
    at = ordinals + row * ordinals_row
    positions_at = positions + row * positions_row
    threshold, limit = NO_KEY, NO_BOUND
    if not EVERY:
        threshold = tl.load(cut + row)
        if not TIED:
            limit = tl.load(bound + row)
    written = 0
    for first in range(0, total, BLOCK):
        key = keys_at(at, first, ordinals_rank, columns, total, False, NARROW, BLOCK)
        live = key != NO_KEY
        place = place_in(first, positions_rank, columns, BLOCK)
        position = tl.load(positions_at + place, mask=live, other=0)
        if TIED:
            wins = live & (key == threshold)
        else:
            wins = (key > threshold) | (live & (key == threshold) & (position <= limit))
        if OWNED:
            wins = wins & (position // INTERLEAVE % WORLD == RANK)
        there = written + tl.cumsum(wins.to(tl.int32), 0) - 1
        wins = wins & (there < k)
        tl.store(listed + row * listed_row + there, position, mask=wins)
        if KEYS:
            tl.store(keys + row * listed_row + there, key, mask=wins)
        written += tl.sum(wins.to(tl.int32))
    tl.store(number + row * number_stride, written)


@triton.jit
def places(at, value, mine, number, SORTED: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """Return how many of a list's first ``number`` entries are smaller than each value; ``SORTED``: as they stand."""
    if SORTED:
        return mine
    smaller = tl.zeros((BLOCK, STEP), tl.int32)
    for first in range(0, number, STEP):
        i = first + tl.arange(0, STEP)
        other = tl.load(at + i, mask=i < number, other=NO_BOUND)
        smaller += (other[None, :] < value[:, None]).to(tl.int32)
    return tl.sum(smaller, axis=1)


@triton.jit(do_not_specialize=SIZES)
def ascend(
    listed,
    number,
    out,
    listed_row,
    number_stride,
    out_row,
    columns,
    SORTED: tl.constexpr,
    LOCAL: tl.constexpr,
    WORLD: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    """Write a row's first ``columns`` listed positions in ascending order, then −1; ``LOCAL``: as local ones."""
    row = tl.program_id(0).to(tl.int64)
    mine = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(number + row * number_stride)
    at = listed + row * listed_row
    value = tl.load(at + mine, mask=mine < count, other=NO_BOUND)
    place = places(at, value, mine, count, SORTED, BLOCK, STEP)
    if LOCAL:
        value = local_of(value, WORLD, INTERLEAVE)
    out_at = out + row * out_row
    tl.store(out_at + place, value, mask=(mine < count) & (place < columns))
    tl.store(out_at + mine, -1, mask=(mine >= count) & (mine < columns))


@triton.jit(do_not_specialize=SIZES)
def pack(
    listed,
    keys,
    number,
    positions,
    message,
    listed_row,
    positions_row,
    message_row,
    columns,
    held_columns,
    SEGMENTS: tl.constexpr,
    SORTED: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    """Write a row's message: counts of the segments, candidates held, and the listed ones in 32 bits each.

    ``positions`` of all that this rank holds; the listed ones ascend in the message, and unused words are 0.
    """
    row = tl.program_id(0).to(tl.int64)
    mine = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(number + row)
    at = listed + row * listed_row
    out = message + row * message_row
    value = tl.load(at + mine, mask=mine < count, other=NO_BOUND)
    key = tl.load(keys + row * listed_row + mine, mask=mine < count, other=0)
    place = places(at, value, mine, count, SORTED, BLOCK, STEP)
    word = (key & -SEGMENT) | (value & (SEGMENT - 1))
    tl.store(out + SEGMENTS + 1 + place, word, mask=mine < count)
    tl.store(out + SEGMENTS + 1 + mine, 0, mask=(mine >= count) & (mine < columns))
    if tl.program_id(1) == 0:
        held = 0
        for first in range(0, held_columns, BLOCK):
            i = first + tl.arange(0, BLOCK)
            position = tl.load(positions + row * positions_row + i, mask=i < held_columns, other=-1)
            held += tl.sum((position >= 0).to(tl.int32))
        tl.store(out + SEGMENTS, held)
        for segment in tl.static_range(SEGMENTS):
            inside = 0
            for first in range(0, count, BLOCK):
                i = first + tl.arange(0, BLOCK)
                position = tl.load(at + i, mask=i < count, other=-1)
                inside += tl.sum(((position >> 16) == segment).to(tl.int32))
            tl.store(out + segment, inside)


@triton.jit(do_not_specialize=SIZES)
def unpack(
    messages,
    ordinals,
    positions,
    rank_stride,
    message_row,
    plane_rank,
    plane_row,
    columns,
    SEGMENTS: tl.constexpr,
    WORLD: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write both planes of one rank's message of a row, positions as global ones."""
    row = tl.program_id(0).to(tl.int64)
    rank = tl.program_id(1)
    message = messages + rank.to(tl.int64) * rank_stride + row * message_row
    plane = rank.to(tl.int64) * plane_rank + row * plane_row
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < columns
        segment = tl.zeros((BLOCK,), tl.int32)
        end = 0
        for each in tl.static_range(SEGMENTS):
            end += tl.load(message + each)
            segment += (column >= end).to(tl.int32)
        live = inside & (segment < SEGMENTS)
        word = tl.load(message + SEGMENTS + 1 + column, mask=inside, other=0)
        index = tl.where(live, segment * SEGMENT + (word & (SEGMENT - 1)), 0)
        position = position_of(index, rank, WORLD, INTERLEAVE)
        tl.store(ordinals + plane + column, tl.where(live, word & -SEGMENT, NO_KEY), mask=inside)
        tl.store(positions + plane + column, tl.where(live, position, -1), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def undecided(
    ordinals,
    positions,
    cut,
    bound,
    messages,
    row_len,
    again,
    plane_rank,
    plane_row,
    rank_stride,
    message_row,
    len_stride,
    columns,
    total,
    CONTEXT: tl.constexpr,
    SEGMENTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write whether some rank may hold more winners of a row than it sent: all that it sent win, and it holds more."""
    row = tl.program_id(0).to(tl.int64)
    threshold, limit = tl.load(cut + row), tl.load(bound + row)
    may = (tl.load(row_len + row * len_stride) > CONTEXT).to(tl.int32)
    for rank in range(0, total // columns):
        plane = tl.cast(rank, tl.int64) * plane_rank + row * plane_row
        won = 0
        for first in range(0, columns, BLOCK):
            i = first + tl.arange(0, BLOCK)
            key = tl.load(ordinals + plane + i, mask=i < columns, other=NO_KEY)
            position = tl.load(positions + plane + i, mask=key != NO_KEY, other=0)
            wins = (key > threshold) | ((key != NO_KEY) & (key == threshold) & (position <= limit))
            won += tl.sum(wins.to(tl.int32))
        header = messages + tl.cast(rank, tl.int64) * rank_stride + row * message_row
        held = tl.load(header + SEGMENTS)
        may = tl.maximum(may, ((won == columns) & (held > columns)).to(tl.int32))
    tl.store(again + row, may)
