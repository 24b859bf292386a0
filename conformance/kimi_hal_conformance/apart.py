"""Strides of outputs and operands whose elements do not touch: as far apart as contract and chosen kernel admit."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kimi_hal.dispatch.contract import TensorCap
from kimi_hal.ops.check import LAYOUTS, contiguity
from kimi_hal.ops.operator import Arg, OutputShape, torch_dtype

#: Bytes of a gap where no alignment is declared.
GAP = 16


def apart(shape: OutputShape, needs: TensorCap | None) -> tuple[int, ...]:
    """Return strides, in elements, with a gap in each dimension in which gaps are admitted; innermost 1.

    Args:
        shape: of the output.
        needs: what the chosen kernel declares of it: strides are then multiples of its alignment.
    """
    size = torch_dtype(shape.dtype).itemsize
    unit = max(1, needs.align // size) if needs else 1
    gap = max(1, (needs.align if needs else GAP) // size)
    free = _free(len(shape.shape), needs)
    strides, inner = [1], shape.shape[-1] if shape.shape else 1
    for at in range(len(shape.shape) - 2, -1, -1):
        stride = -(-inner // unit) * unit + gap if at < free else inner
        strides.insert(0, stride)
        inner = stride * shape.shape[at]
    return tuple(strides[: len(shape.shape)])


def _free(dims: int, needs: TensorCap | None) -> int:
    """Return how many leading dimensions may have gaps."""
    needed = contiguity("last", needs)
    for layout, (free, _) in LAYOUTS.items():
        if layout in needed:
            return max(0, dims + free if free < 0 else free)
    return dims - 1


def spread(arg: Arg | None, needs: TensorCap | None, value: Any) -> Any:
    """Return a contiguous operand as a view of every second element of a wider one, where any stride is admitted.

    Args:
        arg: what the contract says of it; ``None``: it is no operand of the operator.
        needs: what the chosen kernel declares of it.
        value: the operand; anything else than such a tensor is returned as it is.
    """
    if arg is None or arg.many or not isinstance(value, Tensor) or not value.numel() or not value.dim():
        return value
    free = not contiguity(arg.strided, needs) and (needs is None or value.dim() == 1)
    if not free or not value.is_contiguous():
        return value
    wide = value.new_zeros((*value.shape[:-1], 2 * value.shape[-1]))
    wide[..., ::2] = value
    return wide[..., ::2]
