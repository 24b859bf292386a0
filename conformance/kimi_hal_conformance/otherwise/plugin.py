"""The right implementations as a plugin. It is registered nowhere: tests and measurements name it themselves."""

from __future__ import annotations

import dataclasses

from kimi_hal import ops
from kimi_hal.dispatch.contract import API_VERSION, Backend, Implementation, Probe
from kimi_hal.dispatch.hookspecs import hookimpl
from kimi_hal.reference.capabilities import implementation
from kimi_hal_conformance import __version__

NAME = "otherwise"
KERNELS = "kimi_hal_conformance.otherwise.kernels"
#: Operators that hold attention.
ATTENTION = ("sparse_mla", "dsa_decode")


@hookimpl
def kimi_hal_backend() -> Backend:
    """Describe the backend."""
    return Backend(
        name=NAME,
        version=__version__,
        api_version=API_VERSION,
        probe=f"{__name__}:probe",
        implementations=f"{__name__}:IMPLEMENTATIONS",
        device="kimi_hal.dispatch.device:HostDevice",
        torch_device="*",
    )


def probe() -> Probe:
    """Say that it is here: plain torch runs everywhere."""
    return Probe(present=True, arch="torch")


def _like(name: str, variant: str, numerics: tuple[str, ...] = ()) -> Implementation:
    like = implementation(ops.get(name))
    plain = tuple(
        dataclasses.replace(
            c,
            properties=dataclasses.replace(
                c.properties, batch_invariant=False, checkpoint_exact=False, numerics_id=""
            ),
        )
        for c in like.capabilities
    )
    return dataclasses.replace(
        like,
        name=variant,
        build=f"{KERNELS}:build_{variant}",
        capabilities=plain,
        weights=f"{KERNELS}:weights" if like.weights else None,
        source=("kimi_hal_conformance/otherwise/*.py",),
        numerics=numerics,
    )


IMPLEMENTATIONS = (
    *(_like(name, "float32") for name in ops.OPERATORS),
    *(_like(name, "p16", ("attn.p=bf16",)) for name in ATTENTION),
)
