"""Index scores on TensorCore from paged FP8 keys: pages stream from HBM into two buffers, one read while one fills.

A page of 64 keys is 64 rows of 128 bytes and two rows with the 64 float32 scales. The scales' bytes lie along the
lanes, where no TPU can join them; two small exact products on the MXU put them together.
"""

from __future__ import annotations

import functools
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
    rows, heads, dim = q.shape
    columns = table.shape[1]
    lines = columns * PAGE // LANES
    out = pl.pallas_call(
        functools.partial(_kernel, pages=cache.shape[0]),
        out_shape=jax.ShapeDtypeStruct((rows, lines, LANES), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(rows,),
            in_specs=[
                pl.BlockSpec((1, 1, columns), lambda t, req, _: (req[t], 0, 0), memory_space=pltpu.SMEM),
                pl.BlockSpec((1, heads, dim), lambda t, *_: (t, 0, 0)),
                pl.BlockSpec((1, 1, heads), lambda t, *_: (t, 0, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=pl.BlockSpec((1, lines, LANES), lambda t, *_: (t, 0, 0)),
            scratch_shapes=[
                pltpu.VMEM((2, PAGES, PAGE_ROWS, LANES), jnp.uint8),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        interpret=mode.interpret,
        name="indexer_logits",
    )(row_req, row_len, table[:, None, :], q, weights[:, None, :], cache)
    return out.reshape(rows, columns * PAGE)


def _kernel(
    row_req: Ref,
    row_len: Ref,
    table: Ref,
    q: Ref,
    weights: Ref,
    cache: Ref,
    out: Ref,
    buffer: Ref,
    semaphores: Ref,
    *,
    pages: int,
) -> None:
    del row_req
    count = (row_len[pl.program_id(0)] + PAGE - 1) // PAGE
    steps = (count + PAGES - 1) // PAGES

    def named(place: Array) -> tuple[Array, Array]:
        page = table[0, 0, place]
        return jnp.clip(page, 0, pages - 1), ((page >= 0) & (page < pages)).astype(jnp.int32)

    def copy(step: Array, page: int) -> Any:
        slot = step % 2
        source, _ = named(step * PAGES + page)
        return pltpu.make_async_copy(cache.at[source], buffer.at[slot, page], semaphores.at[slot])

    def each(step: Array, do: Any) -> None:
        for page in range(PAGES):

            @pl.when(step * PAGES + page < count)
            def _one(page: int = page) -> None:
                do(copy(step, page))

    each(jnp.int32(0), lambda c: c.start())

    def body(step: Array, _: None) -> None:
        each(step + 1, lambda c: c.start())
        each(step, lambda c: c.wait())
        slot = step % 2
        for pair in range(PAGES // 2):
            first = step * PAGES + 2 * pair

            @pl.when(first < count)
            def _score(pair: int = pair, first: Array = first) -> None:
                two = buffer.at[slot, pl.ds(2 * pair, 2)]
                line = two_pages(two, q[0], weights[0])
                lane = jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
                there = jnp.where(lane < PAGE, named(first)[1], named(first + 1)[1])
                out[0, pl.ds(first // 2, 1), :] = jnp.where(there != 0, line, -jnp.inf)

    jax.lax.fori_loop(0, steps, body, None)


def two_pages(pages: Ref, q: Array, weights: Array) -> Array:
    """Return the scores ``[1, 128]`` of two pages ``[2, 66, 128]`` of bytes."""
    codes = jnp.concatenate([pages[0, :PAGE], pages[1, :PAGE]], axis=0)
    keys = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
    dots = jax.lax.dot_general(q, keys, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    summed = jax.lax.dot_general(
        weights,
        jnp.maximum(dots, 0.0),
        (((1,), (0,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    tail = [pages[page, PAGE:].astype(jnp.int32) for page in range(2)]
    return summed * scales(jnp.concatenate(tail, axis=0))


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
