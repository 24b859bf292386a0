"""The delta recurrence by chunks on TensorCore: what prefill does to a state, as products of matrices.

Inside a chunk of C rows, with G the running sum of the log decays and S the state before it:

``L[t, j] = beta_t Σ k_t k_j exp(G_t − G_j)`` for j < t, ``B[t, j] = Σ q_t k_j exp(G_t − G_j)`` for j ≤ t,
``u = (1 + L)⁻¹ beta (v − (k exp G) Sᵀ)``, ``o = (q exp G) Sᵀ + B u``,
``S ← S exp G_C + uᵀ (k exp(G_C − G))``. Formulas: flash-linear-attention ``fla/ops/kda/naive.py``.

``exp(G_t − G_j)`` does not factor without overflow, unless it is cut at a row between j and t: both parts are at most 1
then. Rows t and j whose numbers first differ in the bit m are cut at the end of the first half of the 2m rows that
hold both, so one product a bit gives all pairs of it. The same blocks invert 1 + L from the diagonal outwards.
What is exponentiated is a sum of decays, never a difference of sums: no factor is beyond 1, and none loses digits.

Zero times what is not finite is no number, so a product over all rows would carry a NaN to the rows before it. A chunk
ends for the products at the first row that is not finite; from there on its rows are taken one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kimi_hal.ops.kda import KDASpec
from kimi_hal_tpu.pallas import gates, recurrence
from kimi_hal_tpu.pallas.mode import Array, Mode, Ref

#: Rows of a chunk, a power of two.
CHUNK = 64
#: Bits by which two rows of a chunk differ first.
LEVELS = tuple(1 << bit for bit in range(CHUNK.bit_length() - 1))
#: Heads of one step of the grid, at most.
HEADS = 4
#: A chunk starts with the state of its slot, with zero, or goes on with that of the chunk before it.
READ, ZERO, SAME = range(3)
#: A log decay below this is nothing in float32; −inf times 0 would be NaN.
NOTHING = -1e4
#: Numbers from here on, infinities among them, are left to the form row by row: products of them may overflow.
HUGE = 2.0**100
#: bfloat16 terms of a float32 number, and how many of the one factor's meet each of the other's, the smallest first:
#: what is left out is below 24 bits.
TERMS, MET = 3, (1, 2, 3)
#: q, k, v, log decays and beta of a chunk.
Rows = tuple[Array, ...]
#: Dimensions of two factors over which products are summed.
Contracted = tuple[tuple[int, ...], tuple[int, ...]]
ROWS_BY_ROWS, COLUMNS_BY_ROWS, COLUMNS_BY_COLUMNS = ((1,), (1,)), ((1,), (0,)), ((0,), (0,))


class Chunks(NamedTuple):
    """What is done with each of J chunks, int32 ``[J]`` each.

    Attributes:
        slot: of the chunk's sequence; the one that was last where the chunk is of none.
        begin: ``READ``, ``ZERO`` or ``SAME``.
        count: rows of the chunk that are there, the first ones.
        target: slot that receives the state afterwards; −1: none.
        saved: another such slot.
    """

    slot: Array
    begin: Array
    count: Array
    target: Array
    saved: Array


def advance(
    spec: KDASpec, work: Chunks, rows: Mapping[str, Array], pool: Array, mode: Mode
) -> tuple[Array, Array]:
    """Run the recurrence over chunks in order.

    Args:
        spec: of the call.
        work: what the chunks start from, and where their states go.
        rows: ``q``, ``k``, ``v`` bfloat16 and ``g``, raw or finished, ``[H, J, C, D]``; ``beta`` ``[H, J, 1, C]``
            float32, finished; for a raw gate ``rate`` and ``bias``, ``[H, 1, D]`` float32.
        pool: ``[slots, H, D, D]`` float32, value-major.
        mode: compiled or interpreted.

    Returns:
        Outputs ``[H, J, C, D]`` bfloat16, of which rows beyond ``count`` hold anything, and the pool.
    """
    total, count, _, size = rows["q"].shape
    heads = max(n for n in range(1, HEADS + 1) if total % n == 0)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    spans = jnp.asarray(sums_of_decays(), jnp.bfloat16)
    names = (*Chunks._fields, *rows, "spans", "pool", "out", "stored", "state", "moving")
    out, stored = pl.pallas_call(
        functools.partial(_kernel, spec=spec, names=names),
        out_shape=[
            jax.ShapeDtypeStruct(rows["q"].shape, jnp.bfloat16),
            jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        ],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(work),
            grid=(total // heads, count),
            in_specs=[
                *(_block(array.shape, heads) for array in rows.values()),
                pl.BlockSpec(spans.shape, lambda h, j, *_: (0, 0)),
                # A slot that another sequence of the call writes is named by none: it may be read ahead.
                pl.BlockSpec((1, heads, size, size), lambda h, j, slot, *_: (slot[j], h, 0, 0)),
            ],
            out_specs=[_block(rows["q"].shape, heads), anywhere],
            scratch_shapes=[pltpu.VMEM((heads, size, size), jnp.float32), pltpu.SemaphoreType.DMA((2,))],
        ),
        input_output_aliases={len(work) + len(rows) + 1: 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=mode.interpret,
        name="kda_chunks",
    )(*work, *rows.values(), spans, pool)
    return out, stored


def _block(shape: tuple[int, ...], heads: int) -> pl.BlockSpec:
    """Return the part of an operand that a step sees: some heads, and of four dimensions one chunk."""
    if len(shape) == 3:
        return pl.BlockSpec((heads, *shape[1:]), lambda h, j, *_: (h, 0, 0))
    return pl.BlockSpec((heads, 1, *shape[2:]), lambda h, j, *_: (h, j, 0, 0))


def sums_of_decays() -> Any:
    """Return the matrix of 0 and 1 that sums log decays over the rows of a chunk, ``[(2 + levels) · C, C]``.

    The first C rows of its product with them are the sums up to each row, the next those behind each row; then for each
    level those between a row and the middle of its block, from the row after the earlier to the later.
    """
    row, column = np.arange(CHUNK)[:, None], np.arange(CHUNK)
    found = [column <= row, column > row]
    for half in LEVELS:
        middle = row - row % (2 * half) + half - 1
        found.append(
            np.where(row > middle, (column > middle) & (column <= row), (column > row) & (column <= middle))
        )
    return np.concatenate(found).astype(np.float32)


def _kernel(*refs: Ref, spec: KDASpec, names: Sequence[str]) -> None:
    at = dict(zip(names, refs, strict=True))
    j, state = pl.program_id(1), at["state"]
    heads = state.shape[0]
    begin, count = at["begin"][j], at["count"][j]

    @pl.when(begin == READ)
    def _read() -> None:
        state[...] = at["pool"][0]

    @pl.when(begin == ZERO)
    def _clear() -> None:
        state[...] = jnp.zeros_like(state)

    @pl.when(count > 0)
    def _advance() -> None:
        ends = []
        for head in range(heads):
            given = operands(spec, at, head)
            ends.append(ordinary(given, count))
            out, state[head] = chunk(*first(given, ends[-1]), at["spans"][...], state[head])
            at["out"][head, 0] = out.astype(jnp.bfloat16)

        @pl.when(functools.reduce(jnp.minimum, ends) < count)
        def _rest() -> None:
            jax.lax.fori_loop(0, heads, lambda head, _: _one_by_one(spec, at, head, count), None)

    ends = [(at[name][j], number) for number, name in enumerate(("target", "saved"))]
    for do in ("start", "wait"):
        for slot, number in ends:

            @pl.when(slot >= 0)
            def _store(slot: Array = slot, number: int = number, do: str = do) -> None:
                there = at["stored"].at[slot, pl.ds(pl.program_id(0) * heads, heads)]
                getattr(pltpu.make_async_copy(state, there, at["moving"].at[number]), do)()


def _one_by_one(spec: KDASpec, at: Mapping[str, Ref], head: Array, count: Array) -> None:
    """Go on with a head from its first row that is not ordinary, to whose place its outputs and its state stand."""
    given = operands(spec, at, head)
    end = ordinary(given, count)
    out, at["state"][head] = by_rows(
        given, end, count, at["out"][head, 0].astype(jnp.float32), at["state"][head]
    )
    at["out"][head, 0] = out.astype(jnp.bfloat16)


def operands(spec: KDASpec, at: Mapping[str, Ref], head: int | Array) -> Rows:
    """Return q, k, v, log decays ``[C, D]`` and beta ``[C, 1]`` of a head; rows that are not there hold anything."""
    size = at["q"].shape[2]
    rate, bias = (at[name][head] if name in at else None for name in ("rate", "bias"))
    return (
        gates.query(spec, at["q"][head, 0]),
        gates.key(spec, at["k"][head, 0]),
        at["v"][head, 0].astype(jnp.float32),
        jnp.maximum(gates.log_decay(spec, at["g"][head, 0], rate, bias), NOTHING),
        jnp.transpose(jnp.broadcast_to(at["beta"][head, 0], (8, size)))[:, :1],
    )


def ordinary(given: Rows, count: Array) -> Array:
    """Return how many of ``count`` rows stand before the first that holds a NaN, an infinity or a huge number."""
    size = given[0].shape[0]
    fits = functools.reduce(jnp.logical_and, [jnp.abs(x) < HUGE for x in given])
    row = jax.lax.broadcasted_iota(jnp.int32, fits.shape, 0).astype(jnp.float32)
    return jnp.minimum(jnp.min(jnp.where(fits, float(size), row)).astype(jnp.int32), count)


def first(given: Rows, count: Array) -> Rows:
    """Return rows, all 0 from ``count`` on."""
    row = jax.lax.broadcasted_iota(jnp.int32, (given[0].shape[0], 1), 0)
    return tuple(jnp.where(row < count, x, 0.0) for x in given)


def by_rows(given: Rows, begin: Array, count: Array, out: Array, state: Array) -> tuple[Array, Array]:
    """Return ``out`` with the rows from ``begin`` to ``count``, and the state after them; ``state [V, K]``: before."""
    row = jax.lax.broadcasted_iota(jnp.int32, (out.shape[0], 1), 0)

    def one(t: Array, carried: tuple[Array, Array]) -> tuple[Array, Array]:
        out, state = carried
        q, k, v, g, beta = (jnp.sum(jnp.where(row == t, x, 0.0), axis=0, keepdims=True) for x in given)
        after = recurrence.corrected(state[None], k, v, jnp.exp(g), beta)
        return jnp.where(row == t, recurrence.read(after, q), out), after[0]

    found: tuple[Array, Array] = jax.lax.fori_loop(begin, count, one, (out, state))
    return found


def chunk(
    q: Array, k: Array, v: Array, g: Array, beta: Array, spans: Array, state: Array
) -> tuple[Array, Array]:
    """Return the outputs ``[C, V]`` of a chunk and the state ``[V, K]`` after it.

    Args:
        q: ``[C, K]`` float32, ready for the recurrence.
        k: likewise.
        v: ``[C, V]``.
        g: ``[C, K]``, log decays.
        beta: ``[C, 1]``.
        spans: ``sums_of_decays()``.
        state: ``[V, K]``.
    """
    size = q.shape[0]
    decays = jnp.exp(exact_left(spans, g))
    entered, left = decays[:size], decays[size : 2 * size]
    inverse, among = within(q, k, beta, decays[2 * size :])
    read = product(jnp.concatenate([k * entered, q * entered]), state, ROWS_BY_ROWS)
    u = product(inverse, beta * (v - read[:size]), COLUMNS_BY_ROWS)
    own = jnp.sum(q * k, axis=1, keepdims=True) * u
    out = read[size:] + product(among, u, COLUMNS_BY_ROWS) + own
    return out, state * entered[size - 1 :] + product(u, k * left, COLUMNS_BY_COLUMNS)


def within(q: Array, k: Array, beta: Array, decays: Array) -> tuple[Array, Array]:
    """Return ``(1 + L)⁻¹`` and B without its diagonal, ``[C, C]`` each, from the decays of every level."""
    size = q.shape[0]
    row = jax.lax.broadcasted_iota(jnp.int32, (size, size), 0)
    column = jax.lax.broadcasted_iota(jnp.int32, (size, size), 1)
    inverse, among = jnp.where(row == column, 1.0, 0.0), jnp.zeros((size, size), jnp.float32)
    for number, half in enumerate(LEVELS):
        faded = decays[number * size : (number + 1) * size]
        keys = k * faded
        found = product(jnp.concatenate([keys, q * faded]), keys, ROWS_BY_ROWS)
        here = (row > column) & ((row ^ column) >= half) & ((row ^ column) < 2 * half)
        lower = jnp.where(here, beta * found[:size], 0.0)
        among = jnp.where(here, found[size:], among)
        # Of [[X, 0], [Y, Z]] the inverse has −Z⁻¹ Y X⁻¹ below its diagonal.
        if half > 1:
            lower = product(inverse, product(lower, inverse, COLUMNS_BY_ROWS), COLUMNS_BY_ROWS)
        inverse = inverse - lower
    return inverse, among


def terms(x: Array) -> list[Array]:
    """Split float32 numbers into three of bfloat16 whose sum they are."""
    found = []
    for _ in range(TERMS):
        part = x.astype(jnp.bfloat16)
        x = x - part.astype(jnp.float32)
        found.append(part)
    return found


def product(a: Array, b: Array, contracted: Contracted) -> Array:
    """Multiply float32 matrices in six products of bfloat16 ones: no term above 2^−24 of them is left out.

    Terms of ``a`` that meet the same term of ``b`` are one product: the MXU is loaded with it once.
    """
    left, right = terms(a), terms(b)
    free = 1 - contracted[0][0]
    size = a.shape[free]
    found = []
    for j, met in zip(reversed(range(TERMS)), MET, strict=True):
        made = _dot(jnp.concatenate(left[:met], axis=free), right[j], contracted)
        found += [made[i * size : (i + 1) * size] for i in reversed(range(met))]
    return functools.reduce(jnp.add, found)


def exact_left(a: Array, b: Array) -> Array:
    """Multiply a bfloat16 matrix of small integers with a float32 one, which is split into its terms."""
    return functools.reduce(jnp.add, [_dot(a, part, COLUMNS_BY_ROWS) for part in reversed(terms(b))])


def _dot(a: Array, b: Array, contracted: Contracted) -> Array:
    return jax.lax.dot_general(a, b, (contracted, ((), ())), preferred_element_type=jnp.float32)
