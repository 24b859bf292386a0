"""The generations of TPU that kernels are compiled for, and what each has. Imports neither torch nor jax.

Sources: ``jax/_src/pallas/mosaic/tpu_info.py`` (jax 0.10.2) for SparseCores; float4 by compiling a float4 product for
each with libtpu 0.0.42.1, which only TPU7x's compiler takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kimi_hal.errors import SelectionError, unknown


@dataclass(frozen=True)
class Generation:
    """One generation.

    Args:
        name: as the probe and capabilities name it.
        topology: the smallest slice's name, as libtpu takes it.
        kind: what a device of it calls itself.
        sparse_core: whether it has SparseCores.
        float4: whether its MXU multiplies float4.
        cores: TensorCores of what is one device.
    """

    name: str
    topology: str
    kind: str
    sparse_core: bool
    float4: bool = False
    cores: int = 1


GENERATIONS = (
    Generation("v5e", "v5e:2x2", "TPU v5 lite", sparse_core=False),
    Generation("v5p", "v5p:2x2x1", "TPU v5", sparse_core=True, cores=2),
    Generation("v6e", "v6e:2x2", "TPU v6 lite", sparse_core=True),
    Generation("tpu7x", "tpu7x:2x2x1", "TPU7x", sparse_core=True, float4=True),
)
NEEDS = {
    "sparse_core": ("SparseCore", "selection and gather by Pallas kernels"),
    "float4": ("float4 MXU", "float4 products"),
}
INSTEAD = {
    "sparse_core": "Take tpu.xla, which selects and gathers on TensorCore",
    "float4": "Dequantise to bfloat16, which is exact",
}


def get(name: str) -> Generation:
    """Return a generation by its name, or by that of one of its topologies (``"tpu7x:2x2x4"``).

    Raises:
        UnknownNameError: there is none; the nearest and all are named.
    """
    found = {g.name: g for g in GENERATIONS}
    head = name.partition(":")[0]
    if head not in found:
        raise unknown("TPU generation", head, found)
    return found[head]


def require(name: str, needs: Sequence[str]) -> Generation:
    """Return a generation that has what a kernel needs.

    Args:
        name: of the generation or of a topology.
        needs: keys of ``NEEDS``.

    Raises:
        SelectionError: it lacks one; says which have it and what to do.
        UnknownNameError: there is no such need; the nearest and all are named.
    """
    generation = get(name)
    for need in (needs,) if isinstance(needs, str) else needs:
        if need not in NEEDS:
            raise unknown("unit of a TPU", need, NEEDS)
        if not getattr(generation, need):
            what, kernels = NEEDS[need]
            having = ", ".join(g.name for g in GENERATIONS if getattr(g, need))
            raise SelectionError(
                f"{generation.name} has no {what}, which {kernels} need; it is on {having}. {INSTEAD[need]}"
            )
    return generation
