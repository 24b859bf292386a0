"""The form of what a call returns, looked at before anyone compares values.

As many results as the operator has outputs, in the contract's form; tensors of the right kind; the buffers that
were given, or memory of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kimi_hal.ops.operator import OutputShape, torch_dtype
from kimi_hal_conformance.oracle import buffers
from kimi_hal_conformance.printable import printable


class FormError(Exception):
    """What a call returned is not of the contract's form."""


def results_of(results: Any, names: Sequence[str]) -> tuple[Any, ...]:
    """Return the results one by one, if they are as many as the outputs and in the contract's form.

    Raises:
        FormError: they are not; says what was returned and what was expected.
    """
    if not names and results is None:
        return ()
    if len(names) == 1 and not isinstance(results, tuple | list):
        return (results,)
    if len(names) > 1 and isinstance(results, tuple) and len(results) == len(names):
        return results
    listed = f" ({', '.join(names)})" if names else ""
    wanted = ("nothing", "one tensor")[len(names)] if len(names) < 2 else f"a tuple of {len(names)}"
    raise FormError(f"the call returned {_form(results)}, expected {wanted}{listed}")


def _form(results: Any) -> str:
    if results is None:
        return "nothing"
    kind = printable(type(results).__name__)
    return f"a {kind} of {len(results)}" if isinstance(results, tuple | list) else f"a {kind}"


def problems(
    results: tuple[Any, ...],
    shapes: tuple[OutputShape, ...],
    outs: Mapping[str, Tensor],
    placed: Mapping[str, Any],
    device: torch.device,
) -> Iterator[str]:
    """Yield what is wrong with the kinds of the results."""
    inputs = {n: t for n, t in buffers(tuple(placed), placed).items() if isinstance(t, Tensor)}
    for shape, result in zip(shapes, results, strict=True):
        if not isinstance(result, Tensor):
            yield f"{shape.keyword} is a {printable(type(result).__name__)}, not a tensor"
        elif type(result) is not Tensor:
            name = printable(type(result).__name__)
            yield f"{shape.keyword} is of the class {name}, which answers for itself: expected a plain tensor"
        elif shape.keyword in outs:
            if result is not outs[shape.keyword]:
                yield f"{shape.keyword} was given, but another tensor was returned"
        else:
            yield from _fresh_problems(shape, result, inputs, device)


def _fresh_problems(
    shape: OutputShape, result: Tensor, inputs: Mapping[str, Tensor], device: torch.device
) -> Iterator[str]:
    """Yield what is wrong with a result for which no buffer was given."""
    wanted = (torch_dtype(shape.dtype), tuple(shape.shape), device.type)
    found = (result.dtype, tuple(result.shape), result.device.type)
    if found != wanted:
        yield f"without {shape.keyword}=, it is {_kind(*found)}, expected {_kind(*wanted)}"
        return
    if result.layout != torch.strided:
        yield f"without {shape.keyword}=, its layout is {result.layout}, expected torch.strided"
        return
    if result.requires_grad:
        yield f"without {shape.keyword}=, it requires grad: no gradient is part of the contract"
    for name, tensor in inputs.items():
        if tensor.numel() and result.numel() and storage(tensor) == storage(result):
            yield f"without {shape.keyword}=, it shares memory with {name}"


def _kind(dtype: torch.dtype, shape: tuple[int, ...], device: str) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)} on {device}"


def storage(tensor: Tensor) -> int:
    """Return the address of a tensor's memory, by which two views of one are known."""
    return int(tensor.untyped_storage().data_ptr())
