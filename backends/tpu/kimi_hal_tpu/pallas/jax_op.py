"""Pallas kernels on torch_tpu's device, through its ``torch.tpu.pallas.jax_op``: a program becomes a torch operator.

torch_tpu exports the program for a TPU and compiles it with its own libtpu; jax opens no device. An operator is
registered once for a program, a Spec and what is fixed of a call; torch_tpu itself keeps one compilation a shape.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from hashlib import blake2b
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from torch import Tensor

from kimi_hal_tpu import generations
from kimi_hal_tpu.pallas import operands as forms
from kimi_hal_tpu.static import refuse_dynamic

NAMESPACE = "kimi_hal_tpu"


class JaxOp:
    """Runs a program as an operator of torch_tpu."""

    def __init__(self, program: forms.Program, spec: Any, op: Any, arch: str) -> None:
        self.program, self.spec, self.op, self.arch = program, spec, op, arch

    def cut(self) -> None:
        """Do nothing: torch_tpu runs each operator as a program of its own."""

    def run(self, operands: dict[str, Any], rows: int | None = None) -> list[Tensor]:
        """Return the program's results on the device. No ranks meet in it."""
        form, tensors = forms.split(operands)
        refuse_dynamic(
            self.op, {f"{n}.shape": s for n, t in zip(form.each, tensors, strict=True) for s in t.shape}
        )
        call = registered(self.program, self.spec, form, self.arch)
        return list(call([forms.plain(tensor) for tensor in tensors]))


@cache
def registered(
    program: forms.Program, spec: Any, form: forms.Form, arch: str
) -> Callable[[list[Tensor]], list[Tensor]]:
    """Return the operator of torch_tpu for a program."""
    import torch
    import torch_tpu

    del torch_tpu  # importing it makes torch.tpu
    inner = forms.function(program, spec, form, arch)
    mesh = chip(arch)

    # jax_op reads these annotations: a list of tensors in, a list of tensors out.
    def kernel(arrays: list[jax.Array]) -> list[jax.Array]:
        with use_abstract_mesh(mesh):
            return inner(arrays)

    name = getattr(program, "__name__", "program")
    digest = blake2b(repr((spec, form, arch)).encode(), digest_size=6).hexdigest()
    made: Callable[[list[Tensor]], list[Tensor]] = torch.tpu.pallas.jax_op(  # type: ignore[attr-defined]
        f"{NAMESPACE}::{name}_{digest}", kernel
    )
    return made


def chip(arch: str) -> AbstractMesh:
    """Return a mesh of one device of a generation: from it Pallas learns of SparseCores, where jax sees no TPU."""
    generation = generations.get(arch)
    device = AbstractDevice(device_kind=generation.kind, num_cores=generation.cores, platform="tpu")
    return AbstractMesh((1,), ("chip",), abstract_device=device)
