"""Who this backend is, and whether its device is here. Imports no torch and opens no device.

That libtpu can be imported is not a TPU: the probe reads the PCI bus.
"""

from __future__ import annotations

from pathlib import Path

from kimi_hal.dispatch.contract import API_VERSION, Backend, Probe, Target
from kimi_hal.dispatch.hookspecs import hookimpl
from kimi_hal_tpu import requirements
from kimi_hal_tpu.generations import GENERATIONS as KINDS

DEVICES = Path("sys/bus/pci/devices")
GOOGLE = "0x1ae0"
#: PCI device id -> generation, as jax/_src/hardware_utils.py (jax 0.10.2) lists them
GENERATIONS = {
    "0x0027": "v3",
    "0x005e": "v4",
    "0x0062": "v5p",
    "0x0063": "v5e",
    "0x006f": "v6e",
    "0x0076": "tpu7x",
}

#: torch's name of the device -> the module with its hooks.
DRIVERS = {"xla": "device", "tpu": "torch_tpu"}


@hookimpl
def kimi_hal_backend() -> Backend:
    """Describe the backend. torch_tpu and torch-xla serve different torches: one environment has one of them."""
    driver = "tpu" if requirements.installed("torch_tpu") else "xla"
    return Backend(
        name="tpu",
        version="0.1.0",
        api_version=API_VERSION,
        probe="kimi_hal_tpu.plugin:probe",
        implementations="kimi_hal_tpu.implementations:IMPLEMENTATIONS",
        device=f"kimi_hal_tpu.{DRIVERS[driver]}:Device",
        torch_device=driver,
        targets=tuple(Target(kind.name, kind.name, code=kind.kind) for kind in KINDS),
    )


def probe(root: Path = Path("/")) -> Probe:
    """Claim the PCI devices with Google's vendor id and a TPU's device id."""
    found = sorted(
        (GENERATIONS[device], path.name)
        for path, vendor, device in _pci(root)
        if vendor == GOOGLE and device in GENERATIONS
    )
    if not found:
        return Probe(present=False, why=f"no PCI device of vendor {GOOGLE} with a TPU's device id")
    return Probe(
        present=True, arch=found[0][0], devices=tuple(f"TPU {gen} at {where}" for gen, where in found)
    )


def _pci(root: Path) -> list[tuple[Path, str, str]]:
    rows = []
    for path in (root / DEVICES).glob("*"):
        vendor, device = path / "vendor", path / "device"
        if vendor.is_file() and device.is_file():
            rows.append((path, vendor.read_text().strip(), device.read_text().strip()))
    return rows
