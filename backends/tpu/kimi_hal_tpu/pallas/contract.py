"""The operators' own description held against arrays of jax, for kernels that are called without a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kimi_hal.ops import get
from kimi_hal.ops.check import dtype_and_shape
from kimi_hal.ops.operator import Dims
from kimi_hal.ops.spec import Spec
from kimi_hal_tpu.pallas.mode import Array


def operand_problems(operator: str, spec: Spec, arrays: Mapping[str, Array]) -> Iterator[str]:
    """Yield why arrays are not the operands that an operator takes under a Spec: dtype and shape.

    Args:
        operator: its name.
        spec: of the call.
        arrays: by the operator's own names; what is not among them is not looked at.
    """
    dims = Dims(spec.dims())
    for name, arg in get(operator).binding_order:
        if name in arrays:
            array = arrays[name]
            yield from dtype_and_shape(name, arg, spec, dims, array.dtype.name, tuple(array.shape))
