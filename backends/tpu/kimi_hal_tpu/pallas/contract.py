"""The operators' own description held against arrays of jax, for kernels that are called without a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kimi_hal.ops import get
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
        if name not in arrays:
            continue
        array = arrays[name]
        accepted, shape = arg.dtypes(spec), tuple(array.shape)
        if array.dtype.name not in accepted:
            yield f"{name} must be {' or '.join(accepted)}, got {array.dtype.name}"
        if arg.ndim and len(shape) != getattr(spec, arg.ndim):
            yield f"{name} must have {getattr(spec, arg.ndim)} dimensions, got shape {list(shape)}"
        if arg.shape != "*" and (wrong := dims.mismatch(name, arg.shape, shape)):
            yield wrong
