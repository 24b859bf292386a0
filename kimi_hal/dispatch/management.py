"""Read device names from a management library with the NVML call interface, without opening a device.

Two vendors ship a library with these entry points, so a name alone tells whose device it is: each plugin
claims the names that it knows (``"NVIDIA …"``, ``"…ZW…"``) and no others.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

NAME_BYTES = 96


@dataclass(frozen=True)
class ManagedDevice:
    """One device as its driver names it."""

    name: str
    capability: tuple[int, int]
    identity: str  # PCI address


@dataclass(frozen=True)
class Inventory:
    """All devices and the driver's version, or why there is none."""

    devices: tuple[ManagedDevice, ...] = ()
    driver: str = ""
    why: str = ""


class _PciInfo(ctypes.Structure):
    _fields_ = [
        ("legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("pci_id", ctypes.c_uint),
        ("subsystem", ctypes.c_uint),
        ("address", ctypes.c_char * 32),
    ]


def inventory(library: str = "libnvidia-ml.so.1") -> Inventory:
    """Return the devices that a management library lists.

    Never raises: what failed is the ``why`` of an empty inventory.
    """
    try:
        lib = ctypes.CDLL(library)
    except OSError as error:
        return Inventory(why=f"{library} cannot be loaded ({error})")
    if code := lib.nvmlInit_v2():
        return Inventory(why=f"{library} is present but its driver does not answer (code {code})")
    try:
        version = ctypes.create_string_buffer(NAME_BYTES)
        lib.nvmlSystemGetDriverVersion(version, NAME_BYTES)
        return Inventory(devices=tuple(_devices(lib)), driver=version.value.decode())
    finally:
        lib.nvmlShutdown()


def _devices(lib: Any) -> Iterator[ManagedDevice]:
    count = ctypes.c_uint()
    if lib.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return
    for index in range(count.value):
        handle = ctypes.c_void_p()
        if lib.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)):
            continue  # not ours to see: another container's, or fallen off the bus
        name = ctypes.create_string_buffer(NAME_BYTES)
        major, minor, pci = ctypes.c_int(), ctypes.c_int(), _PciInfo()
        lib.nvmlDeviceGetName(handle, name, NAME_BYTES)
        lib.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
        lib.nvmlDeviceGetPciInfo_v3(handle, ctypes.byref(pci))
        yield ManagedDevice(name.value.decode(), (major.value, minor.value), pci.address.decode())
