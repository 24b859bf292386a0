"""Checks of values, shared by the operators' rules. Used only in checked mode: each may read the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any


def below(name: str, tensor: Any, bound: int, what: str) -> Iterator[str]:
    """Yield if an entry reaches ``bound``. Negative entries are padding and pass."""
    if not tensor.numel():
        return
    largest = int(tensor.max())
    if largest >= bound:
        yield f"{name} holds {largest}, beyond {what} ({bound})"


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


def row_requests(live: Any, row_req: Any, requests: int) -> Iterator[str]:
    """Yield if a row that is ``live`` (bool ``[T]``) belongs to no request; other rows are not read."""
    yield from between("row_req", row_req[live], 0, requests)


def table_pages(
    live: Any, local: Any, row_req: Any, block_table: Any, page: int, pages: int, name: str = "block_table"
) -> Iterator[str]:
    """Yield if a live local position (int64 ``[T, k]``, bool ``live``) is in a page beyond the cache's.

    Only the entries that these positions name are read: an engine leaves stale numbers behind them.
    """
    requests, columns = block_table.shape
    inside = live & (local < columns * page) & ((row_req >= 0) & (row_req < requests))[:, None]
    rows = row_req[:, None].expand_as(local)[inside].long()
    yield from below(name, block_table[rows, local[inside] // page], pages, "the cache's pages")


def span(tensor: Any) -> tuple[int, int]:
    """Return the byte addresses from the first to past the last element that a tensor can reach."""
    if not tensor.numel():
        return (0, 0)
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return (start, start + (reach + 1) * tensor.element_size())


def runs(tensor: Any) -> tuple[Any, int]:
    """Return the sorted start addresses (int64) of a tensor's runs of adjacent bytes, and a run's length."""
    import torch

    length = tensor.element_size()
    dims = sorted((stride * length, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    starts = torch.tensor([tensor.data_ptr()], dtype=torch.int64, device="cpu")
    for stride, size in dims:
        if stride == 0 or size == 1:
            continue
        if stride <= length and starts.numel() == 1:  # still one run: it grows
            length += stride * (size - 1)
        else:
            starts = (starts[:, None] + stride * torch.arange(size, device="cpu")).flatten()
    return starts.sort().values, length


def overlaps(a: Any, b: Any) -> bool:
    """Tell whether two tensors share a byte. Views that only interleave, as in a packed cache, do not.

    Tensors of a compiler that traces have no addresses, all are 0, and share nothing: each is a value.
    """
    import torch

    if a.device != b.device or not a.numel() or not b.numel():
        return False
    if not a.data_ptr() and not b.data_ptr():
        return False
    (a0, a1), (b0, b1) = span(a), span(b)
    if a1 <= b0 or b1 <= a0:
        return False
    (a_starts, a_length), (b_starts, b_length) = runs(a), runs(b)
    # For each run of a: the first run of b that ends after it starts.
    first = torch.searchsorted(b_starts, a_starts - b_length, right=True)
    found = first < b_starts.numel()
    return bool((b_starts[first[found]] < a_starts[found] + a_length).any())


def shares_elements(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Tell whether two elements of a tensor are one place in memory, as in an expanded view. Reads no memory."""
    import torch

    dims = sorted((stride, size) for stride, size in zip(strides, sizes, strict=True) if size != 1)
    if any(not size for _, size in dims):
        return False
    length = 1  # elements that stand one behind the other
    apart: list[tuple[int, int]] = []  # dimensions with gaps between them
    for stride, size in dims:
        if not apart and stride < length:
            return True
        if not apart and stride == length:
            length *= size
        else:
            apart.append((stride, size))
    reach, nested = length - 1, True
    for stride, size in apart:
        nested &= stride > reach
        reach += stride * (size - 1)
    if nested:
        return False
    starts = torch.zeros(
        1, dtype=torch.int64, device="cpu"
    )  # interleaved dimensions: rare, so simply counted
    for stride, size in apart:
        starts = (starts[:, None] + stride * torch.arange(size, device="cpu")).flatten()
    ordered = starts.sort().values
    return bool((ordered[1:] - ordered[:-1] < length).any())


def same_place(a: Any, b: Any) -> bool:
    """Tell whether two tensors of one shape are the same elements of the same memory."""
    if a.data_ptr() != b.data_ptr() or a.shape != b.shape:
        return False
    strides = zip(a.shape, a.stride(), b.stride(), strict=True)
    return all(size == 1 or one == other for size, one, other in strides)


def no_overlap(tensors: Mapping[str, Any], written: str, read: Iterable[str]) -> Iterator[str]:
    """Yield for each read tensor whose memory the written one touches."""
    for name in read:
        other = tensors.get(name)
        if other is not None and overlaps(tensors[written], other):
            yield f"{written} overlaps {name}"


def outputs_apart(
    tensors: Mapping[str, Any], outputs: Iterable[str], may_alias: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Yield for each given output whose memory meets another argument's.

    ``may_alias`` maps an output to the one input whose storage it may share.
    """
    allowed = may_alias or {}
    names = [name for name in outputs if tensors.get(name) is not None]
    for i, out in enumerate(names):
        for name, other in tensors.items():
            if name in names[: i + 1] or allowed.get(out) == name:  # a pair of outputs is named once
                continue
            if hasattr(other, "data_ptr") and overlaps(tensors[out], other):
                yield f"{out} overlaps {name}"
