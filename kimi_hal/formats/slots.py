"""What the caches have in common: pages of uint8 seen through a view, and writes by slot."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_hal.errors import FormatError


def check_cache(name: str, cache: Tensor, page_bytes: int) -> None:
    """Raise FormatError unless ``cache`` is ``[pages, page_bytes]`` uint8 with contiguous pages."""
    if cache.dtype != torch.uint8 or cache.ndim != 2 or cache.shape[1] != page_bytes:
        raise FormatError(
            f"{name} takes a cache of [pages, {page_bytes}] uint8, not {list(cache.shape)} "
            f"{str(cache.dtype).removeprefix('torch.')}"
        )
    if cache.stride(1) != 1:
        raise FormatError(f"{name} takes pages of consecutive bytes, stride(1) = 1, not {cache.stride(1)}")


def check_slots(name: str, slots: Tensor, capacity: int) -> None:
    """Raise FormatError for a slot outside ``[0, capacity)``: as an index, −1 would mean the last one.

    Slots on a device are not looked at, since that would wait for it; an operator masks them there.
    """
    if slots.device.type != "cpu" or not slots.numel():
        return
    low, high = (int(bound) for bound in torch.aminmax(slots))
    if low < 0 or high >= capacity:
        outside = low if low < 0 else high
        raise FormatError(
            f"{name}: slots name {outside}, outside 0 to {capacity - 1}; leave padding out before"
        )


def last_writer(slots: Tensor) -> Tensor:
    """Return the rows to write so that each slot is written once, by the last row that names it.

    Without it two rows of one slot could leave one row's elements beside the other's scale.
    """
    order = torch.argsort(slots, stable=True)
    ordered = slots[order]
    last = torch.ones_like(slots, dtype=torch.bool)
    last[:-1] = ordered[1:] != ordered[:-1]
    return order[last]
