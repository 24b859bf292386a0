"""Pallas kernels inside torch-xla's trace: a whole program as one XLA computation with Mosaic's custom calls in it.

torch-xla's own ``make_kernel_from_pallas`` takes the payload of one kernel, drops what a program computes around it,
and lowers for the device that jax finds, so that on a CPU host it makes nothing. Here jax lowers the program for a TPU
by name, and torch-xla calls the result as it calls a computation of its own. jax opens no device in this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch_xla
import torch_xla.core.xla_builder as builder
from torch import Tensor
from torch_xla.experimental.custom_kernel import jax_import_guard

from kimi_hal_tpu.pallas import operands as forms
from kimi_hal_tpu.static import refuse_dynamic

#: An XLA computation, called with a list of tensors.
Computation = Callable[[list[Tensor]], list[Tensor]]


class CustomCall:
    """Traces a program into torch-xla's graph; one computation a set of shapes."""

    def __init__(self, program: forms.Program, spec: Any, op: Any, arch: str) -> None:
        self.program, self.spec, self.op, self.arch = program, spec, op, arch
        self.computations: dict[Any, Computation] = {}

    def cut(self) -> None:
        """Run what is traced, without waiting for it."""
        torch_xla.sync()

    def run(self, operands: dict[str, Any], rows: int | None = None) -> list[Tensor]:
        """Return the program's results, traced: nothing runs before torch-xla's next sync. No ranks meet in it."""
        form, tensors = forms.split(operands)
        refuse_dynamic(
            self.op, {f"{n}.shape": s for n, t in zip(form.each, tensors, strict=True) for s in t.shape}
        )
        tensors = [forms.plain(tensor) for tensor in tensors]
        key = form, tuple((tuple(t.shape), t.dtype) for t in tensors)
        if key not in self.computations:
            self.computations[key] = self._computation(form, tensors)
        return list(self.computations[key](tensors))

    def _computation(self, form: forms.Form, tensors: list[Tensor]) -> Computation:
        jax_import_guard()  # torch-xla must have its device before jax is imported
        function = forms.function(self.program, self.spec, form, self.arch)
        module = lowered(function, tensors).compiler_ir("hlo")
        proto = module.as_serialized_hlo_module_proto()
        made = builder.computation_from_module_proto(self.op.name, proto)
        call: Computation = builder.xla_computation_as_func(made, f"kimi_hal::{self.op.name}")
        return call


def on_tpu() -> bool:
    """Tell whether torch-xla drives a TPU. That libtpu can be imported is none."""
    return bool(torch_xla.runtime.device_type() == "TPU")


def lowered(function: Callable[[list[Any]], list[Any]], tensors: list[Tensor]) -> Any:
    """Return a function that jax lowered for a TPU, whatever devices it has itself.

    Lowered as for an export, since jax sees no libtpu by which to choose how new a Mosaic it writes: torch-xla's 0.0.21
    reads version 7, as jax 0.7.1 exports, and refuses the 8 that it would write for a libtpu of its own day.
    """
    import jax
    from jax.interpreters import mlir

    arrays = [jax.ShapeDtypeStruct(tuple(t.shape), forms.name_of(t.dtype)) for t in tensors]
    traced = jax.jit(function, keep_unused=True).trace(arrays)
    export = mlir.LoweringParameters(for_export=True)
    return traced.lower(lowering_platforms=("tpu",), _private_parameters=export)
