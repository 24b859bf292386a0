"""Tell whether a call is being recorded, where values cannot be read: captured into a graph, or traced."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kimi_hal.errors import ContractError


def refuse(operator: str, given: Mapping[str, Any], what: str) -> None:
    """Raise where the call's values cannot be read now.

    Raises:
        ContractError: says what reads them and what to do instead.
    """
    tensors = list(tensors_of(given.values()))
    recorded = _recorded(tensors)
    if recorded:
        raise ContractError(
            operator,
            [
                f"{what}, and this call is {recorded}; call plan.bind(…) on an example before, and unset it here"
            ],
        )


def tensors_of(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the tensors among arguments, those in lists included."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from tensors_of(value)
        elif hasattr(value, "data_ptr"):
            yield value


def _recorded(tensors: list[Any]) -> str:
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    if torch.compiler.is_compiling() or any(isinstance(t, FakeTensor) for t in tensors):
        return "traced by torch.compile"
    kinds = {t.device.type for t in tensors} - {"cpu", "meta"}
    for kind in kinds:
        capturing = getattr(getattr(torch, kind, None), "is_current_stream_capturing", None)
        if capturing is not None and capturing():
            return "captured into a graph"
    return ""
