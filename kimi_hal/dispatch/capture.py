"""Tell whether a call is being recorded, where values cannot be read: captured into a graph, or traced."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kimi_hal.errors import ContractError, KimiHalError

HINT = "bind an example before (plan.bind), or trace plan.op"


def refuse(operator: str, given: Mapping[str, Any], what: str) -> None:
    """Raise where the call's values cannot be read now.

    Raises:
        KimiHalError: says what reads them and what to do instead.
    """
    import torch

    if torch.compiler.is_compiling():  # traced itself: a tracer shows what is raised only if that is plain
        raise KimiHalError(f"{operator}: {what}, which a call traced by torch.compile does not have: {HINT}")
    recorded = _recorded(list(tensors_of(given.values())))
    if recorded:
        raise ContractError(operator, [f"{what}, which a call {recorded} does not have: {HINT}"])


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

    if any(isinstance(t, FakeTensor) for t in tensors):
        return "on fake tensors"
    kinds = {t.device.type for t in tensors} - {"cpu", "meta"}
    for kind in kinds:
        capturing = getattr(getattr(torch, kind, None), "is_current_stream_capturing", None)
        if capturing is not None and capturing():
            return "captured into a graph"
    return ""
