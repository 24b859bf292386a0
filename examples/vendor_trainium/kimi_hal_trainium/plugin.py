"""Who this backend is, and whether its device is here. Imports no torch and opens no device.

The probe reads what the Neuron driver writes under sysfs (AWS Neuron documentation, "Neuron Sysfs User
Guide"). Inferentia shows itself in the same place and is not claimed.
"""

from __future__ import annotations

from pathlib import Path

from kimi_hal.dispatch.contract import API_VERSION, Backend, Probe
from kimi_hal.dispatch.hookspecs import hookimpl

DEVICE_NAMES = "sys/devices/virtual/neuron_device/neuron*/info/architecture/device_name"
DRIVER_VERSION = "sys/module/neuron/version"
#: Device name -> architecture, as capabilities name it.
GENERATIONS = {"Trainium2": "trn2", "Trainium3": "trn3"}


@hookimpl
def kimi_hal_backend() -> Backend:
    """Describe the backend. Every part of it is named by a string and imported when it is needed."""
    return Backend(
        name="trainium",
        version="0.1.0",
        api_version=API_VERSION,
        probe="kimi_hal_trainium.plugin:probe",
        implementations="kimi_hal_trainium.implementations:IMPLEMENTATIONS",
        torch_device="cpu",  # the CPU stands in for the device; torch-neuronx calls its tensors xla
        device="kimi_hal_trainium.device:Device",
        facts=("neuron-driver",),
        variables={"KIMI_HAL_TRAINIUM_TILE": "128, 256 or 512: keys that one tile holds; default 512"},
    )


def probe(root: Path = Path("/")) -> Probe:
    """Claim the Trainium devices of which all are one generation."""
    found = sorted((read(file), file.parents[2].name) for file in root.glob(DEVICE_NAMES))
    ours = [(name, where) for name, where in found if name in GENERATIONS]
    if not ours:
        others = ", ".join(name for name, _ in found)
        listed = f"the Neuron driver lists {others}, none of {', '.join(GENERATIONS)}"
        return Probe(present=False, why=listed if others else f"no file /{DEVICE_NAMES}")
    return Probe(
        present=True,
        arch=GENERATIONS[ours[0][0]],
        devices=tuple(f"AWS {name} {where}" for name, where in ours),
        facts=driver(root),
    )


def driver(root: Path = Path("/")) -> dict[str, str]:
    """Return the driver's version as a fact, if it is loaded."""
    file = root / DRIVER_VERSION
    return {"neuron-driver": read(file)} if file.is_file() else {}


def read(file: Path) -> str:
    """Return a file's one line."""
    return file.read_text().strip()
