"""Who this backend is, and whether its device is here. Imports no torch and opens no device."""

from __future__ import annotations

from kimi_hal.dispatch.contract import API_VERSION, Backend, Probe, Target
from kimi_hal.dispatch.hookspecs import hookimpl
from kimi_hal.dispatch.management import Inventory, inventory


@hookimpl
def kimi_hal_backend() -> Backend:
    """Describe the backend."""
    return Backend(
        name="nvidia",
        version="0.1.0",
        api_version=API_VERSION,
        probe="kimi_hal_nvidia.plugin:probe",
        implementations="kimi_hal_nvidia.implementations:IMPLEMENTATIONS",
        device="kimi_hal.dispatch.device:StreamDevice",
        torch_device="cuda",
        facts=("nvidia-driver",),
        tables=("kimi_hal_nvidia/tables/*.json",),
        variables={
            "KIMI_HAL_NVIDIA_TUNE": "off | FILE: no table of measurements, or one of `kimi-hal bench --tune`"
        },
        targets=(Target("sm_90a", "sm_90"), Target("sm_100a", "sm_100"), Target("sm_103a", "sm_103")),
    )


def probe() -> Probe:
    """Claim the devices whose driver name begins with ``NVIDIA``."""
    return claim(inventory())


def claim(found: Inventory) -> Probe:
    """Turn an inventory into a probe. ROCm and PPU devices, which torch also calls cuda, are not claimed."""
    ours = [d for d in found.devices if d.name.startswith("NVIDIA")]
    if not ours:
        others = ", ".join(d.name for d in found.devices)
        why = found.why or (
            f"the driver lists {others}, none by NVIDIA" if others else "the driver lists no device"
        )
        return Probe(present=False, why=why)
    major, minor = ours[0].capability
    return Probe(
        present=True,
        arch=f"sm_{major}{minor}",
        devices=tuple(f"{d.name} at {d.identity}" for d in ours),
        facts={"nvidia-driver": found.driver},
    )
