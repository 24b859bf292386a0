"""Who this backend is, and whether its device is here. Imports no torch and opens no device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kimi_hal.dispatch.contract import API_VERSION, Backend, Probe, Target
from kimi_hal.dispatch.hookspecs import hookimpl

NODES = Path("sys/class/kfd/kfd/topology/nodes")
DRIVER_VERSION = Path("sys/module/amdgpu/version")


@hookimpl
def kimi_hal_backend() -> Backend:
    """Describe the backend."""
    return Backend(
        name="amd",
        version="0.1.0",
        api_version=API_VERSION,
        probe="kimi_hal_amd.plugin:probe",
        implementations="kimi_hal_amd.implementations:IMPLEMENTATIONS",
        device="kimi_hal_amd.device:Device",
        torch_device="cuda",  # what a ROCm build of torch calls it
        facts=("amdgpu",),
        targets=(Target("gfx942", "gfx942"), Target("gfx950", "gfx950")),
    )


def probe(root: Path = Path("/")) -> Probe:
    """Claim the GPU nodes of the kernel's compute topology (sysfs, readable without a device)."""
    if not (root / NODES).is_dir():
        return Probe(present=False, why=f"/{NODES} is missing: the amdgpu kernel driver is not loaded")
    gpus = list(_gpus(root))
    if not gpus:
        return Probe(present=False, why=f"/{NODES} lists no GPU node")
    version = root / DRIVER_VERSION
    facts = {"amdgpu": version.read_text().strip()} if version.is_file() else {}
    return Probe(
        present=True, arch=gpus[0][0], devices=tuple(f"AMD {a} node {n}" for a, n in gpus), facts=facts
    )


def _gpus(root: Path) -> Iterator[tuple[str, str]]:
    for node in sorted((root / NODES).iterdir(), key=lambda p: int(p.name)):
        properties = node / "properties"
        if not properties.is_file():
            continue
        rows = (line.split() for line in properties.read_text().splitlines())
        values = {row[0]: int(row[1]) for row in rows if len(row) == 2}
        if version := values.get("gfx_target_version", 0):  # 0 on a CPU node
            yield gfx_name(version), node.name


def gfx_name(version: int) -> str:
    """Return the compiler's name of a topology version: 90402 (9·10000 + 4·100 + 2) is gfx942."""
    major, minor, stepping = version // 10000, version // 100 % 100, version % 100
    return f"gfx{major}{minor:x}{stepping:x}"
