"""The delta recurrence row by row on TensorCore: what decode, verify and commit do to a state.

States stay in HBM and pass through a ring of three buffers in VMEM: one fills for the next step of the grid while one
is worked on and one goes out. Only slots that a live row names are read or written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kimi_hal.ops.kda import KDASpec
from kimi_hal_tpu.pallas import gates
from kimi_hal_tpu.pallas.mode import Array, Mode, Ref

#: Heads of one step of the grid, at most: whole tiles of 8, and 16 only while their states are 1 MB.
HEADS, NARROW = 16, 128
RING = 3
#: Operands that are the same for every sequence.
SHARED = frozenset({"weight", "rate", "bias"})


class Work(NamedTuple):
    """What is done with each of N sequences, int32 ``[N]`` each; −1 stands for no slot and no count.

    Attributes:
        source: slot that the state is read from; −1: nothing is done, and ``count`` is 0.
        count: rows that it advances by.
        target: slot that receives the state after the last row.
        saved: slot that receives it after ``after`` rows.
        after: that number of rows.
    """

    source: Array
    count: Array
    target: Array
    saved: Array
    after: Array


def advance(
    spec: KDASpec,
    work: Work,
    rows: Mapping[str, Array],
    pool: Array,
    mode: Mode,
    *,
    results: Sequence[str] = (),
    stores: bool = True,
) -> tuple[dict[str, Array], Array]:
    """Advance states by up to Q rows each.

    Args:
        spec: of the call.
        work: what is read, and what is written.
        rows: by name: ``k``, ``v`` and, where ``out`` is asked for, ``q``, ``[N, Q, H, D]`` bfloat16; or in place of
            the three ``x``, ``[N, 3 + Q, 3, H, D]`` bfloat16 inputs of the convolution with the three before them,
            and ``weight``, ``[4, 3, H, D]`` float32. ``g``, ``[N, Q, H, D]``, raw or finished; ``beta``,
            ``[N, Q, H, 1]`` float32, finished; for a raw gate ``rate`` and ``bias``, ``[H, D]`` float32.
        pool: ``[slots, H, D, D]`` float32, value-major.
        mode: compiled or interpreted.
        results: which of ``out``, ``k`` and ``v`` are wanted, bfloat16 ``[N, Q, H, D]`` each. Of rows beyond
            ``count`` ``out`` is 0.
        stores: whether any state is stored; if not, the pool is only read.

    Returns:
        The results by name, and the pool.
    """
    count, most = work.source.shape[0], HEADS if spec.head_dim <= NARROW else HEADS // 2
    heads = min(spec.num_heads, most)
    groups = pl.cdiv(spec.num_heads, heads)
    shape = (count, rows["g"].shape[1], spec.num_heads, spec.head_dim)
    made = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    names = (*Work._fields, *rows, "pool", *results, *(["stored"] if stores else []))
    blocks = [_block(array.shape, heads, name in SHARED) for name, array in rows.items()]
    kernel = functools.partial(_kernel, spec=spec, names=(*names, *_scratch(spec, rows, heads)))
    found = pl.pallas_call(
        kernel,
        out_shape=[made] * len(results) + ([jax.ShapeDtypeStruct(pool.shape, pool.dtype)] if stores else []),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(work),
            grid=(count, groups),
            in_specs=[*blocks, anywhere],
            out_specs=[_block(shape, heads)] * len(results) + [anywhere] * stores,
            scratch_shapes=list(_scratch(spec, rows, heads).values()),
        ),
        input_output_aliases={len(work) + len(rows): len(results)} if stores else {},
        # The ring goes on from step to step, over all sequences.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")),
        interpret=mode.interpret,
        name="kda_recurrence",
    )(*work, *rows.values(), pool)
    return dict(zip(results, found, strict=False)), found[-1] if stores else pool


def _block(shape: tuple[int, ...], heads: int, shared: bool = False) -> pl.BlockSpec:
    """Return the part of an operand ``[(N,) …, H, D]`` that a step sees: one sequence, a group of heads."""
    middle = len(shape) - 2
    block = (*shape[:middle], heads, shape[-1])

    def index(n: Array, group: Array, *_: Ref) -> tuple[Any, ...]:
        first = 0 if shared else n
        return (first, *[0] * (middle - 1), group, 0) if middle else (group, 0)

    return pl.BlockSpec(block if shared or not middle else (1, *block[1:]), index)


def _scratch(spec: KDASpec, rows: Mapping[str, Array], heads: int) -> dict[str, Any]:
    size, count = spec.head_dim, rows["g"].shape[1]
    scratch = {
        "buffers": pltpu.VMEM((RING, heads, size, size), jnp.float32),
        "loading": pltpu.SemaphoreType.DMA((RING,)),
        "storing": pltpu.SemaphoreType.DMA((RING,)),
    }
    if "x" in rows:
        scratch["convolved"] = pltpu.VMEM((3, count, heads, size), jnp.bfloat16)
    return scratch


@dataclass(frozen=True)
class Ring:
    """States on their way in and out, a group of heads of one sequence a step.

    Args:
        work: which slots.
        pool: in HBM; what is stored goes to the same.
        buffers: ``[3, heads, D, D]``.
        loading: a semaphore a buffer.
        storing: a semaphore a buffer.
    """

    work: Work
    pool: Ref
    buffers: Ref
    loading: Ref
    storing: Ref

    def load(self, step: Array, do: Callable[[Any], None]) -> None:
        """Start the copy of a step's states into its buffer, or wait for it."""

        def copy(there: Ref, here: Ref) -> Any:
            return pltpu.make_async_copy(there, here, self.loading.at[step % RING])

        self._each(step, self.work.source, copy, do)

    def store(self, step: Array, do: Callable[[Any], None]) -> None:
        """Start the copy of a step's states out of its buffer, or wait for it."""

        def copy(there: Ref, here: Ref) -> Any:
            return pltpu.make_async_copy(here, there, self.storing.at[step % RING])

        self._each(step, self.work.target, copy, do)

    def save(self, step: Array) -> None:
        """Store a checkpoint and wait for it."""

        def copy(there: Ref, here: Ref) -> Any:
            return pltpu.make_async_copy(here, there, self.storing.at[step % RING])

        def whole(one: Any) -> None:
            one.start()
            one.wait()

        self._each(step, self.work.saved, copy, whole)

    def _each(
        self, step: Array, slots: Ref, copy: Callable[[Ref, Ref], Any], do: Callable[[Any], None]
    ) -> None:
        total, heads = self.pool.shape[1], self.buffers.shape[1]
        groups = pl.cdiv(total, heads)
        group, slot = step % groups, slots[step // groups]
        last = total - (groups - 1) * heads
        for size, here in ((heads, group < groups - 1), (last, group == groups - 1)):

            @pl.when(here & (slot >= 0))
            def _one(size: int = size) -> None:
                there = self.pool.at[slot, pl.ds(group * heads, size)]
                do(copy(there, self.buffers.at[step % RING, pl.ds(0, size)]))


def _kernel(*refs: Ref, spec: KDASpec, names: Sequence[str]) -> None:
    at = dict(zip(names, refs, strict=True))
    n, step = pl.program_id(0), pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)
    end = pl.num_programs(0) * pl.num_programs(1)
    work = Work(*(at[name] for name in Work._fields))
    ring = Ring(work, at.get("stored", at["pool"]), at["buffers"], at["loading"], at["storing"])

    @pl.when(step == 0)
    def _first() -> None:
        ring.load(step, lambda copy: copy.start())

    if "stored" in at:
        _drain(ring, step, back=2)

    @pl.when(step + 1 < end)
    def _next() -> None:
        ring.load(step + 1, lambda copy: copy.start())

    ring.load(step, lambda copy: copy.wait())
    _rows(spec, at, ring, n, step)
    if "stored" not in at:
        return
    ring.store(step, lambda copy: copy.start())

    @pl.when(step + 1 == end)
    def _finish() -> None:
        _drain(ring, step, back=1)
        _drain(ring, step, back=0)


def _drain(ring: Ring, step: Array, back: int) -> None:
    """Wait for what the step ``back`` before this one stored."""

    @pl.when(step >= back)
    def _wait() -> None:
        ring.store(step - back, lambda copy: copy.wait())


def _rows(spec: KDASpec, at: Mapping[str, Ref], ring: Ring, n: Array, step: Array) -> None:
    """Advance the states of a step row by row, in their buffer."""
    place, after, saves = step % RING, ring.work.after[n], spec.checkpoints and "stored" in at
    if "out" in at:
        at["out"][...] = jnp.zeros_like(at["out"])
    if "x" in at:
        _convolve(at)
    rate, bias = (at[name][...] if name in at else None for name in ("rate", "bias"))

    def row(name: str, t: Array) -> Array:
        if "x" in at and name in "qkv":
            return at["convolved"]["qkv".index(name), t]
        return at[name][0, t]

    def save(t: Array) -> None:
        pl.when(after == t)(lambda: ring.save(step))

    def one(t: Array, _: None) -> None:
        if saves:
            save(t)
        fade = jnp.exp(gates.log_decay(spec, row("g", t), rate, bias))
        k, v = gates.key(spec, row("k", t)), row("v", t).astype(jnp.float32)
        state = corrected(ring.buffers[place], k, v, fade, row("beta", t))
        ring.buffers[place] = state
        if "out" in at:
            at["out"][0, t] = read(state, gates.query(spec, row("q", t))).astype(jnp.bfloat16)

    count = ring.work.count[n]
    jax.lax.fori_loop(0, count, one, None)
    if saves:
        save(count)


def read(state: Array, x: Array) -> Array:
    """Return S x for states ``[heads, V, K]`` and ``[heads, K]``."""
    return jnp.sum(state * x[:, None, :], axis=-1)


def corrected(state: Array, k: Array, v: Array, fade: Array, beta: Array) -> Array:
    """Return states that have decayed and taken in one row; k, fade ``[heads, K]``, v ``[heads, V]``."""
    state = state * fade[:, None, :]
    u = beta * (v - read(state, k))
    return state + u[:, :, None] * k[:, None, :]


def _convolve(at: Mapping[str, Ref]) -> None:
    """Convolve all rows of a step: q, k and v in bfloat16, as ``kda_conv`` would give them."""
    x, taps = at["x"], at["weight"]
    count = at["convolved"].shape[1]
    for part, name in enumerate("qkv"):
        total = None
        for j in range(taps.shape[0]):
            term = taps[j, part] * x[0, pl.ds(j, count), part].astype(jnp.float32)
            total = term if total is None else total + term
        assert total is not None
        found = (total * gates.sigmoid(total)).astype(jnp.bfloat16)
        at["convolved"][part] = found
        if name in at:
            at[name][0] = found
