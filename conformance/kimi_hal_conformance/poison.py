"""Every buffer of one call stands in a room of its own, between canaries; what is not owned must not change.

Outputs are filled before the call, so that an element that nobody wrote shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kimi_hal.dispatch.device import CANARY
from kimi_hal.dispatch.hookspecs import DeviceHooks

GUARD = 4096
#: What a workspace and a floating-point output hold before the call: every byte of a NaN.
FILL = 0xFF
#: What an integer output holds: no number that means anything, least of all −1.
FILL_INTEGER = 0x5B


#: An integer of as many bytes, whatever the strides: bits are compared, so that NaN equals itself.
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Room:
    """The buffers of one call, by name."""

    def __init__(self, device: DeviceHooks) -> None:
        self.device = device
        self.buffers: dict[str, Tensor] = {}
        self.originals: dict[str, Tensor] = {}

    def operand(self, name: str, value: Any) -> Any:
        """Copy an operand between canaries, keeping strides, and remember its bytes."""
        if isinstance(value, list):
            return [self.operand(f"{name}[{i}]", item) for i, item in enumerate(value)]
        if not isinstance(value, Tensor):
            return value
        placed = self._place(value)
        self.buffers[name] = placed
        self.originals[name] = value.clone()
        return placed

    def output(self, name: str, shape: tuple[int, ...], dtype: str) -> Tensor:
        """Return an output buffer between canaries, full of what no result is."""
        buffer: Tensor = self.device.empty(shape, dtype, guard=GUARD)
        if buffer.numel():
            buffer.view(torch.uint8).fill_(FILL if buffer.is_floating_point() else FILL_INTEGER)
        self.buffers[name] = buffer
        return buffer

    def scratch(self, name: str, size: int) -> Tensor:
        """Return bytes for workspace, step metadata or records, full of NaN, between canaries."""
        buffer: Tensor = self.device.empty((size,), "uint8", guard=GUARD)
        self.buffers[name] = buffer.fill_(FILL)
        return buffer

    def _place(self, value: Tensor) -> Tensor:
        """Give a strided operand its own storage; the gaps between its rows are canaries too."""
        reach = (
            1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
            if value.numel()
            else 0
        )
        dtype = str(value.dtype).removeprefix("torch.")
        flat: Tensor = self.device.empty((reach,), dtype, guard=GUARD)
        if reach:
            flat.view(torch.uint8).fill_(CANARY)
        placed = flat.as_strided(value.shape, value.stride()) if reach else flat.view(value.shape)
        return placed.copy_(value)

    def problems(self, mutated: tuple[str, ...]) -> Iterator[str]:
        """Yield every canary that changed and every operand that the contract does not let a call change."""
        for name, buffer in self.buffers.items():
            if not _canaries_intact(buffer):
                yield f"memory around {name} was written"
        for name, original in self.originals.items():
            base = name.partition("[")[0]
            if base not in mutated and not same_bits(self.buffers[name].cpu(), original.cpu()):
                yield f"{name} was modified"


def _canaries_intact(buffer: Tensor) -> bool:
    """Look at all bytes of the storage that the buffer's elements do not cover."""
    storage = torch.empty(0, dtype=torch.uint8, device=buffer.device).set_(buffer.untyped_storage())
    covered = torch.zeros(storage.numel(), dtype=torch.bool, device=buffer.device)
    if buffer.numel():
        size = buffer.element_size()
        strides = (*(s * size for s in buffer.stride()), 1)
        covered.as_strided((*buffer.shape, size), strides, buffer.storage_offset() * size).fill_(True)
    return bool((storage[~covered] == CANARY).all())


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Compare bits: NaN equals itself, −0 is not +0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    bits = BITS[a.element_size()]
    return torch.equal(a.view(bits), b.view(bits))
