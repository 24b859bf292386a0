"""Choose what to run for a backend, run it, and gather the report."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from kimi_hal import ops
from kimi_hal.dispatch.contract import Backend, Implementation, Probe
from kimi_hal.dispatch.loader import Loaded, candidates, resolve
from kimi_hal.dispatch.loader import load as load_plugins
from kimi_hal.settings import Settings
from kimi_hal_conformance import case as cases
from kimi_hal_conformance.runner import run as run_jobs
from kimi_hal_conformance.verdict import NOT_RUN, SCHEMA_VERSION, Report, Verdict
from kimi_hal_conformance.worker import Job

HOST = "kimi_hal.dispatch.device:HostDevice"
#: Seconds that one case may take, by how the kernel runs.
LIMITS = {"native": 60.0, "portable": 60.0, "interpreted": 300.0}


@dataclass(frozen=True)
class Request:
    """What was asked for on the command line."""

    backend: str
    execution: str = "native"
    profile: str = "quick"
    only: Sequence[str] = ()
    seed: int = 0
    limit: float | None = None


def find(name: str) -> tuple[Loaded, Probe]:
    """Return an installed backend by name and what it found here, or raise with the nearest name."""
    registry = load_plugins(Settings(backend=name))
    return registry.get(name), registry.probe(name)


def run(request: Request, progress: Callable[[Verdict], None] = lambda verdict: None) -> Report:
    """Run the chosen cases of a backend and return the report.

    What cannot run here (another execution mode, an operator without a case) is in it as ``not_run`` with
    its reason: nothing is skipped in silence.
    """
    from kimi_hal_conformance.cases import load

    load()
    loaded, probe = find(request.backend)
    backend = loaded.backend
    environment = child_environment(request)
    verdicts: list[Verdict] = []
    for operator in ops.OPERATORS:
        for implementation in candidates(loaded, operator):
            for verdict in on_trial(implementation, backend, probe, request, environment):
                progress(verdict)
                verdicts.append(verdict)
    return Report(
        schema_version=SCHEMA_VERSION,
        suite_version=version("kimi-hal-conformance"),
        backend=backend.name,
        execution=request.execution,
        profile=request.profile,
        versions=resolve(hooks(backend, request))().versions() if probe.present else host_versions(),
        devices=tuple(probe.devices),
        verdicts=tuple(verdicts),
    )


def host_versions() -> dict[str, str]:
    """Return the host's versions: all there is to say where the backend's device is absent."""
    found: dict[str, str] = resolve(HOST)().versions()
    return found


def on_trial(
    implementation: Implementation,
    backend: Backend,
    probe: Probe,
    request: Request,
    environment: dict[str, str],
) -> Iterator[Verdict]:
    """Yield the verdicts on one implementation."""
    full = f"{backend.name}.{implementation.name}"
    if reason := cannot_run(implementation, probe, request.execution):
        yield not_run(implementation, full, reason)
        return
    jobs = [(case, job(case, backend, full, request)) for case in chosen(implementation.operator, request)]
    if not jobs and not request.only:
        yield not_run(implementation, full, "the suite has no case for it: a claim without a test")
    yield from run_jobs(jobs, environment, request.limit or LIMITS[request.execution])


def chosen(operator: str, request: Request) -> Iterable[cases.Case]:
    """Return the operator's cases in this profile, or those named."""
    if request.only:
        return [c for c in map(cases.get, request.only) if c.operator == operator]
    mine = [c for c in cases.CASES.values() if c.operator == operator]
    return [c for c in mine if c.quick or request.profile != "quick"]


def cannot_run(implementation: Implementation, probe: Probe, execution: str) -> str:
    """Say why an implementation cannot run in this mode, or return an empty string."""
    if execution not in implementation.execution:
        return f"declares {', '.join(implementation.execution)}, this run is {execution}"
    if execution == "native" and not probe.present:
        return f"no device: {probe.why}"
    return ""


def not_run(implementation: Implementation, full: str, reason: str) -> Verdict:
    """Return the verdict on an implementation of which nothing ran."""
    return Verdict(
        case=f"{implementation.operator}/*",
        operator=implementation.operator,
        implementation=full,
        status=NOT_RUN,
        problems=(reason,),
    )


def hooks(backend: Backend, request: Request) -> str:
    """Return the device hooks: the backend's own, or the host's where its kernels are interpreted."""
    return HOST if request.execution == "interpreted" else backend.device


def job(case: cases.Case, backend: Backend, implementation: str, request: Request) -> Job:
    """Return the job that runs one case on one implementation."""
    on_host = request.execution == "interpreted" or backend.torch_device == "*"
    device = "cpu" if on_host else backend.torch_device
    return Job(
        case=case.id,
        implementation=implementation,
        device=device,
        hooks=hooks(backend, request),
        seed=request.seed,
    )


def child_environment(request: Request) -> dict[str, str]:
    """Return the children's environment: switches that are read when a kernel module is imported."""
    own = {"KIMI_HAL_BACKEND": request.backend, "KIMI_HAL_EXECUTION": request.execution}
    if request.execution == "interpreted":
        own |= {"TRITON_INTERPRET": "1"}
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("KIMI_HAL_") or k.count("_") > 2}
    return inherited | own


def operators_without_cases() -> list[str]:
    """Return the operators that no case covers: a fault of the suite."""
    covered = {c.operator for c in cases.CASES.values()}
    return sorted(set(ops.OPERATORS) - covered)
