"""Which Pallas kernels torch-xla 2.9's own libtpu compiles as torch-xla is given them, by generation.

Needs the environment of ``nox -s tpu_xla`` and libtpu 0.0.21, which that has not: ``pip install --no-deps --target DIR
libtpu==0.0.21`` and ``PYTHONPATH=DIR``. Sizes as in ``kimi_hal_tpu.pallas.compiling``. No TPU is used.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

from benchmarks.record import keep

OPERATORS = ("indexer_logits", "kda_prefill", "kda_decode", "kda_verify", "kda_commit", "moe_experts")


def compile_for(
    name: str, program: Callable[..., Any], operands: Sequence[Any], needs: Sequence[str] = ()
) -> Any:
    """Compile as ``aot.compile_for`` does, lowered as the bridge to torch-xla lowers."""
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.interpreters import mlir
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from kimi_hal_tpu import generations
    from kimi_hal_tpu.pallas import aot

    topology = generations.get(name).topology
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh, start = Mesh(np.array(devices[:1]), ("chip",)), time.perf_counter()
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, PartitionSpec())
        arrays = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in operands]
        traced = jax.jit(program).trace(*arrays)
        made = traced.lower(_private_parameters=mlir.LoweringParameters(for_export=True)).compile()
    return aot.Code(devices[0].device_kind, made.as_text(), 0, 0, time.perf_counter() - start)


def tried(kernel: Any) -> dict[str, Any]:
    """Return what came of compiling one kernel: its calls of Mosaic, or the compiler's sentence."""
    start = time.perf_counter()
    try:
        made = kernel.compile()
    except Exception as error:  # each library has errors of its own; the sentence is the finding
        return {"refused": str(error).partition("\n")[0].split("  at location")[0][:200]}
    return {"kernels": made.further["kernels"], "seconds": round(time.perf_counter() - start, 1)}


def main() -> None:
    """Compile every kernel of TensorCore for every generation, and write what came of it."""
    for variable in ("TPU_SKIP_MDS_QUERY", "ALLOW_MULTIPLE_LIBTPU_LOAD"):
        os.environ.setdefault(variable, "1")
    from kimi_hal.dispatch.contract import Target
    from kimi_hal_tpu import generations, requirements
    from kimi_hal_tpu.pallas import aot, compiling, kda_compiling

    requirements.check_custom_call()
    found: dict[str, Any] = {}
    with mock.patch.object(aot, "compile_for", compile_for):
        for operator in OPERATORS:
            module = kda_compiling if operator.startswith("kda_") else compiling
            for generation in generations.GENERATIONS:
                for kernel in getattr(module, operator)(Target(generation.name, generation.name, code="")):
                    found.setdefault(f"{operator}/{kernel.name}", {})[generation.name] = tried(kernel)
    versions = {name: requirements.installed(name) for name in ("torch_xla", "jax", "libtpu")}
    keep("tpu_torch_xla", {"versions": versions, "compiled": found})


if __name__ == "__main__":
    main()
