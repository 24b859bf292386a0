"""Compile programs for a TPU that is not here: libtpu on a CPU host, for a topology by name."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
# No device is opened, so several processes may compile at once.
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import numpy as np
from jax.experimental import mesh_utils, topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kimi_hal.errors import SelectionError, ToolMissingError
from kimi_hal_tpu import counts, generations, requirements

#: Shape and dtype of an operand.
Operand = tuple[tuple[int, ...], Any]
#: Shape and dtype of a whole operand, and its layout over a mesh.
Sharded = tuple[tuple[int, ...], Any, PartitionSpec]


@dataclass(frozen=True)
class Code:
    """What came of compiling a program.

    Attributes:
        kind: what the target's device calls itself.
        text: the optimised program.
        size: bytes of generated code.
        temporary: bytes of HBM beside operands and results.
        seconds: that compiling took.
    """

    kind: str
    text: str
    size: int
    temporary: int
    seconds: float

    @property
    def kernels(self) -> int:
        """Return how many Mosaic kernels the program calls."""
        return self.text.count('custom_call_target="tpu_custom_call"')

    @property
    def on_sparse_core(self) -> bool:
        """Tell whether one of them runs on SparseCore."""
        return "sparse_core_config" in self.text


def topology(name: str) -> Any:
    """Return the devices of a slice that is not here.

    Raises:
        ToolMissingError: libtpu is not installed or not jax's own.
        UnknownNameError: no such generation.
        SelectionError: the generation has no slice of that shape.
    """
    requirements.check_jax()
    if not requirements.installed("libtpu"):
        raise ToolMissingError(
            "libtpu compiles for a TPU and is not installed: pip install -r requirements/tpu_jax.txt"
        )
    generation = generations.get(name)
    wanted = name if ":" in name else generation.topology
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=wanted)
    except jax.errors.JaxRuntimeError as error:
        if "INVALID_ARGUMENT" not in str(error):
            raise
        raise SelectionError(
            f"{wanted} is no topology that libtpu knows ({error}); the smallest of {generation.name} is "
            f"{generation.topology}"
        ) from error


def mesh(name: str, **axes: int) -> Mesh:
    """Return the devices of a topology as a mesh whose neighbours are neighbours of the machine's own network.

    Args:
        name: of the topology.
        axes: devices along each axis; all of the topology's together.

    Raises:
        SelectionError: an axis without a device, or the topology has another number of them.
    """
    wrong = counts.not_counts(axes)
    if wrong or not axes:
        raise SelectionError(
            f"a mesh has axes of 1 device or more, got {', '.join(wrong) or 'no axis'}: mesh({name!r}, dcp=…)"
        )
    devices, wanted = topology(name).devices, math.prod(axes.values())
    if len(devices) != wanted:
        shape = " × ".join(f"{axis} {size}" for axis, size in axes.items())
        raise SelectionError(f"{name} has {len(devices)} devices, the mesh asks for {wanted}: {shape}")
    return Mesh(mesh_utils.create_device_mesh(tuple(axes.values()), devices=devices), tuple(axes))


def compile_for(
    name: str, program: Callable[..., Any], operands: Sequence[Operand], needs: Sequence[str] = ()
) -> Code:
    """Compile a program for one device of a topology.

    Args:
        name: of a generation or a topology.
        program: a function of arrays.
        operands: their shapes and dtypes.
        needs: what its kernels need: keys of ``generations.NEEDS``.
    """
    generations.require(name, needs)
    chip = Mesh(np.array(topology(name).devices[:1]), ("chip",))
    return compile_on(chip, program, [(shape, dtype, PartitionSpec()) for shape, dtype in operands])


def compile_on(mesh: Mesh, program: Callable[..., Any], operands: Sequence[Sharded]) -> Code:
    """Compile a program for all devices of a mesh.

    Args:
        mesh: of devices of a topology (``topology(name).devices``).
        program: a function of whole arrays.
        operands: their whole shapes, dtypes and how they are laid out over the mesh.
    """
    start = time.perf_counter()
    with jax.set_mesh(mesh):
        arrays = [
            jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
            for shape, dtype, spec in operands
        ]
        compiled = jax.jit(program).lower(*arrays).compile()
    memory = compiled.memory_analysis()
    return Code(
        kind=mesh.devices.flat[0].device_kind,
        text=compiled.as_text(),
        size=int(memory.generated_code_size_in_bytes),
        temporary=int(memory.temp_size_in_bytes),
        seconds=time.perf_counter() - start,
    )
