"""How a kernel is run: compiled for a TPU, or interpreted by the TPU simulator on the CPU.

The simulator plays DMAs, semaphores and memory spaces and finds races; it knows neither SparseCore's mesh nor its
instructions. So a SparseCore kernel is one body that is launched by ``Mode.on_subcores``: on the mesh, or as a
parallel grid of the simulator with a thread a subcore. What it needs of the instruction set is a method here:
the instruction itself, or what it means.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

try:
    from jax.experimental.pallas import tpu_sc as plsc
except ImportError:  # torch-xla's jax is older: kernels of TensorCore need nothing of it
    plsc = None  # type: ignore[assignment]

from kimi_hal_tpu import requirements

#: Numbers of a simulated SparseCore vector: a real one has 8 or 16, and no kernel may depend on how many.
SIMULATED_LANES = 1024
#: Clocks of the race detector: copies that run at once and share one look ordered. Its own default has one for all.
CLOCKS = 64

Array = jax.Array
Ref = Any
#: A SparseCore kernel: the number of this subcore, how many there are, and the kernel's memory.
Body = Callable[..., None]


@dataclass(frozen=True)
class Mode:
    """Compiled, or interpreted.

    Args:
        simulated: by the TPU simulator.
        races: whether the simulator looks for races.
        subcores: how many vector subcores the simulator plays.
        float4: whether the chip has float4 vectors.
    """

    simulated: bool = False
    races: bool = True
    subcores: int = 1
    float4: bool = False

    @property
    def interpret(self) -> Any:
        """Return what ``pallas_call`` takes as ``interpret`` for a TensorCore kernel."""
        if not self.simulated:
            return False
        return pltpu.InterpretParams(detect_races=self.races, vector_clock_size=CLOCKS)

    @property
    def lanes(self) -> int:
        """Return the numbers that a SparseCore vector holds."""
        return SIMULATED_LANES if self.simulated else int(plsc.get_sparse_core_info().num_lanes)

    def on_subcores(
        self, body: Body, out: jax.ShapeDtypeStruct, scratch: Sequence[Any], name: str
    ) -> Callable[..., Array]:
        """Return the function that launches a body on all vector subcores; operands and result are in HBM.

        Raises:
            RuntimeError: the chip has no SparseCores.
            ToolMissingError: this jax cannot program them.
        """
        if self.simulated:
            return self._on_threads(body, out, scratch, name)
        if plsc is None:
            raise requirements.without_sparse_core(name)
        info = plsc.get_sparse_core_info()
        mesh = plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="subcore")
        workers = int(info.num_cores * info.num_subcores)

        def kernel(*refs: Ref) -> None:
            own = jax.lax.axis_index("subcore") * info.num_cores + jax.lax.axis_index("core")
            body(own, workers, *refs)

        launched: Callable[..., Array] = pl.kernel(
            kernel,
            out_type=out,
            mesh=mesh,
            scratch_types=list(scratch),
            compiler_params=pltpu.CompilerParams(use_tc_tiling_on_sc=False, needs_layout_passes=False),
            name=name,
        )
        return launched

    def _on_threads(
        self, body: Body, out: jax.ShapeDtypeStruct, scratch: Sequence[Any], name: str
    ) -> Callable[..., Array]:
        def kernel(*refs: Ref) -> None:
            body(pl.program_id(0), self.subcores, *refs)

        def launched(*operands: Array) -> Array:
            hbm = pl.BlockSpec(memory_space=pl.ANY)
            result: Array = pl.pallas_call(
                kernel,
                out_shape=out,
                grid=(self.subcores,),
                in_specs=[hbm] * len(operands),
                out_specs=hbm,
                scratch_shapes=list(scratch),
                compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
                interpret=pltpu.InterpretParams(
                    detect_races=self.races, num_cores_or_threads=self.subcores, vector_clock_size=CLOCKS
                ),
                name=name,
            )(*operands)
            return result

        return launched

    def gather_rows(self, table: Ref, index: Ref, rows: Ref, semaphore: Ref) -> Any:
        """Start the copy of ``table[index]`` from HBM into a subcore's memory; the result's ``wait`` ends it."""
        if not self.simulated:
            return pltpu.async_copy(table.at[index], rows, semaphore)
        several = Several(table, index, rows, semaphore)
        several.start()
        return several

    def count(self, histogram: Ref, bins: Array, mask: Array) -> None:
        """Add 1 to ``histogram[bins]`` where the mask holds; equal bins of one vector all count."""
        ones = jnp.ones_like(bins)
        if not self.simulated:
            plsc.addupdate_scatter(histogram, [bins], ones, mask=mask)
            return
        histogram[...] = histogram[...].at[jnp.where(mask, bins, histogram.shape[0])].add(ones, mode="drop")

    def append(self, target: Ref, place: Array, values: Array, mask: Array) -> None:
        """Store the masked values next to each other, from ``target[place]`` on."""
        lanes = values.shape[0]
        if not self.simulated:
            plsc.store_compressed(target.at[pl.ds(place, lanes)], values, mask=mask)
            return
        where = jnp.where(mask, place + jnp.cumsum(mask.astype(jnp.int32)) - 1, target.shape[0])
        target[...] = target[...].at[where].set(values, mode="drop")


@dataclass(frozen=True)
class Several:
    """What an indirect stream means: a copy a row, all on one semaphore."""

    table: Ref
    index: Ref
    rows: Ref
    semaphore: Ref

    def start(self) -> None:
        """Start every copy."""
        self._each(lambda copy: copy.start())

    def wait(self) -> None:
        """Wait for every copy."""
        self._each(lambda copy: copy.wait())

    def _each(self, do: Callable[[Any], None]) -> None:
        picked = self.index[...]

        def one(i: Array, _: None) -> None:
            source = self.table.at[pl.ds(picked[i], 1)]
            do(pltpu.make_async_copy(source, self.rows.at[pl.ds(i, 1)], self.semaphore))

        jax.lax.fori_loop(0, self.index.shape[0], one, None)
