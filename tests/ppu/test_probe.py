"""PPU's probe claims the names that contain ZW; torch would call the device cuda."""

from __future__ import annotations

import pytest

from kimi_hal.dispatch.management import Inventory, ManagedDevice
from kimi_hal_ppu.plugin import architecture, claim

H200 = ManagedDevice("NVIDIA H200", (9, 0), "00000000:01:00.0")


@pytest.mark.parametrize(
    ("name", "arch"),
    [("PPU-ZW810E", "ppu_10"), ("PPU-ZW810", "ppu_10"), ("ZW810E", "ppu_10"), ("ZW-M890P", "ppu_15")],
)
def test_names_from_the_field_give_the_build_target(name: str, arch: str) -> None:
    probe = claim(Inventory(devices=(ManagedDevice(name, (8, 0), "02:00.0"),), driver="2.1"), [])
    assert probe.present
    assert probe.arch == arch


def test_an_unknown_model_keeps_its_name_so_that_nothing_covers_it() -> None:
    assert architecture("PPU-ZW777X") == "PPU-ZW777X"


def test_an_nvidia_device_is_not_claimed() -> None:
    assert not claim(Inventory(devices=(H200,)), []).present


def test_device_files_without_a_library_are_explained() -> None:
    probe = claim(Inventory(why="libnvidia-ml.so.1 cannot be loaded"), ["alixpu0"])
    assert probe.why == (
        "/dev/alixpu0 is there, but no management library names a ZW device (libnvidia-ml.so.1 cannot be "
        "loaded): is the SAIL driver's library on the loader's path?"
    )


def test_nothing_at_all() -> None:
    assert claim(Inventory(), []).why == "no /dev/alixpu* and no device named ZW"
