"""Who this backend is and what it covers. Imports no torch."""

from __future__ import annotations

from kimi_hal.dispatch.contract import (
    API_VERSION,
    Backend,
    Capability,
    Implementation,
    OneOf,
    Probe,
    Properties,
    Range,
)
from kimi_hal.dispatch.hookspecs import hookimpl


@hookimpl
def kimi_hal_backend() -> Backend:
    """Describe the backend."""
    return Backend(
        name="acme",
        version="0.1.0",
        api_version=API_VERSION,
        probe="kimi_hal_acme.plugin:probe",
        implementations="kimi_hal_acme.plugin:IMPLEMENTATIONS",
        device="kimi_hal.dispatch.device:HostDevice",
        torch_device="cpu",
        variables={"KIMI_HAL_ACME_ORDER": "forward or backward: the order in which parts are added"},
    )


def probe() -> Probe:
    """The simulator is a part of this package, so it is here."""
    return Probe(present=True, arch="acme_sim", devices=("Acme simulator",))


MERGE = Capability(
    arch=("acme_sim",),
    spec={
        "parts": Range(1, 8),
        "num_heads": Range(1, 128),
        "dim": Range(64, 512, multiple=64),
        "dtype": OneOf(("float32", "bfloat16")),
        "return_lse": OneOf((False, True)),
    },
    properties=Properties(deterministic=True),
)

IMPLEMENTATIONS = (
    Implementation(
        operator="merge_attn_states",
        name="merge",
        build="kimi_hal_acme.merge:build",
        capabilities=(MERGE,),
        source=("kimi_hal_acme/*.py",),
    ),
)
