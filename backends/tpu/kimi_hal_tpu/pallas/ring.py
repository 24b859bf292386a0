"""All-gather around a ring of a mesh axis by remote DMA, for a program under ``shard_map``.

Parts travel both ways at once, so that both directions of every link are used: of W parts each device passes on
``W // 2`` to the right and ``(W − 1) // 2`` to the left. A part lands where it belongs in the result and is sent on
from there; nothing is staged.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kimi_hal.errors import ContractError, GroupError
from kimi_hal.ops.all_gather import GatherSpec, gathered_rows, total_problem
from kimi_hal_tpu.pallas.contract import operand_problems
from kimi_hal_tpu.pallas.mode import Array, Mode, Ref

#: Numbers of the barriers of kernels that meet other devices: no two that meet others share one.
GATHER, MERGE = 0, 1
#: Integers of as many bytes: bytes are moved, never numbers.
WORDS: Mapping[int, Any] = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


@dataclass(frozen=True)
class Ring:
    """The devices of one mesh axis as a ring, seen by one of them inside a kernel.

    Args:
        axis: of the mesh.
        world: devices along it.
    """

    axis: str
    world: int

    @property
    def hops(self) -> int:
        """Return how often parts are passed on."""
        return self.world // 2

    @property
    def copies(self) -> int:
        """Return the semaphores that one exchange needs on either side: one a part that is passed on."""
        return max(1, self.world - 1)

    def rank(self, distance: int = 0) -> Array:
        """Return the rank so far to the right, which is to the left where negative."""
        return jax.lax.rem(jax.lax.axis_index(self.axis) + distance + self.world, self.world)

    def signal(self, semaphore: Ref, distance: int) -> None:
        """Add 1 to a semaphore of the device so far to the right."""
        pl.semaphore_signal(semaphore, 1, device_id={self.axis: self.rank(distance)})

    def meet(self) -> None:
        """Wait until both neighbours are in this kernel: before, their memory may be something else's."""
        barrier = pltpu.get_barrier_semaphore()
        self.signal(barrier, -1)
        self.signal(barrier, 1)
        pl.semaphore_wait(barrier, 2)

    def passing(self, hop: int, part: Callable[[Array], Ref], sent: Ref, received: Ref) -> list[Any]:
        """Return the copies of one hop; when they are done, the parts ``hop + 1`` away are here.

        Args:
            hop: from 0 on; the parts of the hop before are here.
            part: gives the place of a rank's part, the same on every device.
            sent: semaphores, ``[copies]``.
            received: semaphores, ``[copies]``.
        """
        directions = (1, -1) if 2 * hop + 1 < self.world - 1 else (1,)
        moves = []
        for i, direction in enumerate(directions):
            place = part(self.rank(-direction * hop))
            number = 2 * hop + i
            moves.append(
                pltpu.make_async_remote_copy(
                    place,
                    place,
                    sent.at[number],
                    received.at[number],
                    device_id={self.axis: self.rank(direction)},
                )
            )
        return moves


def ring_of(axis: str, world: int) -> Ring:
    """Return the ring of a mesh axis that has as many devices as a Spec has ranks.

    Raises:
        GroupError: it has not, or there is no such axis here.
    """
    try:
        size = int(jax.lax.axis_size(axis))
    except NameError as error:
        raise GroupError(
            f"no mesh axis {axis!r} here: call it in a program under jax.shard_map, over a mesh that has the axis"
        ) from error
    if size != world:
        raise GroupError(
            f"mesh axis {axis!r} has {size} devices, the Spec has dcp.world={world}: "
            f"give the axis of the group, or a Spec of {size} ranks"
        )
    return Ring(axis, world)


def all_gather(
    spec: GatherSpec, x: Array, axis: str, mode: Mode, *, total: int | None = None, barrier: int = GATHER
) -> Array:
    """Return what the operator ``all_gather`` returns, on every device of a mesh axis; rank r is device r of it.

    Args:
        spec: of ``spec.dcp`` world and interleave count; its rank is the device's own.
        x: this device's tensor, as the Spec says; of 1, 2 or 4 bytes.
        axis: of the mesh whose program this is part of.
        mode: compiled or interpreted.
        total: as the operator takes it.
        barrier: its number; in a program with rings along several axes each has its own.

    Raises:
        ContractError: x is not as the Spec says, its elements have 8 bytes, or ``total`` does not fit.
        GroupError: the axis has another number of devices, or there is no such axis here.
    """
    reasons = [*operand_problems("all_gather", spec, {"x": x})]
    if x.dtype.itemsize not in WORDS:
        reasons.append(f"x must have elements of 1, 2 or 4 bytes for the ring, got {x.dtype.name}")
    if not reasons and (problem := total_problem(spec, x.shape[0], total)):
        reasons.append(problem)
    if reasons:
        raise ContractError("all_gather", reasons)
    ring = ring_of(axis, spec.dcp.world)
    shape = _shape(spec, x, total)
    if ring.world == 1 or not x.size:  # of one rank, or of nothing: in any order
        rows = jnp.broadcast_to(x[None], (ring.world, *x.shape))
        if spec.layout == "token_order":
            rows = rows.reshape(ring.world * x.shape[0], *x.shape[1:])[: shape[0]]
        return rows.reshape(shape)
    landed = _as(gather_runs(ring, _runs(spec, as_words(x)), mode, barrier), x.dtype)
    if spec.layout != "token_order":
        return landed.reshape(shape)
    return landed.reshape(-1, *shape[1:])[: shape[0]]


def _shape(spec: GatherSpec, x: Array, total: int | None) -> tuple[int, ...]:
    """Return the shape of the result."""
    world = spec.dcp.world
    if spec.layout == "rank_major":
        return (world, *x.shape)
    if spec.layout == "last_dim":
        return (*x.shape[:-1], world * x.shape[-1])
    return (gathered_rows(spec, x.shape[0], total), *x.shape[1:])


def _runs(spec: GatherSpec, x: Array) -> Array:
    """Return x as ``[n, I, d]``, of which I rows after I rows of other ranks stand in the result ``[n, W, I, d]``.

    Every layout is one: all rows of a rank are one run, or runs are of the interleave, or of one row each.
    """
    if spec.layout == "last_dim":
        return x.reshape(-1, 1, x.shape[-1])
    if spec.layout == "rank_major":
        return x.reshape(1, -1, x.shape[-1])
    run, rows = spec.dcp.interleave, x.shape[0]
    padded = jnp.pad(x, ((0, -rows % run), *((0, 0),) * (x.ndim - 1)))
    return padded.reshape(-1, run, math.prod(x.shape[1:]))


def as_words(x: Array) -> Array:
    """Return the same bytes as integers."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint8)
    return jax.lax.bitcast_convert_type(x, WORDS[x.dtype.itemsize])


def _as(words: Array, dtype: Any) -> Array:
    return words.astype(dtype) if dtype == jnp.bool_ else jax.lax.bitcast_convert_type(words, dtype)


def gather_runs(ring: Ring, runs: Array, mode: Mode, barrier: int = GATHER) -> Array:
    """Return ``[n, W, I, d]`` of the ranks' ``[n, I, d]``."""
    count, *run = runs.shape
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    gathered: Array = pl.pallas_call(
        functools.partial(_kernel, ring=ring),
        out_shape=jax.ShapeDtypeStruct((count, ring.world, *run), runs.dtype),
        in_specs=[hbm],
        out_specs=hbm,
        scratch_shapes=[
            pltpu.SemaphoreType.DMA,
            pltpu.SemaphoreType.DMA((ring.copies,)),
            pltpu.SemaphoreType.DMA((ring.copies,)),
        ],
        compiler_params=pltpu.CompilerParams(collective_id=barrier, has_side_effects=True),
        interpret=mode.interpret,
        name="ring_all_gather",
    )(runs)
    return gathered


def _kernel(runs: Ref, out: Ref, own: Ref, sent: Ref, received: Ref, *, ring: Ring) -> None:
    def part(rank: Array) -> Ref:
        return out.at[:, rank]

    mine = pltpu.make_async_copy(runs, part(ring.rank()), own)
    mine.start()
    ring.meet()
    mine.wait()
    for hop in range(ring.hops):
        moves = ring.passing(hop, part, sent, received)
        for move in moves:
            move.start()
        for move in moves:
            move.wait()
