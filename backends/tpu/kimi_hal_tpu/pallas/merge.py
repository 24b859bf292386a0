"""The merge of selections over the devices of a mesh axis by remote DMA: protocol ``full``, in one kernel.

Candidates of some rows, 8 bytes each, go around a ring into the VMEM of every device, where bisection finds what parts
the k best of all from the others: first the bits of the score, then those of the position, which is the tie rule.
While rows are bisected in one buffer, the next rows arrive in the other; a neighbour may send into a buffer again once
this device has said that it is done with it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kimi_hal.errors import ContractError, SpecError
from kimi_hal.ops.spec import DCP
from kimi_hal.ops.topk_merge import TopKMergeSpec
from kimi_hal.parallel import ownership
from kimi_hal_tpu.pallas.contract import operand_problems
from kimi_hal_tpu.pallas.mode import Array, Mode, Ref
from kimi_hal_tpu.pallas.ring import MERGE, Ring, ring_of
from kimi_hal_tpu.pallas.selection import SIGN, ordinals

#: Rows whose candidates travel together: the sublanes of a tile.
ROWS = 8
LANES = 128
#: Columns of all ranks that are compared together.
COLUMNS = 512
LAST = (1 << 31) - 1
#: Bits of an ordinal and of a position, and the pieces into which their bisection is cut so that hops fit between.
SCORE_BITS, POSITION_BITS, PIECES = 32, 31, 4
#: Beyond two buffers and the result in two: registers that do not fit.
SPARE = 8 << 20


def topk_merge(
    spec: TopKMergeSpec,
    scores: Array,
    indices: Array,
    row_len: Array,
    axis: str,
    mode: Mode,
    *,
    barrier: int = MERGE,
) -> tuple[Array, Array, Array]:
    """Return what the operator ``topk_merge`` returns, on every device of a mesh axis; rank r is device r of it.

    Args:
        spec: protocol ``full``; of ``spec.dcp`` all but the rank counts, which is the device's own.
        scores: ``[T, k]`` in ``spec.score``.
        indices: ``[T, k]`` int32 local positions, −1 where there is none.
        row_len: ``[T]`` int32 global lengths.
        axis: of the mesh whose program this is part of.
        mode: compiled or interpreted.
        barrier: its number; in a program with rings along several axes each has its own.

    Returns:
        local ``[T, k]``, local_len ``[T]``, global ``[T, k]`` or ``[T, 0]``, all int32.

    Raises:
        SpecError: another protocol: their second messages have no static size.
        ContractError: an operand is not as the Spec says.
        GroupError: the axis has another number of devices, or there is no such axis here.
    """
    if spec.protocol != "full":
        raise SpecError(
            f"the merge by remote DMA has protocol 'full', got {spec.protocol!r}: "
            f"TopKMergeSpec(protocol='full') gives the same winners"
        )
    given = {"scores": scores, "indices": indices, "row_len": row_len}
    if reasons := list(operand_problems("topk_merge", spec, given)):
        raise ContractError("topk_merge", reasons)
    dcp, ring = spec.dcp, ring_of(axis, spec.dcp.world)
    rank = jax.lax.axis_index(axis)
    if spec.meets() == 1:  # every rank holds all keys: nothing is sent
        bound = jnp.maximum(row_len, 0) if dcp.index == "replicated" else row_len
        everyones = ascending(_live(indices, bound))
        mine = (everyones >= 0) & (ownership.owner(everyones, dcp) == rank)
        local = ascending(jnp.where(mine, ownership.local(everyones, dcp), -1))
        return _results(spec, local, everyones)
    index = _live(indices, local_length(row_len, dcp, rank))
    planes = candidates(scores, index, dcp, rank)
    won = merge(ring, planes, spec, mode, barrier)[:, : index.shape[0], : spec.topk]
    mine = won[rank] if spec.return_global else won[0]
    local = ascending(jnp.where(mine >= 0, index, -1))
    side_by_side = jnp.swapaxes(won, 0, 1).reshape(index.shape[0], won.shape[0] * spec.topk)
    return _results(spec, local, ascending(side_by_side)[:, : spec.topk])


def _results(spec: TopKMergeSpec, local: Array, everyones: Array) -> tuple[Array, Array, Array]:
    shown = everyones if spec.return_global else everyones[:, :0]
    return local, jnp.sum((local >= 0).astype(jnp.int32), axis=1), shown


def local_length(length: Array, dcp: DCP, rank: Array) -> Array:
    """Return how many of the first ``length`` positions a rank owns, as ``ownership`` counts them."""
    run = dcp.world * dcp.interleave
    bound = jnp.maximum(length, 0)
    over = jnp.clip(bound % run - rank * dcp.interleave, 0, dcp.interleave)
    return bound // run * dcp.interleave + over


def candidates(scores: Array, index: Array, dcp: DCP, rank: Array) -> Array:
    """Return ordinals and global positions of candidates, −1 for none: ``[2, T', k']`` int32, padded to whole tiles."""
    order = ordinals(jax.lax.bitcast_convert_type(scores.astype(jnp.float32), jnp.int32)) ^ SIGN
    run = dcp.world * dcp.interleave
    position = index // dcp.interleave * run + rank * dcp.interleave + index % dcp.interleave
    there = index >= 0
    planes = jnp.stack((jnp.where(there, order, SIGN), jnp.where(there, position, -1)))
    rows, k = index.shape
    step = LANES if k <= COLUMNS - LANES else COLUMNS
    more = ((0, 0), (0, -rows % ROWS), (0, -k % step))
    padded = jnp.pad(planes, more, constant_values=-1)
    return padded.at[0].set(jnp.where(padded[1] < 0, SIGN, padded[0]))


def ascending(index: Array) -> Array:
    """Return each row's non-negative entries in ascending order at the front, then −1."""
    ordered = jnp.sort(jnp.where(index < 0, LAST, index), axis=1)
    return jnp.where(ordered == LAST, -1, ordered)


def _live(index: Array, bound: Array) -> Array:
    return jnp.where((index >= 0) & (index < bound[:, None]), index, -1)


def merge(ring: Ring, planes: Array, spec: TopKMergeSpec, mode: Mode, barrier: int = MERGE) -> Array:
    """Return the positions of the winners in the place of the candidates that won, −1 elsewhere.

    Args:
        ring: the devices.
        planes: ``[2, T', k']`` as ``candidates`` gives them; T' a multiple of 8, k' of 128.
        spec: how many win, and whether everyone's winners are wanted.
        mode: compiled or interpreted.
        barrier: its number.

    Returns:
        ``[W, T', k']`` int32, a plane a rank; ``[1, T', k']``, this rank's, without ``return_global``.
    """
    _, rows, columns = planes.shape
    shown = ring.world if spec.return_global else 1
    if not rows:
        return jnp.zeros((shown, rows, columns), jnp.int32)
    copies = pltpu.SemaphoreType.DMA((2, ring.copies))
    held = 4 * ROWS * columns * (2 * 2 * ring.world + 2 * shown)
    merged: Array = pl.pallas_call(
        functools.partial(_kernel, ring=ring, k=spec.topk, blocks=rows // ROWS),
        out_shape=jax.ShapeDtypeStruct((shown, rows, columns), jnp.int32),
        grid=(rows // ROWS,),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        out_specs=pl.BlockSpec((shown, ROWS, columns), lambda block: (0, block, 0)),
        scratch_shapes=[
            pltpu.VMEM((2, ring.world, 2, ROWS, columns), jnp.int32),
            pltpu.SemaphoreType.DMA((2,)),
            copies,
            copies,
            pltpu.SemaphoreType.REGULAR((2,)),
        ],
        compiler_params=pltpu.CompilerParams(
            collective_id=barrier,
            has_side_effects=True,
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=held + SPARE,
        ),
        interpret=mode.interpret,
        name="ring_topk_merge",
    )(planes)
    return merged


def _kernel(
    planes: Ref,
    out: Ref,
    everyone: Ref,
    own: Ref,
    sent: Ref,
    received: Ref,
    free: Ref,
    *,
    ring: Ring,
    k: int,
    blocks: int,
) -> None:
    """Bisect one block of rows while the next one goes around."""
    block = pl.program_id(0)
    buffers = Buffers(ring, planes, everyone, own, sent, received, free, blocks)
    following = block + 1

    @pl.when(block == 0)
    def _first() -> None:
        ring.meet()
        buffers.open(block)
        for hop in range(ring.hops):
            buffers.start(block, hop)
            buffers.wait(block, hop)

    buffers.open(following)
    search = Search(everyone.at[buffers.slot(block)], k)
    for piece in range(PIECES):
        hops = [hop for hop in range(ring.hops) if hop * PIECES // ring.hops == piece]
        for hop in hops[:-1]:
            buffers.start(following, hop)
            buffers.wait(following, hop)
        for hop in hops[-1:]:
            buffers.start(following, hop)
        search.bisect(piece)
        for hop in hops[-1:]:
            buffers.wait(following, hop)
    search.write(out, None if out.shape[0] == ring.world else ring.rank())
    buffers.close(block)


@dataclass(frozen=True)
class Buffers:
    """Two buffers of everyone's candidates, taken by turns; what a block beyond the last asks for is not done.

    Args:
        ring: the devices.
        planes: this device's candidates, in HBM.
        everyone: ``[2, W, 2, 8, k']``.
        own: a semaphore a buffer, for the copy of this device's own candidates.
        sent: ``[2, copies]``.
        received: ``[2, copies]``.
        free: what the neighbours add to when they are done with a buffer, the right one and the left one.
        blocks: how many there are.
    """

    ring: Ring
    planes: Ref
    everyone: Ref
    own: Ref
    sent: Ref
    received: Ref
    free: Ref
    blocks: int

    def slot(self, block: Array) -> Array:
        """Return the buffer of a block."""
        return jax.lax.rem(block, 2)

    def open(self, block: Array) -> None:
        """Wait until the neighbours have room for a block, and put this device's own candidates into its buffer."""

        @pl.when((block >= 2) & (block < self.blocks))
        def _room() -> None:
            pl.semaphore_wait(self.free.at[0], 1)
            pl.semaphore_wait(self.free.at[1], 1)

        @pl.when(block < self.blocks)
        def _put() -> None:
            copy = pltpu.make_async_copy(
                self.planes.at[:, pl.ds(block * ROWS, ROWS)],
                self.everyone.at[self.slot(block), self.ring.rank()],
                self.own.at[self.slot(block)],
            )
            copy.start()
            copy.wait()

    def start(self, block: Array, hop: int) -> None:
        """Start to pass the parts of a hop on."""
        self._each(block, hop, lambda copy: copy.start())

    def wait(self, block: Array, hop: int) -> None:
        """Wait for the parts of a hop, those sent and those received."""
        self._each(block, hop, lambda copy: copy.wait())

    def close(self, block: Array) -> None:
        """Tell both neighbours that a buffer is free, if they will want it."""

        @pl.when(block + 2 < self.blocks)
        def _free() -> None:
            self.ring.signal(self.free.at[0], -1)
            self.ring.signal(self.free.at[1], 1)

    def _each(self, block: Array, hop: int, do: Callable[[Any], None]) -> None:
        slot = self.slot(block)

        @pl.when(block < self.blocks)
        def _copies() -> None:
            def part(rank: Array) -> Ref:
                return self.everyone.at[slot, rank]

            for copy in self.ring.passing(hop, part, self.sent.at[slot], self.received.at[slot]):
                do(copy)


class Search:
    """Bisection of some rows for what parts their k best candidates from the others.

    Args:
        everyone: ``[W, 2, 8, k']``, ordinals and positions.
        k: how many win.
    """

    def __init__(self, everyone: Ref, k: int) -> None:
        self.everyone = everyone
        #: The smallest ordinal that wins, with its top bit turned, and the largest position with it.
        self.cut = self.bound = jnp.zeros((ROWS, 1), jnp.int32)
        self.wanted = jnp.minimum(self._count(lambda order, position: position >= 0), k)
        self.ties = self.wanted

    def bisect(self, piece: int) -> None:
        """Find half of the bits of the cut (pieces 0 and 1) or of the bound (2 and 3)."""
        if piece < 2:
            half = SCORE_BITS // 2
            self.cut = bits((2 - piece) * half - 1, half, self.cut, self._reaches)
            return
        lower = POSITION_BITS // 2
        if piece == 2:
            cut = self.cut ^ SIGN
            self.ties = self.wanted - self._count(lambda order, position: order > cut)
            self.bound = bits(POSITION_BITS - 1, POSITION_BITS - lower, self.bound, self._short)
            return
        self.bound = bits(lower - 1, lower, self.bound, self._short)

    def write(self, out: Ref, rank: Array | None) -> None:
        """Write the positions of winners, −1 elsewhere: of all ranks ``[W, 8, k']``, or of one ``[1, 8, k']``."""
        ranks, cut = slice(None) if rank is None else pl.ds(rank, 1), self.cut ^ SIGN

        def one(columns: Any) -> None:
            order, position = self.everyone[ranks, 0, :, columns], self.everyone[ranks, 1, :, columns]
            tied = (order == cut) & (position <= self.bound)
            out[:, :, columns] = jnp.where((position >= 0) & ((order > cut) | tied), position, -1)

        self._over_columns(lambda columns, _: one(columns), None)

    def _reaches(self, cut: Array) -> Array:
        return self._count(lambda order, position: order >= cut ^ SIGN) >= self.wanted

    def _short(self, bound: Array) -> Array:
        cut = self.cut ^ SIGN
        return self._count(lambda order, position: (order == cut) & (position < bound)) < self.ties

    def _count(self, counts: Callable[[Array, Array], Array]) -> Array:
        """Return how many candidates of each row count, ``[8, 1]``."""

        def some(columns: Any, total: Array) -> Array:
            mask = counts(self.everyone[:, 0, :, columns], self.everyone[:, 1, :, columns])
            return total + jnp.sum(mask.astype(jnp.int32), axis=0)

        step = min(COLUMNS, self.everyone.shape[-1])
        each = self._over_columns(some, jnp.zeros((ROWS, step), jnp.int32))
        return jnp.sum(each, axis=1, keepdims=True)

    def _over_columns(self, do: Callable[[Any, Any], Any], start: Any) -> Any:
        width = self.everyone.shape[-1]
        step = min(COLUMNS, width)
        return jax.lax.fori_loop(0, width // step, lambda i, carry: do(pl.ds(i * step, step), carry), start)


def bits(first: int, many: int, start: Array, fits: Callable[[Array], Array]) -> Array:
    """Return a number with each of some bits, from the highest on, set where the number with it fits."""

    def bit(i: Array, value: Array) -> Array:
        with_bit = value | jax.lax.shift_left(jnp.int32(1), first - i)
        return jnp.where(fits(with_bit), with_bit, value)

    return jax.lax.fori_loop(0, many, bit, start)
