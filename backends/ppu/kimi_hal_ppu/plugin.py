"""Who this backend is, and whether its device is here. Imports no torch and opens no device.

A PPU shows itself to torch as cuda and to its driver's NVML-compatible library as ``PPU-ZW810E``,
``ZW-M890P`` and the like; the ``ZW`` is what this plugin claims. Architecture names follow the SAIL
toolkit's build targets: ``ppu_10`` for the 810 family, ``ppu_15`` for the 890 family.
"""

from __future__ import annotations

import re
from pathlib import Path

from kimi_hal.dispatch.contract import API_VERSION, Backend, Probe, Target
from kimi_hal.dispatch.hookspecs import hookimpl
from kimi_hal.dispatch.management import Inventory, inventory

DEVICE_FILES = "alixpu*"
ARCHITECTURES = {"810": "ppu_10", "890": "ppu_15"}
#: The SAIL toolkit is not public; it starts from these targets of CUDA.
STAND_IN = "stands for {arch}: the SAIL toolkit starts from this target of CUDA, but this is not PPU code"
TARGETS = (
    Target("cuda:80", "ppu_10", code="sm_80", stand_in=STAND_IN.format(arch="ppu_10")),
    Target("cuda:89", "ppu_15", code="sm_89", stand_in=STAND_IN.format(arch="ppu_15")),
)


@hookimpl
def kimi_hal_backend() -> Backend:
    """Describe the backend."""
    return Backend(
        name="ppu",
        version="0.1.0",
        api_version=API_VERSION,
        probe="kimi_hal_ppu.plugin:probe",
        implementations="kimi_hal_ppu.implementations:IMPLEMENTATIONS",
        device="kimi_hal_ppu.device:Device",
        torch_device="cuda",
        facts=("ppu-driver",),
        targets=TARGETS,
    )


def probe(root: Path = Path("/")) -> Probe:
    """Claim the devices whose driver name contains ``ZW``."""
    files = sorted(p.name for p in (root / "dev").glob(DEVICE_FILES))
    return claim(inventory(), files)


def claim(found: Inventory, files: list[str]) -> Probe:
    """Turn an inventory and the device files into a probe."""
    ours = [d for d in found.devices if "ZW" in d.name]
    if ours:
        return Probe(
            present=True,
            arch=architecture(ours[0].name),
            devices=tuple(f"{d.name} at {d.identity}" for d in ours),
            facts={"ppu-driver": found.driver},
        )
    if files:
        return Probe(
            present=False,
            why=f"/dev/{files[0]} is there, but no management library names a ZW device "
            f"({found.why or 'it lists others'}): is the SAIL driver's library on the loader's path?",
        )
    return Probe(present=False, why=f"no /dev/{DEVICE_FILES} and no device named ZW")


def architecture(name: str) -> str:
    """Return the build target of a device name; an unknown model keeps its name, so nothing covers it."""
    model = re.search(r"ZW-?M?(\d{3})", name)
    return ARCHITECTURES.get(model.group(1), name) if model else name
