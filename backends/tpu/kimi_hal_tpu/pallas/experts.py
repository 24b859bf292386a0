"""Grouped MXFP4 experts on TensorCore: tiles of rows of one expert, its weights in blocks, one after another.

A step of the grid is a tile and a block of the intermediate width: gate and up of the block, their activation, and its
share of the result. Pallas's pipeline brings the next block meanwhile. Rows come from HBM and their sums go back by
copies of their own: the next tile's rows are on their way while one is computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kimi_hal.ops.moe import MoESpec
from kimi_hal_tpu import scales
from kimi_hal_tpu.pallas import mxfp4
from kimi_hal_tpu.pallas.expert_blocks import Blocks
from kimi_hal_tpu.pallas.expert_tiles import Tiles
from kimi_hal_tpu.pallas.mode import Array, Mode, Ref

#: Numbers that are decoded at once, along the latent's width.
CHUNKS = (512, 256)
#: Tiles whose rows are in VMEM at once: this one's and the next one's.
BUFFERS = 2
#: What the compiler's temporaries may take of VMEM beside what is asked for.
TEMPORARY = 8 << 20


def run(spec: MoESpec, x: Array, tiles: Tiles, weights: Sequence[Array], mode: Mode) -> Array:
    """Return the sum of each row's experts.

    Args:
        spec: the experts.
        x: ``[T, hidden]`` float32 that bfloat16 holds, in the padded width of ``Blocks``.
        tiles: the rows of each expert.
        weights: as ``Blocks.shapes`` has them.
        mode: compiled or interpreted.

    Returns:
        ``[T, hidden]`` float32; 0 where a row has no expert here. A row's experts are added in ascending local index.
    """
    blocks, size = Blocks.of(spec), tiles.rows.shape[2]
    hbm = pl.BlockSpec(memory_space=pl.ANY)

    def block(i: Array, j: Array, expert: Ref, _: Ref, used: Ref) -> tuple[Array, Array, int, int]:
        return expert[i], jnp.where(i < used[0], j, blocks.count - 1), 0, 0

    def of_tile(i: Array, *_: Any) -> tuple[Array, int, int]:
        return i, 0, 0

    def of_next(i: Array, *_: Any) -> tuple[Array, int, int]:
        return jnp.minimum(i + 1, tiles.rows.shape[0] - 1), 0, 0

    found: Array = pl.pallas_call(
        functools.partial(_kernel, spec=spec, blocks=blocks, float4=mode.float4),
        out_shape=jax.ShapeDtypeStruct(x.shape, jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(tiles.rows.shape[0], blocks.count),
            in_specs=[
                pl.BlockSpec((1, 1, size), of_tile, memory_space=pltpu.SMEM),
                pl.BlockSpec((1, 1, size), of_next, memory_space=pltpu.SMEM),
                pl.BlockSpec((1, 1, size), of_tile),
                hbm,
                hbm,
                *(pl.BlockSpec((1, 1, *shape[2:]), block) for shape in blocks.shapes(1)),
            ],
            out_specs=hbm,
            scratch_shapes=scratch(blocks, size),
        ),
        input_output_aliases={7: 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=held(blocks, size) + TEMPORARY
        ),
        interpret=mode.interpret,
        name="moe_experts",
    )(
        tiles.expert,
        tiles.count,
        tiles.used,
        tiles.rows,
        tiles.rows,
        tiles.weights,
        x,
        jnp.zeros_like(x),
        *weights,
    )
    return found


def scratch(blocks: Blocks, size: int) -> list[Any]:
    """Return what a kernel keeps from step to step."""
    return [
        pltpu.VMEM((BUFFERS, size, blocks.hidden), jnp.float32),  # rows of this tile and of the next
        pltpu.VMEM((size, blocks.hidden), jnp.bfloat16),  # this tile's, as they are multiplied
        pltpu.VMEM((size, blocks.hidden), jnp.float32),  # their experts' result
        pltpu.VMEM((size, blocks.hidden), jnp.float32),  # that of groups of small scales
        pltpu.SMEM((1,), jnp.int32),  # whether there were any
        pltpu.VMEM((size, 2 * blocks.columns), jnp.float32),  # gate and up of a block
        pltpu.VMEM((size, blocks.hidden), jnp.float32),  # the rows' sums so far
        pltpu.VMEM((blocks.hidden // mxfp4.GROUP, 2 * blocks.columns), jnp.float32),
        pltpu.VMEM((blocks.columns // mxfp4.GROUP, blocks.hidden), jnp.float32),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.SemaphoreType.DMA,
    ]


def held(blocks: Blocks, size: int) -> int:
    """Return the bytes of VMEM that the kernel asks for: scratch, and two buffers of every block of weights."""
    rows = size * (blocks.hidden * (BUFFERS * 4 + 2 + 4 + 4 + 4) + 4 * 2 * blocks.columns)
    groups = (
        blocks.hidden // mxfp4.GROUP * 2 * blocks.columns
        + max(8, blocks.columns // mxfp4.GROUP) * blocks.hidden
    )
    streamed = sum(-(-shape[2] // 32) * 32 * shape[3] for shape in blocks.shapes(1))
    return rows + 4 * groups + 2 * streamed


def each(count: Array, do: Callable[[Array], None]) -> None:
    """Do something for each place in a tile."""
    jax.lax.fori_loop(0, count, lambda r, _: do(r), None)


class Work(NamedTuple):
    """What a step of the grid has before it: prefetched numbers, operands, the result, and ``scratch`` in its order."""

    expert: Ref
    count: Ref
    used: Ref
    rows: Ref
    next_rows: Ref
    weights: Ref
    x: Ref
    zeros: Ref
    w13: Ref
    w13_scale: Ref
    w2: Ref
    w2_scale: Ref
    y: Ref
    fetched: Ref
    inputs: Ref
    result: Ref
    small: Ref
    has_small: Ref
    both: Ref
    sums: Ref
    scale13: Ref
    scale2: Ref
    reading: Ref
    summing: Ref

    def fetch(self, tile: Array, r: Array, row: Array | int) -> Any:
        """Return the copy of a row into a tile's buffer."""
        target = self.fetched.at[tile % BUFFERS, pl.ds(r, 1)]
        return pltpu.make_async_copy(self.x.at[pl.ds(row, 1)], target, self.reading.at[tile % 2])

    def load(self, r: Array, row: Array | int) -> Any:
        """Return the copy of a row's sum so far."""
        return pltpu.make_async_copy(self.y.at[pl.ds(row, 1)], self.sums.at[pl.ds(r, 1)], self.summing)

    def save(self, r: Array, row: Array | int) -> Any:
        """Return the copy of a row's sum back."""
        return pltpu.make_async_copy(self.sums.at[pl.ds(r, 1)], self.y.at[pl.ds(row, 1)], self.summing)


def _kernel(*refs: Ref, spec: MoESpec, blocks: Blocks, float4: bool) -> None:
    work = Work(*refs)
    tile, step = pl.program_id(0), pl.program_id(1)
    own = work.count[tile]

    @pl.when((tile == 0) & (step == 0))
    def _first() -> None:
        each(own, lambda r: work.fetch(tile, r, work.rows[0, 0, r]).start())

    @pl.when((tile < work.used[0]) & (step == 0))
    def _begin() -> None:
        begin(work, tile, own)

    @pl.when(tile < work.used[0])
    def _block() -> None:
        multiply(work, step, spec, blocks, float4)

    @pl.when((tile < work.used[0]) & (step == blocks.count - 1))
    def _end() -> None:
        end(work, tile, own)


def begin(work: Work, tile: Array, own: Array) -> None:
    """Start the next tile's rows on their way, let the last one's sums arrive, and take this one's rows."""

    @pl.when(tile + 1 < work.used[0])
    def _next() -> None:
        each(work.count[tile + 1], lambda r: work.fetch(tile + 1, r, work.next_rows[0, 0, r]).start())

    @pl.when(tile > 0)
    def _settle() -> None:
        each(work.count[tile - 1], lambda r: work.save(r, 0).wait())

    each(own, lambda r: work.load(r, work.rows[0, 0, r]).start())
    each(own, lambda r: work.fetch(tile, r, 0).wait())
    work.inputs[...] = work.fetched[tile % BUFFERS].astype(jnp.bfloat16)
    work.result[...] = jnp.zeros_like(work.result)
    work.has_small[0] = 0


def multiply(work: Work, step: Array, spec: MoESpec, blocks: Blocks, float4: bool) -> None:
    """Add a block of the intermediate width to the result; groups of small scales by products of their own."""
    work.scale13[...] = mxfp4.scales(work.w13_scale[0, 0])
    work.both[...] = gate_and_up(work.inputs, work.w13.at[0, 0], work.scale13, float4)

    @pl.when(mxfp4.any_small(work.w13_scale[0, 0]))
    def _small_inputs() -> None:
        work.scale13[...] = mxfp4.small_scales(work.w13_scale[0, 0])
        work.both[...] += (
            gate_and_up(work.inputs, work.w13.at[0, 0], work.scale13, float4) * scales.BACK * scales.BACK
        )

    hidden = activation(spec, work.both[:, : blocks.columns], work.both[:, blocks.columns :])
    column = step * blocks.columns + jax.lax.broadcasted_iota(jnp.int32, hidden.shape, 1)
    # Padding's gate is no number where a row is infinite, and must not reach the columns that are.
    hidden = jnp.where(column < spec.intermediate, hidden, 0.0).astype(jnp.bfloat16)
    work.scale2[...] = mxfp4.scales(work.w2_scale[0, 0])
    add_down(work.result, hidden, work.w2.at[0, 0], work.scale2, float4)

    @pl.when(mxfp4.any_small(work.w2_scale[0, 0]))
    def _small_outputs() -> None:
        @pl.when(work.has_small[0] == 0)
        def _clear() -> None:
            work.small[...] = jnp.zeros_like(work.small)
            work.has_small[0] = 1

        work.scale2[...] = mxfp4.small_scales(work.w2_scale[0, 0])
        add_down(work.small, hidden, work.w2.at[0, 0], work.scale2, float4)


def end(work: Work, tile: Array, own: Array) -> None:
    """Add the weighted result to the rows' sums and send them back; wait for those of the last tile."""
    each(own, lambda r: work.load(r, 0).wait())
    # A product and a sum of their own: fused, their bits would depend on the tile's size.
    work.result[...] *= column_of(work.weights[0])
    work.sums[...] += work.result[...]

    @pl.when(work.has_small[0] == 1)
    def _add_small() -> None:
        # Half of the factor goes before the weight, which may be as large, and half after it.
        work.sums[...] += work.small[...] * scales.BACK * column_of(work.weights[0]) * scales.BACK

    each(own, lambda r: work.save(r, work.rows[0, 0, r]).start())

    @pl.when(tile + 1 == work.used[0])
    def _settle() -> None:
        each(own, lambda r: work.save(r, 0).wait())


def column_of(row: Array) -> Array:
    """Return ``[1, n]`` as ``[n, 1]``: a TPU turns no single row."""
    size = row.shape[1]
    places = [jax.lax.broadcasted_iota(jnp.int32, (size, size), dim) for dim in range(2)]
    return jnp.sum(jnp.where(places[0] == places[1], row, 0.0), axis=1, keepdims=True)


def gate_and_up(inputs: Ref, w13: Ref, scale: Ref, float4: bool) -> Array:
    """Return ``[rows, 2 · columns]`` float32, decoding some inputs' weights at a time."""
    total = jnp.zeros((inputs.shape[0], w13.shape[1]), jnp.float32)
    for at, width in chunks(inputs.shape[1]):
        codes = w13[at // 2 : (at + width) // 2]
        groups = scale[at // mxfp4.GROUP : (at + width) // mxfp4.GROUP]
        total = total + matmul(inputs[:, at : at + width], mxfp4.decode(codes, groups, float4))
    return total


def add_down(result: Ref, hidden: Array, w2: Ref, scale: Ref, float4: bool) -> None:
    """Add a block's share to the result, some columns at a time."""
    for at, width in chunks(result.shape[1]):
        own = slice(at, at + width)
        result[:, own] += matmul(hidden, mxfp4.decode(w2[:, own], scale[:, own], float4))


def chunks(width: int) -> list[tuple[int, int]]:
    """Return where each chunk of a width starts, and its width."""
    size = next(c for c in CHUNKS if width % c == 0)
    return [(at, size) for at in range(0, width, size)]


def matmul(a: Array, b: Array) -> Array:
    """Return a product of bfloat16 matrices, summed in float32."""
    return jax.lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def activation(spec: MoESpec, gate: Array, up: Array) -> Array:
    """Return SiTU or SwiGLU of a gate and an up projection, float32."""
    open_ = jax.nn.sigmoid(gate)
    if spec.activation == "swiglu":
        return gate * open_ * up
    bounded = spec.beta * jnp.tanh(gate / spec.beta) * open_
    if spec.linear_beta is None or spec.linear_beta <= 0:
        return bounded * up
    return bounded * (spec.linear_beta * jnp.tanh(up / spec.linear_beta))
