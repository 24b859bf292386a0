"""Gather of cache rows into a dense buffer on SparseCore: what attention on TensorCore then reads in order."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kimi_hal_tpu.pallas.latents import LINE
from kimi_hal_tpu.pallas.mode import Array, Mode, Ref

#: Rows of one indirect stream: the longest index vector that a stream takes.
BLOCK = 128
#: Words of a stream: two buffers of them are within a subcore's share on every generation.
STREAM = 128 * 144


def rows(table: Array, index: Array, mode: Mode) -> Array:
    """Return ``table[index]`` in lines of 128 words, which lie in HBM as TensorCore reads them: no copy between.

    Args:
        table: ``[slots, words]`` int32 in HBM; a row is a multiple of 8 words and at most 288.
        index: ``[n]`` int32, n a multiple of 128; each is clamped to a row of the table.
        mode: compiled or interpreted.

    Returns:
        ``[lines, n, 128]`` int32; what is behind a row's words holds anything.
    """
    count, words = index.shape[0], table.shape[1]
    block = BLOCK if BLOCK * words <= STREAM else BLOCK // 2
    kernel = mode.on_subcores(
        functools.partial(_kernel, block=block, blocks=count // block, mode=mode),
        jax.ShapeDtypeStruct((-(-words // LINE), count, LINE), table.dtype),
        [
            pltpu.VMEM((block,), jnp.int32),
            pltpu.VMEM((block,), jnp.int32),
            pltpu.VMEM((block, words), table.dtype),
            pltpu.VMEM((block, words), table.dtype),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SemaphoreType.DMA((2,)),
        ],
        name="gather_rows",
    )
    return kernel(table, jnp.clip(index, 0, table.shape[0] - 1))


def _kernel(
    worker: Array,
    workers: int,
    table: Ref,
    index: Ref,
    out: Ref,
    index_0: Ref,
    index_1: Ref,
    rows_0: Ref,
    rows_1: Ref,
    reading: Ref,
    writing: Ref,
    *,
    block: int,
    blocks: int,
    mode: Mode,
) -> None:
    """Gather every ``workers``-th block; while one buffer is written out, the other is filled."""
    buffers = ((index_0, rows_0), (index_1, rows_1))

    def written(slot: int, number: Array, do: Any) -> None:
        filled = buffers[slot][1]
        for line in range(out.shape[0]):
            width = min(LINE, filled.shape[1] - line * LINE)
            source = filled.at[:, pl.ds(line * LINE, width)]
            target = out.at[line, pl.ds(number * block, block), pl.ds(0, width)]
            do(pltpu.make_async_copy(source, target, writing.at[slot]))

    def turn(slot: int, i: Array) -> None:
        number = worker + i * workers
        picked, filled = buffers[slot]

        @pl.when((i >= 2) & (number < blocks + 2 * workers))
        def _free() -> None:
            written(slot, number - 2 * workers, lambda copy: copy.wait())

        @pl.when(number < blocks)
        def _gather() -> None:
            pltpu.sync_copy(index.at[pl.ds(number * block, block)], picked)
            mode.gather_rows(table, picked, filled, reading.at[slot]).wait()
            written(slot, number, lambda copy: copy.start())

    def pair(i: Array, _: None) -> None:
        turn(0, 2 * i)
        turn(1, 2 * i + 1)

    # Two turns more than there are blocks for a subcore: each frees the buffer of the turn two before.
    turns = -(-blocks // workers) + 2
    jax.lax.fori_loop(0, -(-turns // 2), pair, None)
