"""Checks of values, shared by the operators' rules. Used only in checked mode: each may read the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any


def below(name: str, tensor: Any, bound: int, what: str) -> Iterator[str]:
    """Yield if an entry reaches ``bound``. Negative entries are padding and pass."""
    if tensor.numel() and int(tensor.max()) >= bound:
        yield f"{name} holds {int(tensor.max())}, beyond {what} ({bound})"


def between(name: str, tensor: Any, low: int, high: int) -> Iterator[str]:
    """Yield if an entry is outside ``[low, high)``."""
    if not tensor.numel():
        return
    smallest, largest = int(tensor.min()), int(tensor.max())
    if smallest < low:
        yield f"{name} holds {smallest}, below {low}"
    if largest >= high:
        yield f"{name} holds {largest}, beyond {high - 1}"


def distinct(name: str, tensor: Any, ignore: int = -1) -> Iterator[str]:
    """Yield if a live (non-negative) entry stands twice; ``ignore`` may repeat."""
    live = tensor[(tensor >= 0) & (tensor != ignore)]
    values, counts = live.unique(return_counts=True)
    if values.numel() != live.numel():
        yield f"{name} names {int(values[counts > 1][0])} twice"


def span(tensor: Any) -> tuple[int, int]:
    """Return the byte addresses from the first to past the last element that a tensor can reach."""
    if not tensor.numel():
        return (0, 0)
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return (start, start + (reach + 1) * tensor.element_size())


def overlaps(a: Any, b: Any) -> bool:
    """Tell whether the address spans of two tensors meet."""
    (a0, a1), (b0, b1) = span(a), span(b)
    return a0 < b1 and b0 < a1 and a.device == b.device


def no_overlap(tensors: Mapping[str, Any], written: str, read: Iterable[str]) -> Iterator[str]:
    """Yield for each read tensor whose memory the written one touches."""
    for name in read:
        other = tensors.get(name)
        if other is not None and overlaps(tensors[written], other):
            yield f"{written} overlaps {name}"


def outputs_apart(
    tensors: Mapping[str, Any], outputs: Iterable[str], may_alias: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Yield for each given output whose memory meets another argument's, except where the contract allows it."""
    allowed = may_alias or {}
    for out in outputs:
        buffer = tensors.get(out)
        if buffer is None:
            continue
        for name, other in tensors.items():
            if name == out or other is None or not hasattr(other, "data_ptr") or allowed.get(out) == name:
                continue
            if name in allowed and allowed[name] == out:
                continue
            if overlaps(buffer, other):
                yield f"{out} overlaps {name}"
