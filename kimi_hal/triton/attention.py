"""Kernels of sparse attention over latents: one row's heads over a part of its keys, and the parts together.

Keys stand in the rows of both products (``S = K Qᵀ``, ``Oᵀ += Vᵀ P``), queries in the columns: so few heads
fill an instruction as well as many, and a block of heads is padded to 16 at most. Products of bfloat16
numbers are exact and are added in float32. Probabilities are cut into ``TERMS`` bfloat16 parts, each of them
multiplied: 2 keep 16 bits, 3 keep all of float32's.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kimi_hal.triton.latent_rows import (
    SHARED,
    contracted,
    float_at,
    fp8_numbers,
    from_tile,
    latents,
    loaded,
    locate,
    raw_row,
    shared_part,
    to_tile,
)

INFINITY = tl.constexpr(float("inf"))
#: What probabilities are multiplied by where keys are left small: 2048 of them stay within float32.
LIFT = tl.constexpr(2.0**100)


@triton.jit
def query(at, inside, OFFSET: tl.constexpr, COUNT: tl.constexpr, ELEMENT: tl.constexpr):
    """Return ``[heads, COUNT]`` float32 query numbers from ``OFFSET`` on; 0 for a head that is not inside."""
    x = tl.load(at[:, None] + OFFSET + tl.arange(0, COUNT)[None, :], mask=inside[:, None], other=0)
    if ELEMENT != "bfloat16":
        x = fp8_numbers(x, ELEMENT)
    return x.to(tl.float32)


@triton.jit
def largest(x):
    """Return the largest finite magnitude of each row."""
    magnitude = tl.abs(x)
    return tl.max(tl.where(magnitude < INFINITY, magnitude, 0.0), axis=1)


@triton.jit
def power_of_two(exponent):
    """Return 2^exponent as float32, for int32 exponents within [−126, 127]."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def operand(x, factor, HEADS: tl.constexpr, COUNT: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr):
    """Return a query ``[HEADS, COUNT]`` times a power of two as ``[COUNT, HEADS]`` bfloat16, in the dot's order."""
    tile = to_tile((x * factor[:, None]).to(tl.bfloat16), HEADS, COUNT, GROUP)
    return tl.trans(contracted(tile, HEADS, COUNT, RUN))


@triton.jit
def queries(
    at,
    inside,
    scale,
    ELEMENT: tl.constexpr,
    GROUP: tl.constexpr,
    SHARED_GROUP: tl.constexpr,
    RUN: tl.constexpr,
    SHARED_RUN: tl.constexpr,
    SMALL: tl.constexpr,
    HEADS: tl.constexpr,
    COUNT: tl.constexpr,
):
    """Return the operands of the latents and of the key part, and what a product with keys is multiplied by.

    Where keys are left small, queries are raised by as much, or as far as their largest number lets them be.
    """
    x = ()
    for i in tl.static_range(512 // COUNT):
        x = x + (query(at, inside, COUNT * i, COUNT, ELEMENT),)
    shared = query(at, inside, 512, SHARED, ELEMENT)
    raised = tl.full((HEADS,), 1.0, tl.float32)
    factor = raised * scale
    if SMALL:
        most = largest(shared)
        for i in tl.static_range(512 // COUNT):
            most = tl.maximum(most, largest(x[i]))
        exponent = tl.minimum(126 - ((most.to(tl.int32, bitcast=True) >> 23) - 127), SMALL)
        raised = power_of_two(exponent)
        factor = power_of_two(SMALL - exponent) * scale
    operands = ()
    for i in tl.static_range(512 // COUNT):
        operands = operands + (operand(x[i], raised, HEADS, COUNT, GROUP, RUN),)
    return operands, operand(shared, raised, HEADS, SHARED, SHARED_GROUP, SHARED_RUN), factor


@triton.jit
def add_values(o, keys, p, keep, TERMS: tl.constexpr):
    """Return ``o · keep + keysᵀ p``, with ``p [keys, heads]`` in ``TERMS`` bfloat16 parts."""
    values = tl.trans(keys)
    high = p.to(tl.bfloat16)
    o = tl.dot(values, high, o * keep[None, :])
    if TERMS > 1:
        rest = p - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        o = tl.dot(values, middle, o)
        if TERMS > 2:
            o = tl.dot(values, (rest - middle.to(tl.float32)).to(tl.bfloat16), o)
    return o


@triton.jit
def add_tile(
    state,
    raw,
    scales,
    live,
    q,
    q_shared,
    factor,
    FORMAT: tl.constexpr,
    RUN: tl.constexpr,
    SHARED_RUN: tl.constexpr,
    SMALL: tl.constexpr,
    KEYS: tl.constexpr,
    COUNT: tl.constexpr,
    TERMS: tl.constexpr,
):
    """Return the state ``(maximum, sums of weights, outputs)`` after the keys of one tile."""
    top, total, o = state
    k = latents(raw, FORMAT, SMALL == 0, KEYS, COUNT)
    shared = shared_part(raw, FORMAT, SMALL == 0, KEYS)
    # Chains of their own: a matrix unit cuts each of its sums, and long chains lean to one side. Each is multiplied
    # before it is added, else the compiler makes one chain of all.
    scale = factor[None, :]
    s = tl.dot(contracted(shared, KEYS, SHARED, SHARED_RUN), q_shared) * scale
    for i in tl.static_range(512 // COUNT):
        part = tl.dot(contracted(k[i], KEYS, COUNT, RUN), q[i])
        if FORMAT == "flashmla":
            part *= scales[i][:, None]
        s += part * scale
    s = tl.where(live[:, None], s, -INFINITY)
    higher = tl.maximum(top, tl.max(s, axis=0))
    # Nothing yet, or a logit of +inf: whatever is subtracted, the exponential says the right thing of it.
    base = tl.where(tl.abs(higher) < INFINITY, higher, 0.0)
    p = tl.exp(s - base[None, :])
    keep = tl.exp(top - base)
    total = total * keep[None, :] + p
    if SMALL:
        p *= LIFT
    added = ()
    for i in tl.static_range(512 // COUNT):
        if FORMAT == "flashmla":
            added = added + (add_values(o[i], k[i], p * scales[i][:, None], keep, TERMS),)
        else:
            added = added + (add_values(o[i], k[i], p, keep, TERMS),)
    return higher, total, added


@triton.jit
def rows_at(
    column,
    end,
    indices,
    cache,
    page_stride,
    table,
    columns,
    pages,
    ROW_BYTES: tl.constexpr,
    SPACE: tl.constexpr,
    PAGE: tl.constexpr,
    WORLD: tl.constexpr,
    RANK: tl.constexpr,
    INTERLEAVE: tl.constexpr,
):
    """Return where the cache rows of some columns of a row of indices begin, and which of them are keys."""
    live = column < end
    index = tl.load(indices + column, mask=live, other=-1)
    page, place, live = locate(index, live, table, columns, pages, SPACE, PAGE, WORLD, RANK, INTERLEAVE)
    return cache + page * page_stride + place.to(tl.int64) * ROW_BYTES, live


@triton.jit
def tile_of(
    start,
    end,
    indices,
    cache,
    page_stride,
    table,
    columns,
    pages,
    FORMAT: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    SPACE: tl.constexpr,
    PAGE: tl.constexpr,
    WORLD: tl.constexpr,
    RANK: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Load the rows of ``KEYS`` indices from ``start`` on: their words, their scales, and which are keys."""
    key = tl.arange(0, KEYS)
    at, live = rows_at(
        start + loaded(key, KEYS),
        end,
        indices,
        cache,
        page_stride,
        table,
        columns,
        pages,
        ROW_BYTES,
        SPACE,
        PAGE,
        WORLD,
        RANK,
        INTERLEAVE,
    )
    raw = raw_row(at, live, FORMAT)
    key_at, key_live = rows_at(
        start + key,
        end,
        indices,
        cache,
        page_stride,
        table,
        columns,
        pages,
        ROW_BYTES,
        SPACE,
        PAGE,
        WORLD,
        RANK,
        INTERLEAVE,
    )
    scales = ()
    if FORMAT == "flashmla":
        for i in tl.static_range(4):
            scales = scales + (float_at(key_at, key_live, 512 + 4 * i),)
    return raw, scales, key_live


@triton.jit
def put(
    o, factor, to, inside, PART: tl.constexpr, HEADS: tl.constexpr, COUNT: tl.constexpr, GROUP: tl.constexpr
):
    """Store ``o [COUNT, HEADS]`` times a factor a head as part ``PART`` of the heads' outputs."""
    x = from_tile(tl.trans(o * factor[None, :]), HEADS, COUNT, GROUP)
    column = PART * COUNT + tl.arange(0, COUNT)
    tl.store(to[:, None] + column[None, :], x.to(to.dtype.element_ty), mask=inside[:, None])


# A width of 1 would make the loop one straight run, which an assembler turns into reads beyond shared memory.
@triton.jit(do_not_specialize=("width",))
def attend(
    q,
    cache,
    indices,
    k_scale,
    q_scale,
    index_len,
    block_table,
    row_req,
    out,
    lse_out,
    q_row,
    q_head,
    page_stride,
    index_row,
    len_stride,
    table_row,
    req_stride,
    out_row,
    out_head,
    lse_row,
    width,
    pages,
    requests,
    columns,
    heads,
    softmax_scale,
    FORMAT: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    PAGE: tl.constexpr,
    SPACE: tl.constexpr,
    WORLD: tl.constexpr,
    RANK: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    Q_ELEMENT: tl.constexpr,
    GROUP: tl.constexpr,
    SHARED_GROUP: tl.constexpr,
    RUN: tl.constexpr,
    SHARED_RUN: tl.constexpr,
    SMALL: tl.constexpr,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    SINGLE: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    COUNT: tl.constexpr,
    TERMS: tl.constexpr,
    STAGES: tl.constexpr,
    LSE: tl.constexpr,
):
    """Attend from ``HEADS`` heads of one row to one of ``SPLITS`` parts of its keys, ``CHUNK`` indices each.

    Keys are left 2^−SMALL of what they are; 0: nothing is. Output and LSE rows are those of one part where
    there are several: row ``t`` of part ``s`` is row ``t · SPLITS + s``.
    """
    program = tl.program_id(0)
    blocks = tl.cdiv(heads, HEADS)
    part = program // blocks % SPLITS
    row = (program // blocks // SPLITS).to(tl.int64)
    head = program % blocks * HEADS + tl.arange(0, HEADS)
    inside = head < heads
    indices += row * index_row

    end = width
    if index_len is not None:
        end = tl.minimum(end, tl.load(index_len + row * len_stride))
    begin = part * CHUNK
    end = tl.minimum(begin + CHUNK, end)
    table = block_table
    if SPACE != "slot":
        request = tl.load(row_req + row * req_stride)
        end = tl.where((request >= 0) & (request < requests), end, begin)
        table = block_table + request.to(tl.int64) * table_row

    if SINGLE:  # one tile: its keys are on their way while the query is turned
        raw, scales, live = tile_of(
            begin,
            end,
            indices,
            cache,
            page_stride,
            table,
            columns,
            pages,
            FORMAT,
            ROW_BYTES,
            SPACE,
            PAGE,
            WORLD,
            RANK,
            INTERLEAVE,
            KEYS,
        )

    scale = softmax_scale
    unit = 1.0
    if k_scale is not None:
        unit = tl.load(k_scale)
        scale *= unit
    if q_scale is not None:
        scale *= tl.load(q_scale)
    q_at = q + row * q_row + head.to(tl.int64) * q_head
    q_latent, q_shared, factor = queries(
        q_at, inside, scale, Q_ELEMENT, GROUP, SHARED_GROUP, RUN, SHARED_RUN, SMALL, HEADS, COUNT
    )

    top = tl.full((HEADS,), -INFINITY, tl.float32)
    total = tl.zeros((KEYS, HEADS), tl.float32)
    o = ()
    for _ in tl.static_range(512 // COUNT):
        o = o + (tl.zeros((COUNT, HEADS), tl.float32),)
    if SINGLE:
        top, total, o = add_tile(
            (top, total, o),
            raw,
            scales,
            live,
            q_latent,
            q_shared,
            factor,
            FORMAT,
            RUN,
            SHARED_RUN,
            SMALL,
            KEYS,
            COUNT,
            TERMS,
        )
    else:
        for start in tl.range(begin, end, KEYS, num_stages=STAGES):
            raw, scales, live = tile_of(
                start,
                end,
                indices,
                cache,
                page_stride,
                table,
                columns,
                pages,
                FORMAT,
                ROW_BYTES,
                SPACE,
                PAGE,
                WORLD,
                RANK,
                INTERLEAVE,
                KEYS,
            )
            top, total, o = add_tile(
                (top, total, o),
                raw,
                scales,
                live,
                q_latent,
                q_shared,
                factor,
                FORMAT,
                RUN,
                SHARED_RUN,
                SMALL,
                KEYS,
                COUNT,
                TERMS,
            )

    weight = tl.sum(total, axis=0)
    lse = tl.where(top == INFINITY, weight, top + tl.log(weight))
    # Without a key outputs are 0, and stay so whatever the scale is.
    share = tl.where(weight == 0.0, 1.0, unit / weight)
    if SMALL:
        share *= 2.0**SMALL / LIFT
    share = tl.where(top == INFINITY, float("nan"), share)
    row = row * SPLITS + part
    to = out + row * out_row + head.to(tl.int64) * out_head
    if SPLITS == 1 or begin < end:  # an empty part is known by its LSE
        for i in tl.static_range(512 // COUNT):
            put(o[i], share, to, inside, i, HEADS, COUNT, GROUP)
    if LSE:
        tl.store(lse_out + row * lse_row + head, lse, mask=inside)


@triton.jit
def combine(
    parts,
    lses,
    out,
    lse_out,
    out_row,
    out_head,
    lse_row,
    heads,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    LSE: tl.constexpr,
):
    """Add the parts of one row and head, ``BLOCK`` numbers of the output.

    Unlike the merge of ranks' states, a part with a NaN or +inf LSE is not empty: it holds such a logit.
    """
    program = tl.program_id(0)
    block = program % (D // BLOCK)
    row = (program // (D // BLOCK) // heads).to(tl.int64)
    head = (program // (D // BLOCK) % heads).to(tl.int64)
    part = row * SPLITS + tl.arange(0, SPLITS)
    lse = tl.load(lses + part * heads + head)
    top = tl.max(tl.where(lse == lse, lse, -INFINITY), axis=0)
    base = tl.where(tl.abs(top) < INFINITY, top, 0.0)
    weight = tl.exp(lse - base)
    total = tl.sum(weight, axis=0)
    column = block * BLOCK + tl.arange(0, BLOCK)
    at = parts + ((part * heads + head) * D)[:, None] + column[None, :]
    x = tl.load(at, mask=(lse != -INFINITY)[:, None], other=0.0)
    merged = tl.sum(x * weight[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * out_row + head * out_head + column, merged.to(out.dtype.element_ty))
    if LSE:
        merged_lse = tl.where(top == INFINITY, total, base + tl.log(total))
        tl.store(lse_out + row * lse_row + head, merged_lse, mask=block == 0)
