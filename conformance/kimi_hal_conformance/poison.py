"""Every buffer of one call stands in a room of its own, between canaries; what is not owned must not change.

Outputs are filled before the call, so that an element that nobody wrote shows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from kimi_hal.dispatch.device import CANARY
from kimi_hal.dispatch.hookspecs import DeviceHooks
from kimi_hal_conformance.sparse import Placed, Sparse

GUARD = 4096
#: What a workspace and a floating-point output hold before the call: every byte of a NaN.
FILL = 0xFF
#: What an integer output holds: no number that means anything, least of all −1.
FILL_INTEGER = 0x5B
#: Every byte of a number that is finite, positive and large, of any type: what a maximum never gets beyond.
LARGE = 0x77


#: An integer of as many bytes, whatever the strides: bits are compared, so that NaN equals itself.
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


#: The attribute of an operand that is to begin so many elements past an aligned address.
SHIFT = "kimi_hal_shift"


class Room:
    """The buffers of one call, by name.

    Args:
        device: where they stand.
        sparse: those that stand in a far larger buffer (``sparse.py``).
    """

    def __init__(self, device: DeviceHooks, sparse: Mapping[str, Sparse] | None = None) -> None:
        self.device = device
        self.sparse = sparse or {}
        self.far: dict[str, Placed] = {}
        self.buffers: dict[str, Tensor] = {}
        self.kinds: dict[str, tuple[object, ...]] = {}
        self.originals: dict[str, Tensor] = {}

    def operand(self, name: str, value: Any) -> Any:
        """Copy an operand between canaries, keeping strides, and remember its bytes."""
        if isinstance(value, list):
            return [self.operand(f"{name}[{i}]", item) for i, item in enumerate(value)]
        if not isinstance(value, Tensor):
            return value
        value = self._named(name, value)
        placed = self._place_far(name, value) if name in self.sparse else self._place(value)
        self._keep(name, placed)
        self.originals[name] = value.clone()
        return placed

    def output(
        self, name: str, shape: tuple[int, ...], dtype: str, strides: tuple[int, ...] | None = None
    ) -> Tensor:
        """Return an output buffer between canaries, full of what no result is.

        Args:
            name: of the output.
            shape: of it.
            dtype: of it.
            strides: in elements; what they leave out between rows are canaries too. ``None``: it is contiguous.
        """
        if name in self.sparse:
            return self._output_far(name, shape, dtype)
        if strides is None or not math.prod(shape):
            buffer: Tensor = self.device.empty(shape, dtype, guard=GUARD)
        else:
            buffer = self._strided(shape, strides, dtype)
        return poison(self._keep(name, buffer))

    def scratch(self, name: str, size: int) -> Tensor:
        """Return bytes for workspace, step metadata or records, full of NaN, between canaries."""
        buffer: Tensor = self.device.empty((size,), "uint8", guard=GUARD)
        return self._keep(name, buffer.fill_(FILL))

    def refill(self, name: str, value: Any) -> None:
        """Put other data where an operand of the same form is, and remember its bytes instead.

        Raises:
            AssertionError: it has another shape or dtype, which is a fault of who asks.
        """
        if isinstance(value, list):
            for i, item in enumerate(value):
                self.refill(f"{name}[{i}]", item)
        elif isinstance(value, Tensor):
            placed, value = self.buffers[name], self._named(name, value)
            found = self.as_given(placed)
            assert (found.shape, found.dtype) == (value.shape, value.dtype), f"{name} has another form"
            self._fill_far(name, value) if name in self.far else placed.copy_(value)
            self.originals[name] = value.clone()

    def original(self, name: str) -> None:
        """Remember a buffer's bytes: from here on a call may read it, and no more."""
        self.originals[name] = self.buffers[name].clone()

    def as_given(self, tensor: Tensor) -> Tensor:
        """Return an operand as the case has it: of a sparse one the rows that exist."""
        far = next((f for name, f in self.far.items() if self.buffers[name] is tensor), None)
        return far.existing(tensor) if far else tensor

    def _keep(self, name: str, buffer: Tensor) -> Tensor:
        """Remember a buffer, and where it is: a call may exchange the memory of a tensor that stays the same."""
        self.buffers[name], self.kinds[name] = buffer, kind(buffer)
        return buffer

    def _named(self, name: str, value: Tensor) -> Tensor:
        """Return an operand that names rows of a sparse one with the numbers that they have there."""
        naming = (sparse for sparse in self.sparse.values() if name in sparse.ids)
        sparse = next(naming, None)  # several buffers that one operand names rows of stand alike
        return sparse.named(name, value) if sparse else value

    def _far(self, name: str, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> Tensor:
        """Return a buffer of which little exists."""
        self.far[name] = Placed(self.sparse[name], shape, strides, dtype)
        return self._keep(name, self.far[name].allocate(self.device))

    def _place_far(self, name: str, value: Tensor) -> Tensor:
        """Put each row of an operand where it stands in a far larger buffer."""
        dtype = str(value.dtype).removeprefix("torch.")
        whole = self._far(name, tuple(value.shape), value.stride(), dtype)
        self._fill_far(name, value)
        return whole

    def _fill_far(self, name: str, value: Tensor) -> None:
        for place, row in zip(self.sparse[name].places, value, strict=True):
            self.buffers[name][place].copy_(row)

    def _output_far(self, name: str, shape: tuple[int, ...], dtype: str) -> Tensor:
        """Return an output whose rows stand far apart, full of what no result is."""
        whole = self._far(name, shape, torch.empty(shape, device="meta").stride(), dtype)
        for row in whole:
            poison(row)
        return whole

    def _place(self, value: Tensor) -> Tensor:
        """Give a strided operand its own storage; the gaps between its rows are canaries too."""
        dtype, past = str(value.dtype).removeprefix("torch."), getattr(value, SHIFT, 0)
        if not value.numel():
            empty: Tensor = self.device.empty((past,), dtype, guard=GUARD)
            return empty[:0].view(value.shape)
        return self._strided(tuple(value.shape), value.stride(), dtype, past).copy_(value)

    def _strided(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str, past: int = 0) -> Tensor:
        """Return a buffer that has elements, canaries in every gap, ``past`` elements behind an aligned address."""
        reach = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        flat: Tensor = self.device.empty((past + reach,), dtype, guard=GUARD)
        flat.view(torch.uint8).fill_(CANARY)
        flat = flat[past:]
        return flat.as_strided(shape, strides, flat.storage_offset())

    def problems(self, mutated: tuple[str, ...]) -> Iterator[str]:
        """Yield every canary that changed and every operand that the contract does not let a call change."""
        for name, buffer in self.buffers.items():
            if kind(buffer) != self.kinds[name]:
                yield f"{name} was given other memory or another form: a call writes where its caller's buffer is"
                continue
            far = self.far.get(name)
            if not (far.intact() if far else _canaries_intact(buffer)):
                yield f"memory around {name} was written"
        for name, original in self.originals.items():
            base = name.partition("[")[0]
            if kind(self.buffers[name]) != self.kinds[name]:
                continue
            if base not in mutated and not same_bits(self.as_given(self.buffers[name]).cpu(), original.cpu()):
                yield f"{name} was modified"


def kind(buffer: Tensor) -> tuple[object, ...]:
    """Return what a call must leave of a tensor that it is given: its class, memory and form."""
    return type(buffer), buffer.data_ptr(), buffer.shape, buffer.stride(), buffer.dtype, buffer.requires_grad


def poison(buffer: Tensor) -> Tensor:
    """Fill an output, whose innermost stride is 1, with what no result is, and return it."""
    return cover(buffer, FILL if buffer.is_floating_point() else FILL_INTEGER)


def cover(buffer: Tensor, byte: int) -> Tensor:
    """Fill a buffer, whose innermost stride is 1, with one byte, and return it."""
    if buffer.numel():
        buffer.view(torch.uint8).fill_(byte)
    return buffer


def _canaries_intact(buffer: Tensor) -> bool:
    """Look at all bytes of the storage that the buffer's elements do not cover."""
    storage = torch.empty(0, dtype=torch.uint8, device=buffer.device).set_(buffer.untyped_storage())
    if buffer.is_contiguous():
        start = buffer.storage_offset() * buffer.element_size()
        around = (storage[:start], storage[start + buffer.nbytes :])
        return all(bool((side == CANARY).all()) for side in around)
    covered = torch.zeros(storage.numel(), dtype=torch.bool, device=buffer.device)
    if buffer.numel():
        size = buffer.element_size()
        strides = (*(s * size for s in buffer.stride()), 1)
        covered.as_strided((*buffer.shape, size), strides, buffer.storage_offset() * size).fill_(True)
    return bool((storage[~covered] == CANARY).all())


def no_canaries(device: DeviceHooks) -> str:
    """Say how a device's buffers lack the canaries that are asked for, or return an empty string.

    Without them a write beside a buffer would pass unseen. Only their sum is looked at: what owns its buffers may
    say of each that it begins at 0.
    """
    for shape, dtype in (((5,), "uint8"), ((3, 5), "bfloat16")):
        buffer: Tensor = device.empty(shape, dtype, guard=GUARD)
        around = buffer.untyped_storage().nbytes() - buffer.nbytes
        if around < 2 * GUARD or not _canaries_intact(buffer):
            return (
                f"empty({shape}, {dtype!r}, guard={GUARD}) gives {around} bytes around the tensor that can be looked "
                f"at, expected {2 * GUARD} or more, each {CANARY:#04x} (hookspecs.DeviceHooks.empty)"
            )
    return ""


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Compare bits: NaN equals itself, −0 is not +0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    bits = BITS[a.element_size()]
    return torch.equal(a.view(bits), b.view(bits))
