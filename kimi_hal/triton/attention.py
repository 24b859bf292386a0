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
    QUARTER,
    SHARED,
    float_at,
    fp8_numbers,
    from_tile,
    locate,
    quarter,
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
def operand(x, factor, HEADS: tl.constexpr, COUNT: tl.constexpr, GROUP: tl.constexpr):
    """Return a query ``[HEADS, COUNT]`` times a power of two as ``[COUNT, HEADS]`` bfloat16, in the tile's order."""
    return tl.trans(to_tile((x * factor[:, None]).to(tl.bfloat16), HEADS, COUNT, GROUP))


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
def put(o, factor, to, inside, PART: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr):
    """Store ``o [128, HEADS]`` times a factor a head as quarter ``PART`` of the heads' outputs."""
    x = from_tile(tl.trans(o * factor[None, :]), HEADS, QUARTER, GROUP)
    column = PART * QUARTER + tl.arange(0, QUARTER)
    tl.store(to[:, None] + column[None, :], x.to(to.dtype.element_ty), mask=inside[:, None])


@triton.jit
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
    SMALL: tl.constexpr,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
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

    scale = softmax_scale
    unit = 1.0
    if k_scale is not None:
        unit = tl.load(k_scale)
        scale *= unit
    if q_scale is not None:
        scale *= tl.load(q_scale)

    q_at = q + row * q_row + head.to(tl.int64) * q_head
    x0 = query(q_at, inside, 0, QUARTER, Q_ELEMENT)
    x1 = query(q_at, inside, 128, QUARTER, Q_ELEMENT)
    x2 = query(q_at, inside, 256, QUARTER, Q_ELEMENT)
    x3 = query(q_at, inside, 384, QUARTER, Q_ELEMENT)
    xs = query(q_at, inside, 512, SHARED, Q_ELEMENT)
    if SMALL:  # queries are raised by as much, or as far as their largest number lets them be
        most = tl.maximum(tl.maximum(largest(x0), largest(x1)), tl.maximum(largest(x2), largest(x3)))
        most = tl.maximum(most, largest(xs))
        exponent = tl.minimum(126 - ((most.to(tl.int32, bitcast=True) >> 23) - 127), SMALL)
        raised = power_of_two(exponent)
        factor = power_of_two(SMALL - exponent) * scale
    else:
        raised = tl.full((HEADS,), 1.0, tl.float32)
        factor = tl.full((HEADS,), 1.0, tl.float32) * scale
    q0 = operand(x0, raised, HEADS, QUARTER, GROUP)
    q1 = operand(x1, raised, HEADS, QUARTER, GROUP)
    q2 = operand(x2, raised, HEADS, QUARTER, GROUP)
    q3 = operand(x3, raised, HEADS, QUARTER, GROUP)
    qs = operand(xs, raised, HEADS, SHARED, SHARED_GROUP)

    top = tl.full((HEADS,), -INFINITY, tl.float32)
    total = tl.zeros((KEYS, HEADS), tl.float32)
    o0 = tl.zeros((QUARTER, HEADS), tl.float32)
    o1 = tl.zeros((QUARTER, HEADS), tl.float32)
    o2 = tl.zeros((QUARTER, HEADS), tl.float32)
    o3 = tl.zeros((QUARTER, HEADS), tl.float32)
    for start in tl.range(begin, end, KEYS, num_stages=STAGES):
        column = start + tl.arange(0, KEYS)
        live = column < end
        index = tl.load(indices + row * index_row + column, mask=live, other=-1)
        page, place, live = locate(index, live, table, columns, pages, SPACE, PAGE, WORLD, RANK, INTERLEAVE)
        at = cache + page * page_stride + place.to(tl.int64) * ROW_BYTES
        k0 = quarter(at, live, 0, FORMAT, SMALL == 0, KEYS)
        k1 = quarter(at, live, 1, FORMAT, SMALL == 0, KEYS)
        k2 = quarter(at, live, 2, FORMAT, SMALL == 0, KEYS)
        k3 = quarter(at, live, 3, FORMAT, SMALL == 0, KEYS)
        ks = shared_part(at, live, FORMAT, SMALL == 0, KEYS)
        if FORMAT == "flashmla":
            s0, s1 = float_at(at, live, 512), float_at(at, live, 516)
            s2, s3 = float_at(at, live, 520), float_at(at, live, 524)
            s = tl.dot(k0, q0) * s0[:, None] + tl.dot(k1, q1) * s1[:, None]
            s += tl.dot(k2, q2) * s2[:, None] + tl.dot(k3, q3) * s3[:, None]
            s += tl.dot(ks, qs)
        else:
            s = tl.dot(k0, q0)
            s = tl.dot(k1, q1, s)
            s = tl.dot(k2, q2, s)
            s = tl.dot(k3, q3, s)
            s = tl.dot(ks, qs, s)
        s = tl.where(live[:, None], s * factor[None, :], -INFINITY)
        higher = tl.maximum(top, tl.max(s, axis=0))
        # Nothing yet, or a logit of +inf: whatever is subtracted, the exponential says the right thing of it.
        base = tl.where(tl.abs(higher) < INFINITY, higher, 0.0)
        p = tl.exp(s - base[None, :])
        keep = tl.exp(top - base)
        top = higher
        total = total * keep[None, :] + p
        if SMALL:
            p *= LIFT
        if FORMAT == "flashmla":
            o0 = add_values(o0, k0, p * s0[:, None], keep, TERMS)
            o1 = add_values(o1, k1, p * s1[:, None], keep, TERMS)
            o2 = add_values(o2, k2, p * s2[:, None], keep, TERMS)
            o3 = add_values(o3, k3, p * s3[:, None], keep, TERMS)
        else:
            o0 = add_values(o0, k0, p, keep, TERMS)
            o1 = add_values(o1, k1, p, keep, TERMS)
            o2 = add_values(o2, k2, p, keep, TERMS)
            o3 = add_values(o3, k3, p, keep, TERMS)

    weight = tl.sum(total, axis=0)
    lse = tl.where(top == INFINITY, weight, top + tl.log(weight))
    share = unit / tl.where(weight == 0.0, 1.0, weight)
    if SMALL:
        share *= 2.0**SMALL / LIFT
    share = tl.where(top == INFINITY, float("nan"), share)
    row = row * SPLITS + part
    to = out + row * out_row + head.to(tl.int64) * out_head
    if SPLITS == 1 or begin < end:  # an empty part is known by its LSE
        put(o0, share, to, inside, 0, HEADS, GROUP)
        put(o1, share, to, inside, 1, HEADS, GROUP)
        put(o2, share, to, inside, 2, HEADS, GROUP)
        put(o3, share, to, inside, 3, HEADS, GROUP)
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
