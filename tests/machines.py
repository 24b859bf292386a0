"""What a plan would get on a machine that has another device than this one."""

from __future__ import annotations

from collections.abc import Mapping

from kimi_hal.dispatch.contract import Probe
from kimi_hal.dispatch.explain import Explanation, explain
from kimi_hal.dispatch.loader import load
from kimi_hal.ops.spec import Limits, Spec
from kimi_hal.settings import Settings

DRIVER = {"nvidia-driver": "580.159"}


def explained(
    operator: str,
    spec: Spec,
    limits: Limits,
    arch: str,
    implementation: str | None = None,
    *,
    device: str = "cuda",
    execution: str = "native",
    libraries: Mapping[str, str] = DRIVER,
) -> Explanation:
    """Explain a plan where an NVIDIA device of this architecture and these libraries are said to be."""
    settings = Settings(backend="nvidia", execution=execution)
    registry = load(settings)
    probe = Probe(present=True, arch=arch, devices=("NVIDIA",), facts=libraries)
    registry.get("nvidia")._probe = probe
    return explain(
        operator,
        spec,
        limits,
        device=device,
        implementation=implementation,
        settings=settings,
        registry=registry,
    )
