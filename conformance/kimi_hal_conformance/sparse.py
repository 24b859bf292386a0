"""Buffers that are far larger than what a call touches of them: offsets beyond 2^31 with real 64-bit addresses.

A case holds only the rows that are touched: pages of a cache, slots of a pool, rows of scores. On trial they stand
far apart in a buffer that is as large as it says; the oracle answers the case as it is. On the host the buffer is
memory that nobody has committed: only what is touched exists. A device must really have it.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kimi_hal.dispatch.device import CANARY
from kimi_hal.dispatch.hookspecs import DeviceHooks
from kimi_hal.ops.operator import torch_dtype

#: Canary bytes on each side of a row that is addressed, and at both ends of the buffer.
AROUND = 1 << 14
#: Linux's number; the module names it from Python 3.13 on.
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
#: Bytes that a device must have beside the buffer.
SPARE = 1 << 30


class CannotTryError(Exception):
    """What a case needs is not here: it is not run, and this is the reason."""


@dataclass(frozen=True)
class Sparse:
    """How one buffer of a case stands in a larger one.

    Args:
        places: where each row of the case's tensor (its first dimension) stands in the larger buffer.
        rows: rows of the larger buffer.
        stride: elements from one row to the next; 0: as in the case's tensor.
        ids: operands that name such rows -> how many of their numbers one row has: 1 for the pages of a block
            table and for state ids, the tokens of a page for slots.
    """

    places: tuple[int, ...]
    rows: int
    stride: int = 0
    ids: Mapping[str, int] = field(default_factory=dict)

    def named(self, operand: str, value: Tensor) -> Tensor:
        """Return an operand that names rows, with the numbers that they have in the larger buffer.

        What is negative stays; what is behind the case's last row is behind the larger buffer's last one.
        """
        unit, known = self.ids[operand], torch.tensor(self.places, dtype=torch.int64)
        row, rest = value.long().div(unit, rounding_mode="floor"), value.long().remainder(unit)
        beyond = self.rows + row - len(self.places)
        found = torch.where(row < len(self.places), known[row.clamp(0, len(self.places) - 1)], beyond)
        far = torch.where(value < 0, value.long(), found * unit + rest).to(value.dtype)
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(far)


class Placed:
    """One such buffer, between canaries, with canaries around each row that exists."""

    def __init__(self, sparse: Sparse, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> None:
        self.sparse, self.shape, self.dtype = sparse, (sparse.rows, *shape[1:]), torch_dtype(dtype)
        self.strides = (sparse.stride or strides[0], *strides[1:])
        reach = 1 + sum((n - 1) * s for n, s in zip(shape[1:], strides[1:], strict=True))
        size = self.dtype.itemsize
        self.row_bytes, self.step = reach * size, self.strides[0] * size
        self.bytes = 2 * AROUND + (sparse.rows - 1) * self.step + self.row_bytes
        self.memory = torch.empty(0, dtype=torch.uint8)

    def allocate(self, device: DeviceHooks) -> Tensor:
        """Return the whole buffer, with canaries around the rows that exist.

        Raises:
            CannotTryError: the device, or the host's address space, has no room for it.
        """
        where = device.empty((1,), "uint8", guard=0).device
        self.memory = mapped(self.bytes) if where.type == "cpu" else held(device, self.bytes)
        for start, end in self.windows():
            self.memory[start:end] = CANARY
        rows = self.memory[AROUND : self.bytes - AROUND].view(self.dtype)
        return rows.as_strided(self.shape, self.strides)

    def start(self, place: int) -> int:
        """Return the byte at which a row begins."""
        return AROUND + place * self.step

    def windows(self) -> Iterator[tuple[int, int]]:
        """Yield the ranges of bytes around the rows that exist, none of which overlap."""
        begin = end = 0
        for place in sorted(self.sparse.places):
            first = self.start(place) - AROUND
            if first > end:
                yield begin, end
                begin = first
            end = self.start(place) + self.row_bytes + AROUND
        yield begin, min(end, self.bytes)

    def intact(self) -> bool:
        """Tell whether the canaries around the rows are as they were."""
        return all(self._intact(start, end) for start, end in self.windows())

    def _intact(self, start: int, end: int) -> bool:
        covered = torch.zeros(end - start, dtype=torch.bool, device=self.memory.device)
        size = self.dtype.itemsize
        strides = (*(s * size for s in self.strides[1:]), 1)
        for place in self.sparse.places:
            if start <= (at := self.start(place)) < end:
                covered.as_strided((*self.shape[1:], size), strides, at - start).fill_(True)
        return bool((self.memory[start:end][~covered] == CANARY).all())

    def existing(self, whole: Tensor) -> Tensor:
        """Return the rows that exist, as the case has them."""
        return torch.stack([whole[place] for place in self.sparse.places])


def mapped(size: int) -> Tensor:
    """Return bytes of the host that exist only where they are touched."""
    try:
        room = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    except (OSError, ValueError) as error:
        raise CannotTryError(f"the host gives no {size / 2**30:.1f} GiB of addresses: {error}") from error
    return torch.frombuffer(room, dtype=torch.uint8)


def held(device: DeviceHooks, size: int) -> Tensor:
    """Return bytes of a device that has them."""
    free, total = device.memory()
    if free < size + SPARE:
        gib = [round(n / 2**30, 1) for n in (size, free, total)]
        raise CannotTryError(f"it needs {gib[0]} GiB of device memory; {gib[1]} of {gib[2]} GiB are free")
    found: Tensor = device.empty((size,), "uint8", guard=0)
    return found
