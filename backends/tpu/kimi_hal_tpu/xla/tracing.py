"""What stands between plain torch and a traced XLA program.

Some torch functions leave the trace in torch-xla 2.9: they are computed on the host, which cuts the program in two.
Inside ``Traced`` those that this backend's programs use are made of what stays in: a view as another type is XLA's
bit cast, a sign is read from the bits. So is what torch-xla computes otherwise than torch. What would make a shape
depend on data is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
import torch_xla.core.xla_builder as builder
import torch_xla.core.xla_op_registry as registry
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kimi_hal.errors import ContractError

TYPES = {
    torch.uint8: builder.Type.U8,
    torch.int16: builder.Type.S16,
    torch.int32: builder.Type.S32,
    torch.int64: builder.Type.S64,
    torch.bfloat16: builder.Type.BF16,
    torch.float32: builder.Type.F32,
}
DIVISIONS = {torch.Tensor.__floordiv__, torch.floor_divide, torch.Tensor.floor_divide}
SHIFTS = {torch.Tensor.__rshift__, torch.bitwise_right_shift, torch.Tensor.bitwise_right_shift}
DYNAMIC = {
    torch.Tensor.nonzero,
    torch.nonzero,
    torch.Tensor.item,
    torch.Tensor.tolist,
    torch.Tensor.__bool__,
    torch.Tensor.__int__,
    torch.masked_select,
    torch.Tensor.masked_select,
    torch.unique,
    torch.bincount,
}
DEPENDS = "gives a shape, or a Python value, that depends on data: such a program cannot be compiled once for a bucket"


@cache
def bitcast_to(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Return the traced operation that reads a tensor's bits as another type."""
    kind = TYPES[dtype]
    operation: Callable[[Tensor], Tensor] = registry.register(
        f"kimi_hal_bitcast_{kind}", lambda operand: operand.bitcast(kind)
    )
    return operation


def view_as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what ``x.view(dtype)`` returns, as a traced bit cast; FP8 stays the bytes that it is here."""
    if dtype == x.dtype or dtype not in TYPES:
        return x
    old, new = x.dtype.itemsize, dtype.itemsize
    if new > old:
        x = x.reshape(*x.shape[:-1], x.shape[-1] * old // new, new // old)
    cast = bitcast_to(dtype)(x)
    return cast.flatten(-2) if new < old else cast


def clamp(x: Tensor, min: float | None = None, max: float | None = None) -> Tensor:
    """Return what ``x.clamp`` returns, infinities too: torch-xla takes the largest finite number for no bound."""
    if min is not None:
        x = torch.where(x < min, min, x)
    return x if max is None else torch.where(x > max, max, x)


@cache
def quotient() -> Callable[[Tensor, Tensor], Tensor]:
    """Return the traced integer division, towards zero."""
    operation: Callable[[Tensor, Tensor], Tensor] = registry.register(
        "kimi_hal_quotient", lambda dividend, divisor: dividend / divisor
    )
    return operation


def floor_divide(x: Tensor, divisor: Tensor | int) -> Tensor:
    """Return ``x // divisor`` of integers: torch-xla divides in float32, which is wrong from 2^24 on."""
    other = divisor.to(x.dtype) if isinstance(divisor, Tensor) else torch.full_like(x, divisor)
    dividend, other = torch.broadcast_tensors(x, other)
    return quotient()(dividend - torch.remainder(dividend, other), other)


def shift_right(x: Tensor, bits: int) -> Tensor:
    """Return ``x >> bits`` of signed integers: torch-xla divides towards zero, exactly where no bit is lost."""
    return (x - (x & ((1 << bits) - 1))) >> bits


class Traced(TorchFunctionMode):
    """Inside, torch functions on XLA tensors stay in the trace."""

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Replace a function that would leave the trace, and refuse one whose shape depends on data."""
        if not (args and isinstance(args[0], Tensor) and args[0].device.type == "xla"):
            return func(*args, **(kwargs or {}))
        if func is torch.Tensor.view and len(args) == 2 and isinstance(args[1], torch.dtype):
            return view_as(*args)
        if func in (torch.signbit, torch.Tensor.signbit):
            return view_as(args[0], torch.int32) < 0
        if func in (torch.clamp, torch.Tensor.clamp) and args[0].is_floating_point():
            return clamp(*args, **(kwargs or {}))
        if func in DIVISIONS and not args[0].is_floating_point():
            return floor_divide(*args)
        if func in SHIFTS and isinstance(args[1], int) and args[0].dtype.is_signed:
            return shift_right(*args)
        if func in DYNAMIC or _masks(func, args):
            name = getattr(func, "__name__", str(func))
            raise ContractError("a TPU program", [f"{name} {DEPENDS}"])
        return func(*args, **(kwargs or {}))


def _masks(func: Any, args: tuple[Any, ...]) -> bool:
    """Tell whether a tensor is indexed by a mask, which keeps as many entries as the data say."""
    if func is not torch.Tensor.__getitem__:
        return False
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    return any(isinstance(part, Tensor) and part.dtype == torch.bool for part in index)
