"""The mutants as a plugin, through the door that every vendor's goes through. Imports no torch.

It is registered nowhere: only the child processes of ``kimi-hal conformance prove`` see its entry point.
"""

from __future__ import annotations

from kimi_hal.dispatch.contract import API_VERSION, Backend, Probe
from kimi_hal.dispatch.hookspecs import hookimpl
from kimi_hal_conformance import __version__

NAME = "mutants"


@hookimpl
def kimi_hal_backend() -> Backend:
    """Describe the backend."""
    return Backend(
        name=NAME,
        version=__version__,
        api_version=API_VERSION,
        probe="kimi_hal_conformance.mutants.plugin:probe",
        implementations="kimi_hal_conformance.mutants.implementations:IMPLEMENTATIONS",
        device="kimi_hal.dispatch.device:HostDevice",
        torch_device="*",
    )


def probe() -> Probe:
    """Say that it is here: plain torch runs everywhere."""
    return Probe(present=True, arch="torch")
