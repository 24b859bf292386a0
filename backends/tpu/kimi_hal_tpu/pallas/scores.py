"""Index scores on TensorCore from paged FP8 keys: pages stream from HBM into two buffers, one read while one fills.

Consecutive rows of one request share what is read: a tile of rows is cut into runs, and a run reads each page of its
request once. A prefill has one run a tile; decode rows are runs of their own. What is computed of a row is the same
either way, to the bit.

A page of 64 keys is 64 rows of 128 bytes and two rows with the 64 float32 scales. The scales' bytes lie along the
lanes, where no TPU can join them; two small exact products on the MXU put them together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kimi_hal_tpu.pallas.mode import Array, Mode, Ref

PAGE = 64
LANES = 128
#: Rows of 128 bytes of a page: its keys, then its scales.
PAGE_ROWS = 66
#: Pages of one buffer: 512 keys, 68 KB.
PAGES = 8
#: Lines of 128 scores that the keys of one buffer make.
LINES = PAGES * PAGE // LANES
#: Rows of a tile, at most.
TILE = 16


def score(
    q: Array, weights: Array, cache: Array, table: Array, row_req: Array, row_len: Array, mode: Mode
) -> Array:
    """Return ``Σ_h w · relu(q · k)`` for every key of every row.

    Args:
        q: ``[T, H, 128]`` float8_e4m3fn.
        weights: ``[T, H]`` float32.
        cache: ``[pages, 66, 128]`` uint8.
        table: ``[R, columns]`` int32, columns a multiple of 16. An entry that names no page scores −inf.
        row_req: ``[T]`` int32, each within the table.
        row_len: ``[T]`` int32, keys of each row, at most ``64 · columns``.
        mode: compiled or interpreted.

    Returns:
        ``[T, 64 · columns]`` float32; columns behind a row's keys hold anything.
    """
    rows, columns = q.shape[0], table.shape[1]
    tile = min(TILE, pl.next_power_of_2(rows))
    q, weights, row_req, row_len = padded(-rows % tile, q, weights, row_req, row_len)
    out = _call(tile, q, table, cache, mode)(row_req, row_len, table[:, None, :], q, weights, cache)
    return out[:rows].reshape(rows, columns * PAGE)


def padded(more: int, q: Array, weights: Array, row_req: Array, row_len: Array) -> tuple[Array, ...]:
    """Add rows without keys, of the last row's request."""
    if not more:
        return q, weights, row_req, row_len
    behind = [jnp.zeros((more, *x.shape[1:]), x.dtype) for x in (q, weights, row_len)]
    last = jnp.broadcast_to(row_req[-1:], (more,))
    rows = zip((q, weights, row_req, row_len), (*behind[:2], last, behind[2]), strict=True)
    return tuple(jnp.concatenate(pair) for pair in rows)


def _call(tile: int, q: Array, table: Array, cache: Array, mode: Mode) -> Callable[..., Array]:
    rows, heads, dim = q.shape
    columns = table.shape[1]
    called: Callable[..., Array] = pl.pallas_call(
        functools.partial(_kernel, pages=cache.shape[0], tile=tile),
        out_shape=jax.ShapeDtypeStruct((rows, columns * PAGE // LANES, LANES), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(rows // tile, tile),
            in_specs=[
                pl.BlockSpec(
                    (1, 1, columns), lambda t, r, req, _: (req[t * tile + r], 0, 0), memory_space=pltpu.SMEM
                ),
                pl.BlockSpec((tile, heads, dim), lambda t, *_: (t, 0, 0)),
                pl.BlockSpec((tile, heads), lambda t, *_: (t, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[
                pltpu.VMEM((2, PAGES, PAGE_ROWS, LANES), jnp.uint8),
                pltpu.VMEM((2, tile, LINES, LANES), jnp.float32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        interpret=mode.interpret,
        name="indexer_logits",
    )
    return called


def _kernel(
    row_req: Ref,
    row_len: Ref,
    table: Ref,
    q: Ref,
    weights: Ref,
    cache: Ref,
    out: Ref,
    buffer: Ref,
    lines: Ref,
    reading: Ref,
    writing: Ref,
    *,
    pages: int,
    tile: int,
) -> None:
    """Score one row, and with it those behind it in the tile that have its request; none if it is behind one."""
    base, lead = pl.program_id(0) * tile, pl.program_id(1)
    request = row_req[base + lead]

    @pl.when((lead == 0) | (row_req[base + jnp.maximum(lead - 1, 0)] != request))
    def _run() -> None:
        def member(row: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            end, longest = carry
            more = (end == row) & (row_req[base + row] == request)
            length = jnp.where(more, row_len[base + row], 0)
            return end + more.astype(jnp.int32), jnp.maximum(longest, length)

        end, longest = jax.lax.fori_loop(lead, tile, member, (lead, jnp.int32(0)))
        stream = Pages(table, cache, buffer, reading, (longest + PAGE - 1) // PAGE, pages)
        result = Lines(lines, out, writing, base, lead, end)
        _score(stream, result, q, weights)


class Pages:
    """The pages of one request in HBM, streamed through two buffers."""

    def __init__(
        self, table: Ref, cache: Ref, buffer: Ref, semaphores: Ref, count: Array, pages: int
    ) -> None:
        self.table, self.cache, self.buffer, self.semaphores = table, cache, buffer, semaphores
        self.count, self.pages = count, pages
        self.steps = (count + PAGES - 1) // PAGES

    def named(self, place: Array) -> tuple[Array, Array]:
        """Return the page at a place of the table, and whether the entry names one."""
        page = self.table[0, 0, place]
        return jnp.clip(page, 0, self.pages - 1), ((page >= 0) & (page < self.pages)).astype(jnp.int32)

    def each(self, step: Array, do: Callable[[Any], None]) -> None:
        """Call ``do`` with the copy of every page of a step."""
        slot = step % 2
        for page in range(PAGES):

            @pl.when(step * PAGES + page < self.count)
            def _one(page: int = page) -> None:
                source, _ = self.named(step * PAGES + page)
                target = self.buffer.at[slot, page]
                do(pltpu.make_async_copy(self.cache.at[source], target, self.semaphores.at[slot]))


class Lines:
    """The scores of a run's rows on their way to HBM, from two buffers."""

    def __init__(self, lines: Ref, out: Ref, semaphores: Ref, base: Array, lead: Array, end: Array) -> None:
        self.lines, self.out, self.semaphores = lines, out, semaphores
        self.base, self.lead, self.end = base, lead, end

    def rows(self, do: Callable[[Array], None]) -> None:
        """Call ``do`` with every row of the run, as counted in its tile."""
        jax.lax.fori_loop(self.lead, self.end, lambda row, _: do(row), None)

    def each(self, step: Array, do: Callable[[Any], None]) -> None:
        """Call ``do`` with the copy of every row's scores of a step."""
        slot = step % 2

        def one(row: Array) -> None:
            target = self.out.at[self.base + row, pl.ds(step * LINES, LINES)]
            do(pltpu.make_async_copy(self.lines.at[slot, row], target, self.semaphores.at[slot]))

        self.rows(one)


def _score(stream: Pages, result: Lines, q: Ref, weights: Ref) -> None:
    """Score every row of a run against every page of its request."""
    lane = jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
    stream.each(jnp.int32(0), lambda copy: copy.start())

    def body(step: Array, _: None) -> None:
        slot = step % 2
        stream.each(step + 1, lambda copy: copy.start())
        stream.each(step, lambda copy: copy.wait())

        @pl.when(step >= 2)
        def _free() -> None:
            result.each(step - 2, lambda copy: copy.wait())

        for pair in range(PAGES // 2):
            first = step * PAGES + 2 * pair

            @pl.when(first < stream.count)
            def _pair(pair: int = pair, first: Array = first) -> None:
                keys, factors = two_pages(stream.buffer.at[slot, pl.ds(2 * pair, 2)])
                there = jnp.where(lane < PAGE, stream.named(first)[1], stream.named(first + 1)[1])

                def row(number: Array) -> None:
                    line = weighted(q[number], weights[pl.ds(number, 1)], keys) * factors
                    result.lines[slot, number, pl.ds(pair, 1)] = jnp.where(there != 0, line, -jnp.inf)

                result.rows(row)

        result.each(step, lambda copy: copy.start())

    jax.lax.fori_loop(0, stream.steps, body, None)
    for back in (2, 1):

        @pl.when(stream.steps >= back)
        def _last(back: int = back) -> None:
            result.each(stream.steps - back, lambda copy: copy.wait())


def two_pages(pages: Ref) -> tuple[Array, Array]:
    """Return the keys ``[128, 128]`` and their scales ``[1, 128]`` of two pages ``[2, 66, 128]`` of bytes."""
    codes = jnp.concatenate([pages[0, :PAGE], pages[1, :PAGE]], axis=0)
    tail = [pages[page, PAGE:].astype(jnp.int32) for page in range(2)]
    keys = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
    return keys, scales(jnp.concatenate(tail, axis=0))


def weighted(q: Array, weights: Array, keys: Array) -> Array:
    """Return the scores ``[1, 128]`` of a row's heads ``[H, 128]``, without the keys' scales."""
    dots = jax.lax.dot_general(q, keys, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return jax.lax.dot_general(
        weights,
        jnp.maximum(dots, 0.0),
        (((1,), (0,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def scales(data: Array) -> Array:
    """Return ``[1, 128]`` float32 from ``[4, 128]`` bytes in memory order, little end first.

    Three bytes of a number make an integer below 2^24, which a sum of exact products in float32 holds.
    """
    source = jax.lax.broadcasted_iota(jnp.int32, (LANES, LANES), 0)
    target = jax.lax.broadcasted_iota(jnp.int32, (LANES, LANES), 1)
    mine, place = source // 4 == target % 32, source % 4
    low = jnp.where(place == 0, 1.0, jnp.where(place == 1, 256.0, jnp.where(place == 2, 65536.0, 0.0)))
    own = jax.lax.broadcasted_iota(jnp.int32, (4, LANES), 1) // 32 == jax.lax.broadcasted_iota(
        jnp.int32, (4, LANES), 0
    )

    def joined(factor: Array) -> Array:
        matrix = jnp.where(mine, factor, 0.0).astype(jnp.bfloat16)
        data_16 = data.astype(jnp.float32).astype(jnp.bfloat16)
        spread = jax.lax.dot_general(
            data_16, matrix, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )
        return jnp.sum(jnp.where(own, spread, 0.0), axis=0, keepdims=True).astype(jnp.int32)

    bits = joined(low) | (joined(jnp.where(place == 3, 1.0, 0.0)) << 24)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
