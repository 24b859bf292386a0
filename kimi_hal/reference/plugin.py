"""The reference as a plugin: it goes through the door that every vendor's does. Imports no torch."""

from __future__ import annotations

from kimi_hal import __version__
from kimi_hal.dispatch.contract import API_VERSION, Backend, Probe
from kimi_hal.dispatch.hookspecs import hookimpl


@hookimpl
def kimi_hal_backend() -> Backend:
    """Describe the backend."""
    return Backend(
        name="reference",
        version=__version__,
        api_version=API_VERSION,
        probe="kimi_hal.reference.plugin:probe",
        implementations="kimi_hal.reference.capabilities:IMPLEMENTATIONS",
        device="kimi_hal.dispatch.device:HostDevice",
        torch_device="*",  # plain torch: the CPU's own backend, and any device where it is asked for
    )


def probe() -> Probe:
    """Say that it is here: plain torch runs everywhere."""
    return Probe(present=True, arch="torch")
