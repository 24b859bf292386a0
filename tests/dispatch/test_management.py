"""The management library's inventory never raises; what failed is its reason."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from kimi_hal.dispatch import management


class FakeLibrary:
    """A management library with two devices, of which one refuses its handle."""

    def __init__(self, init: int = 0) -> None:
        self.init = init
        self.shut = False

    def nvmlInit_v2(self) -> int:
        return self.init

    def nvmlShutdown(self) -> int:
        self.shut = True
        return 0

    def nvmlSystemGetDriverVersion(self, buffer: Any, size: int) -> int:
        buffer.value = b"580.95"
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:
        return 0 if index == 0 else 15

    def nvmlDeviceGetName(self, handle: Any, buffer: Any, size: int) -> int:
        buffer.value = b"NVIDIA H200"
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = 9, 0
        return 0

    def nvmlDeviceGetPciInfo_v3(self, handle: Any, pci: Any) -> int:
        pci._obj.address = b"00000000:01:00.0"
        return 0


def test_devices_that_answer_are_listed_and_the_library_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeLibrary()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    found = management.inventory()
    assert found.devices == (management.ManagedDevice("NVIDIA H200", (9, 0), "00000000:01:00.0"),)
    assert found.driver == "580.95"
    assert library.shut


def test_a_driver_that_does_not_answer_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeLibrary(init=9))
    assert management.inventory("lib.so").why == "lib.so is present but its driver does not answer (code 9)"


def test_a_missing_library_is_the_reason() -> None:
    assert management.inventory("libabsent.so.9").why.startswith("libabsent.so.9 cannot be loaded (")
