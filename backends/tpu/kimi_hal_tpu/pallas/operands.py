"""A call's operands by name as a list of tensors, and the Pallas program as a function of that list.

What a foreign framework calls takes tensors alone. Names and lists are part of what is traced; the sizes before padding
are operands, since a program is traced once for a bucket and not for each size in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kimi_hal_tpu import generations

#: A program: Spec, arrays by name, mode -> outputs, then mutated operands.
Program = Callable[..., Sequence[Any]]


@dataclass(frozen=True)
class Form:
    """What a program is traced for beside shapes.

    Args:
        names: each operand's name, and how many tensors it has; ``None`` for one that is no list.
        constants: scalars by name.
    """

    names: tuple[tuple[str, int | None], ...]
    constants: tuple[tuple[str, Any], ...]

    @property
    def each(self) -> Iterator[str]:
        """Return the name of each tensor of the list."""
        return (name for name, count in self.names for _ in range(1 if count is None else count))

    def given(self, arrays: Sequence[Any]) -> dict[str, Any]:
        """Return operands by name for the tensors of a list."""
        rest = iter(arrays)
        return {
            name: next(rest) if count is None else [next(rest) for _ in range(count)]
            for name, count in self.names
        }


def split(operands: Mapping[str, Any]) -> tuple[Form, list[Tensor]]:
    """Return what is fixed of a call, and its tensors in order."""
    names: list[tuple[str, int | None]] = []
    constants: list[tuple[str, Any]] = []
    tensors: list[Tensor] = []
    for name, value in operands.items():
        if isinstance(value, Tensor):
            names.append((name, None))
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            names.append((name, len(value)))
            tensors.extend(value)
        else:
            constants.append((name, value))
    device = next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))
    # Sizes before padding are made on the host.
    return Form(tuple(names), tuple(constants)), [tensor.to(device) for tensor in tensors]


def plain(tensor: Tensor) -> Tensor:
    """Return a tensor as the programs take it: bytes for truth values, 32 bits for places in a cache."""
    if tensor.dtype == torch.bool:
        return tensor.to(torch.uint8)
    if (
        tensor.dtype == torch.int64
    ):  # no place in a cache needs more; what is beyond names nothing and still does
        return tensor.clamp(-(1 << 31), (1 << 31) - 1).to(torch.int32)
    return tensor


def name_of(dtype: torch.dtype) -> str:
    """Return what jax calls a type."""
    return str(dtype).removeprefix("torch.")


def function(program: Program, spec: Any, form: Form, arch: str) -> Callable[[list[Any]], list[Any]]:
    """Return a program as a function of its tensors, compiled for a generation."""
    from kimi_hal_tpu.pallas.mode import Mode

    mode = Mode(float4=generations.get(arch).float4)

    def call(arrays: list[Any]) -> list[Any]:
        return list(program(spec, form.given(arrays) | dict(form.constants), mode))

    return call
