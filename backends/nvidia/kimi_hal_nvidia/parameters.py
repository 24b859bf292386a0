"""The one argument of a kernel: a structure of addresses, then of numbers that seldom change from call to call."""

from __future__ import annotations

import ctypes
import threading
from struct import Struct


class Parameters:
    """A structure in memory that the driver copies from at each launch.

    Args:
        addresses: how many it begins with, 8 bytes each.
        numbers: format of what follows, as of ``struct``.

    Attributes:
        lock: to be held from the first word written until the launch has copied them: two threads may call one plan.
    """

    def __init__(self, addresses: int, numbers: str) -> None:
        self._addresses, self._numbers = Struct(f"{addresses}Q"), Struct(numbers)
        self.size = self._addresses.size + self._numbers.size
        self.lock = threading.Lock()
        self._room = ctypes.create_string_buffer(self.size)

    @property
    def address(self) -> int:
        """Where the structure is; it stays there as long as this object lives."""
        return ctypes.addressof(self._room)

    @property
    def content(self) -> bytes:
        """The structure as it is now."""
        return self._room.raw

    def point(self, *addresses: int) -> None:
        """Write the addresses."""
        self._addresses.pack_into(self._room, 0, *addresses)

    def tell(self, *numbers: float) -> None:
        """Write the numbers."""
        self._numbers.pack_into(self._room, self._addresses.size, *numbers)
