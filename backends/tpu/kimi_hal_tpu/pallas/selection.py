"""Exact selection under the contract's order on SparseCore: radix selection over 32-bit ordinals.

A score becomes an ordinal as in ``kimi_hal.reference.selection``, with its top bit turned: an unsigned number that
grows with the score, 1 for NaN, and 0 for what is no key. Four passes over a row's digits of 8 bits find the
smallest selected ordinal and how many of its equals are selected; a fifth pass writes the positions in ascending
order, which is the tie rule. Each vector subcore takes every n-th row; a row streams through its memory in two
buffers, so that one is filled while the other is counted.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kimi_hal_tpu.pallas.mode import Array, Mode, Ref

#: Keys that one buffer of a subcore holds: 16 KB.
CHUNK = 4096
BINS = 256
#: Words of a granule, 64 bytes: a row's first column and number of keys stand in one, a result has whole ones.
BOUNDS = 16
#: Bits below each digit, from the highest digit on.
SHIFTS = (24, 16, 8, 0)
SIGN = -(1 << 31)
MAGNITUDE = 0x7FFFFFFF
INFINITY = 0x7F800000


def ordinals(bits: Array) -> Array:
    """Return the unsigned ordinals of float32 bits as int32: −0 equals +0, any NaN is 1."""
    ordered = jnp.where(bits < 0, bits ^ MAGNITUDE, bits)
    ordered = jnp.where(bits == SIGN, 0, ordered) ^ SIGN
    return jnp.where((bits & MAGNITUDE) > INFINITY, 1, ordered)


def digit(key: Array, shift: int) -> Array:
    """Return 8 bits of an ordinal, counted down: bin 0 holds the largest."""
    return BINS - 1 - (jax.lax.shift_right_logical(key, jnp.full_like(key, shift)) & (BINS - 1))


def above(key: Array, shift: int) -> Array:
    """Return the bits of an ordinal above a digit."""
    return jax.lax.shift_right_logical(key, jnp.full_like(key, shift + 8))


def select(scores: Array, first: Array, count: Array, k: int, mode: Mode) -> Array:
    """Return the positions of the ``k`` best keys of each row, ascending, then −1: ``[T, k]`` int32.

    Args:
        scores: ``[T, L]`` float32, L a multiple of 128.
        first: ``[T]`` int32, the column of each row's position 0.
        count: ``[T]`` int32, keys of each row; ``first + count <= L``.
        k: how many.
        mode: compiled or interpreted.
    """
    rows, width = scores.shape
    lanes, columns = mode.lanes, -(-k // BOUNDS) * BOUNDS
    chunk = max(lanes, min(CHUNK, width))
    padded = -(-width // chunk) * chunk
    bits = jax.lax.bitcast_convert_type(jnp.pad(scores, ((0, 0), (0, padded - width))), jnp.int32)
    bounds = jnp.pad(jnp.stack([first, count], axis=1), ((0, 0), (0, BOUNDS - 2)))
    kernel = mode.on_subcores(
        functools.partial(_kernel, rows=rows, chunk=chunk, k=k, mode=mode),
        jax.ShapeDtypeStruct((rows * columns,), jnp.int32),
        [
            pltpu.VMEM((2 * chunk,), jnp.int32),
            pltpu.VMEM((BINS,), jnp.int32),
            pltpu.VMEM((columns + lanes,), jnp.int32),
            pltpu.VMEM((BOUNDS,), jnp.int32),
            pltpu.SemaphoreType.DMA((2,)),
        ],
        name="topk_select",
    )
    return kernel(bits.reshape(-1), bounds.reshape(-1)).reshape(rows, columns)[:, :k]


def _kernel(
    worker: Array,
    workers: int,
    bits: Ref,
    bounds: Ref,
    out: Ref,
    buffer: Ref,
    histogram: Ref,
    picked: Ref,
    bound: Ref,
    semaphores: Ref,
    *,
    rows: int,
    chunk: int,
    k: int,
    mode: Mode,
) -> None:
    width, columns, lanes = bits.shape[0] // rows, out.shape[0] // rows, mode.lanes

    def one(i: Array, _: None) -> None:
        row = worker + i * workers

        @pl.when(row < rows)
        def _select() -> None:
            pltpu.sync_copy(bounds.at[pl.ds(row * BOUNDS, BOUNDS)], bound)
            few = min(lanes, BOUNDS)
            vector, lane = bound[pl.ds(0, few)], jax.lax.iota(jnp.int32, few)
            first = jnp.sum(jnp.where(lane == 0, vector, 0))
            count = jnp.sum(jnp.where(lane == 1, vector, 0))
            line = Row(bits, row * width, first, count, buffer, semaphores, chunk, lanes)
            _fill(picked, columns, lanes)
            cut, ties = _threshold(line, histogram, jnp.minimum(count, k), mode)
            _collect(line, picked, cut, ties, mode)
            pltpu.sync_copy(picked.at[pl.ds(0, columns)], out.at[pl.ds(row * columns, columns)])

    jax.lax.fori_loop(0, -(-rows // workers), one, None)


class Row:
    """One row of scores in HBM, streamed through two buffers."""

    def __init__(
        self,
        bits: Ref,
        base: Array,
        first: Array,
        count: Array,
        buffer: Ref,
        semaphores: Ref,
        chunk: int,
        lanes: int,
    ) -> None:
        self.bits, self.base, self.first, self.count = bits, base, first, count
        self.buffer, self.semaphores, self.chunk, self.lanes = buffer, semaphores, chunk, lanes
        #: The chunks in which this row has keys.
        self.begin = first // chunk
        self.end = jnp.where(count > 0, (first + count + chunk - 1) // chunk, self.begin)

    def copy(self, number: Array) -> Any:
        """Return the copy of a chunk into the buffer that is its own by turns."""
        slot = number % 2
        return pltpu.make_async_copy(
            self.bits.at[pl.ds(self.base + number * self.chunk, self.chunk)],
            self.buffer.at[pl.ds(slot * self.chunk, self.chunk)],
            self.semaphores.at[slot],
        )

    def scan(self, visit: Any, carry: Any) -> Any:
        """Call ``visit(ordinals, positions, live, carry)`` for every vector of the row, in order."""

        @pl.when(self.begin < self.end)
        def _start() -> None:
            self.copy(self.begin).start()

        def chunk(number: Array, carry: Any) -> Any:
            @pl.when(number + 1 < self.end)
            def _next() -> None:
                self.copy(number + 1).start()

            self.copy(number).wait()
            low = jnp.maximum(self.first - number * self.chunk, 0) // self.lanes
            high = jnp.minimum(self.first + self.count - number * self.chunk, self.chunk)
            steps = (high + self.lanes - 1) // self.lanes

            def vector(step: Array, carry: Any) -> Any:
                offset = step * self.lanes
                key = ordinals(self.buffer[pl.ds((number % 2) * self.chunk + offset, self.lanes)])
                column = number * self.chunk + offset + jax.lax.iota(jnp.int32, self.lanes)
                position = column - self.first
                live = (position >= 0) & (position < self.count)
                return visit(key, position, live, carry)

            return jax.lax.fori_loop(low, steps, vector, carry)

        return jax.lax.fori_loop(self.begin, self.end, chunk, carry)


def _fill(picked: Ref, columns: int, lanes: int) -> None:
    def one(i: Array, _: None) -> None:
        picked[pl.ds(i * lanes, lanes)] = jnp.full((lanes,), -1, jnp.int32)

    jax.lax.fori_loop(0, (columns + lanes) // lanes, one, None)


def _threshold(line: Row, histogram: Ref, wanted: Array, mode: Mode) -> tuple[Array, Array]:
    """Return the smallest selected ordinal, and how many of the keys that equal it are selected."""
    prefix = jnp.int32(0)
    for shift in SHIFTS:
        _clear(histogram, line.lanes)

        def tally(
            key: Array, _p: Array, live: Array, carry: Any, shift: int = shift, prefix: Array = prefix
        ) -> Any:
            member = live if shift == SHIFTS[0] else live & (above(key, shift) == prefix)
            mode.count(histogram, digit(key, shift), member)
            return carry

        line.scan(tally, None)
        bin_, before = _crossing(histogram, wanted, line.lanes)
        wanted = wanted - before
        prefix = (prefix << 8) | (BINS - 1 - bin_)
    return prefix, wanted


def _clear(histogram: Ref, lanes: int) -> None:
    some = min(lanes, BINS)

    def one(i: Array, _: None) -> None:
        histogram[pl.ds(i * some, some)] = jnp.zeros((some,), jnp.int32)

    jax.lax.fori_loop(0, BINS // some, one, None)


def _crossing(histogram: Ref, wanted: Array, lanes: int) -> tuple[Array, Array]:
    """Return the first bin up to which ``wanted`` keys are reached, and the keys before it."""
    some = min(lanes, BINS)

    def one(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        bins, before, total = carry
        counts = histogram[pl.ds(i * some, some)]
        short = total + jnp.cumsum(counts) < wanted
        bins = bins + jnp.sum(short.astype(jnp.int32))
        before = before + jnp.sum(jnp.where(short, counts, 0))
        return bins, before, total + jnp.sum(counts)

    zero = jnp.int32(0)
    bins, before, _ = jax.lax.fori_loop(0, BINS // some, one, (zero, zero, zero))
    return jnp.minimum(bins, BINS - 1), before


def _collect(line: Row, picked: Ref, cut: Array, ties: Array, mode: Mode) -> None:
    """Write the positions of what is above the cut, and of the first ``ties`` keys that equal it."""

    def take(key: Array, position: Array, live: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        place, left = carry
        equal = live & (key == cut)
        rank = jnp.cumsum(equal.astype(jnp.int32))
        chosen = (live & ((key ^ SIGN) > (cut ^ SIGN))) | (equal & (rank <= left))
        mode.append(picked, place, position, chosen)
        return place + jnp.sum(chosen.astype(jnp.int32)), left - jnp.sum(equal.astype(jnp.int32))

    line.scan(take, (jnp.int32(0), ties))
