"""NVIDIA's probe claims what the driver calls NVIDIA, and nothing else."""

from __future__ import annotations

from kimi_hal.dispatch.management import Inventory, ManagedDevice
from kimi_hal_nvidia.plugin import claim

H200 = ManagedDevice("NVIDIA H200", (9, 0), "00000000:01:00.0")
PPU = ManagedDevice("PPU-ZW810E", (8, 0), "00000000:02:00.0")


def test_an_nvidia_device_is_claimed_with_its_architecture() -> None:
    probe = claim(Inventory(devices=(H200,), driver="580.95"))
    assert probe.present
    assert probe.arch == "sm_90"
    assert probe.devices == ("NVIDIA H200 at 00000000:01:00.0",)
    assert probe.facts == {"nvidia-driver": "580.95"}


def test_a_device_of_another_vendor_behind_the_same_library_is_not_claimed() -> None:
    probe = claim(Inventory(devices=(PPU,)))
    assert not probe.present
    assert probe.why == "the driver lists PPU-ZW810E, none by NVIDIA"


def test_a_missing_driver_is_the_reason() -> None:
    probe = claim(Inventory(why="libnvidia-ml.so.1 cannot be loaded (no such file)"))
    assert probe.why == "libnvidia-ml.so.1 cannot be loaded (no such file)"


def test_an_empty_machine_is_said_so() -> None:
    assert claim(Inventory()).why == "the driver lists no device"
