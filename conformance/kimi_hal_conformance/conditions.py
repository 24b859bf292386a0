"""Where a run's processes compute, how many at once, and what they are told by their environment."""

from __future__ import annotations

import contextlib
import os
from importlib.metadata import PackageNotFoundError, version

import kimi_hal
from kimi_hal.dispatch.contract import ANY_DEVICE, Probe
from kimi_hal.dispatch.loader import Loaded
from kimi_hal.settings import VARIABLES
from kimi_hal_conformance.case import INTERP, QUICK, STANDARD
from kimi_hal_conformance.request import Request

HOST = "kimi_hal.dispatch.device:HostDevice"
#: Seconds that one case may take, by how the kernel runs.
LIMITS = {"native": 60.0, "portable": 60.0, "interpreted": 300.0}
#: Processes at once where the host computes everything: more share its memory bandwidth.
HOST_LANES = 4


def on_host(loaded: Loaded, request: Request) -> bool:
    """Tell whether everything is computed on the CPU."""
    return request.execution == "interpreted" or loaded.backend.torch_device in (ANY_DEVICE, "cpu")


def lanes(loaded: Loaded, request: Request) -> int:
    """Return how many processes run at once: one on a device, where a fault of one could reach another."""
    if request.lanes:
        return request.lanes
    return min(HOST_LANES, cores()) if on_host(loaded, request) else 1


def cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0))


def child_environment(request: Request) -> dict[str, str]:
    """Return the children's environment: switches that are read when a kernel module is imported.

    The plugin's own variables stay, the core's are the run's own; kernels on the host share its cores.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    own = {"KIMI_HAL_BACKEND": request.backend, "KIMI_HAL_EXECUTION": request.execution}
    if request.execution == "interpreted":
        own |= {"TRITON_INTERPRET": "1"}
    threads = {"OMP_NUM_THREADS": str(max(1, cores() // HOST_LANES)), "OPENBLAS_NUM_THREADS": "1"}
    return threads | inherited | own


def untimed(loaded: Loaded, request: Request) -> str:
    """Say why nothing is timed, or return an empty string."""
    if request.execution != "native" or on_host(loaded, request):
        return "speed is measured on a device, natively"
    if request.chosen_profile in (INTERP, QUICK):
        return f"the {STANDARD} profile measures speed"
    if (request.lanes or 1) > 1:
        return "speed is measured where one process has the device: go on with --resume, without --lanes"
    return ""


def variables(loaded: Loaded) -> dict[str, str]:
    """Return the variables that a backend declares as its own and that are set."""
    return {name: os.environ[name] for name in sorted(loaded.backend.variables) if name in os.environ}


def versions(loaded: Loaded, probe: Probe) -> dict[str, str]:
    """Return the versions that are known without a device: ours, the libraries', the driver's."""
    required = {name for i in loaded.implementations for c in i.capabilities for name in c.requires}
    libraries = {}
    for name in sorted(required - probe.facts.keys()):
        with contextlib.suppress(PackageNotFoundError):
            libraries[name] = version(name)
    return {"kimi-hal": kimi_hal.__version__, loaded.name: loaded.backend.version, **libraries, **probe.facts}
