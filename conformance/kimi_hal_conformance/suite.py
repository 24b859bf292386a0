"""Choose what to run for a backend, run it, and gather the report."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

import msgspec

import kimi_hal
from kimi_hal import ops
from kimi_hal.dispatch import composed
from kimi_hal.dispatch.contract import Implementation, Probe
from kimi_hal.dispatch.loader import Loaded, candidates
from kimi_hal.dispatch.loader import load as load_plugins
from kimi_hal.dispatch.sources import source_hash
from kimi_hal.errors import PluginError, UnknownNameError, unknown
from kimi_hal.ops.composites import part_specs
from kimi_hal.settings import VARIABLES, Settings
from kimi_hal_conformance import __version__, levels, resume, waivers
from kimi_hal_conformance import case as cases
from kimi_hal_conformance.case import FULL, INTERP, PROFILES, QUICK, STANDARD, Case
from kimi_hal_conformance.cases import load
from kimi_hal_conformance.claims import told as claims
from kimi_hal_conformance.claims import unclaimed
from kimi_hal_conformance.claims.made import is_made
from kimi_hal_conformance.claims.walk import NO_CLAIMS, Walk
from kimi_hal_conformance.messages import Batch
from kimi_hal_conformance.runner import run as run_batches
from kimi_hal_conformance.schema import Environment, Report, compose
from kimi_hal_conformance.verdict import (
    AGAINST,
    FAILED,
    NOT_RUN,
    REFUSED,
    CouldBe,
    OnTrial,
    Verdict,
    Waiver,
)

HOST = "kimi_hal.dispatch.device:HostDevice"
#: ``Backend.torch_device`` of code that runs wherever torch does.
ANY_DEVICE = "*"
#: Seconds that one case may take, by how the kernel runs.
LIMITS = {"native": 60.0, "portable": 60.0, "interpreted": 300.0}
#: Processes at once where the host computes everything: more share its memory bandwidth.
HOST_LANES = 4

#: Calls beside the first of what is declared deterministic; an interpreter takes seconds for each.
REPEATS = {INTERP: 0, QUICK: 1, STANDARD: 19, FULL: 19}
#: The profile of a run in which single cases are named.
NAMED = "cases"
REPEATS_OF_NAMED = 1
#: Of how many cases of an implementation relations and capture are tried: the first that have rows to take apart.
RELATIONS = {INTERP: 0, QUICK: 2, STANDARD: 16, FULL: 1 << 20}
RELATIONS_OF_NAMED = 1 << 20


@dataclass(frozen=True)
class Request:
    """What was asked for on the command line.

    Args:
        backend: an installed backend.
        execution: native, portable or interpreted.
        profile: one of ``PROFILES``; empty: ``interp`` where kernels are interpreted, else ``quick``.
        only: case ids; empty: all of the profile.
        implementation: full name of the one implementation to try; empty: all of the backend.
        seed: of the operands.
        limit: seconds of one case; ``None``: by execution.
        lanes: processes at once; ``None``: one on a device, one a core (4 at most) where all is on the host.
        waivers: failures that are admitted.
        repeats: calls of a case beside the first where determinism is declared; ``None``: by profile.
        resume: an earlier report, whose verdicts that still hold are kept.
        undeclared: whether what is not claimed is tried, for "could be claimed"; ``None``: on the host, from the
            standard profile on.
        operators: these alone; empty: all of the contract.
    """

    backend: str
    execution: str = "native"
    profile: str = ""
    only: Sequence[str] = ()
    implementation: str = ""
    seed: int = 0
    limit: float | None = None
    lanes: int | None = None
    waivers: Sequence[Waiver] = ()
    repeats: int | None = None
    resume: Report | None = None
    undeclared: bool | None = None
    operators: Sequence[str] = ()

    @property
    def limited_to(self) -> tuple[str, ...]:
        """Return what alone is asked for: operators, an implementation, cases; empty: everything."""
        return *self.operators, *filter(None, (self.implementation,)), *self.only

    @property
    def chosen_repeats(self) -> int:
        """Return how often a call is repeated."""
        if self.repeats is not None:
            return self.repeats
        return REPEATS.get(self.chosen_profile, REPEATS_OF_NAMED)

    @property
    def chosen_relations(self) -> int:
        """Return of how many cases of an implementation more than the values and bits of a call is tried."""
        return RELATIONS.get(self.chosen_profile, RELATIONS_OF_NAMED)

    @property
    def chosen_profile(self) -> str:
        """Return the profile that is run."""
        if self.only:
            return NAMED
        return self.profile or (INTERP if self.execution == "interpreted" else QUICK)


@dataclass(frozen=True)
class Trial:
    """An implementation, the cases that it is to run, and those that are left out, with the reason.

    ``claims`` made some of the cases.
    """

    implementation: Implementation
    full_name: str
    cases: tuple[Case, ...]
    left_out: tuple[tuple[str, str], ...]
    claims: Walk = NO_CLAIMS

    @property
    def key(self) -> tuple[str, str]:
        """Return what tells it from the others: an implementation's name may stand for several operators."""
        return self.implementation.operator, self.full_name


def run(
    request: Request,
    progress: Callable[[Verdict], None] = lambda verdict: None,
    begin: Callable[[int], None] = lambda total: None,
) -> Report:
    """Run the chosen cases of a backend and return the report.

    What is left out (another execution mode, another profile) is in it as ``not_run`` with its reason:
    nothing is skipped in silence. Ctrl-C ends it, and what was not reached is left out for that reason.

    Args:
        request: what is asked for.
        progress: told each verdict when it is there, from several threads.
        begin: told how many verdicts are to come.

    Raises:
        UnknownNameError: no such backend, operator, implementation or case; the nearest is named.
        PluginError: the backend cannot be loaded.
        ResumeError: the report to go on from is of other conditions.
    """
    load()
    started, start = datetime.now(UTC), time.perf_counter()
    registry = load_plugins(Settings(backend=request.backend))
    loaded, probe = registry.get(request.backend), registry.probe(request.backend)
    trials = list(on_trial(loaded, probe, request))
    for case in filter(is_made, request.only):
        if case not in cases.MADE:
            raise UnknownNameError(
                f"no implementation of {request.backend} that is on trial claims what {case!r} stands for; "
                "run its profile again for the ids of its claims"
            )
    recorded = tuple(on_record(t, loaded) for t in trials)  # before anything runs
    before = kept(trials, recorded, request, versions(loaded, probe))
    running = [left for t in trials if (left := without(t, before[t.key])).cases]
    begin(sum(len(t.cases) for t in running))
    outcome = run_batches(
        [batch(t, loaded, request) for t in running],
        child_environment(request),
        lanes(loaded, request),
        progress,
    )
    answers = dict(zip((t.key for t in running), outcome.verdicts, strict=True))
    verdicts = [
        v for t in trials for v in concluded(t, joined(t, before[t.key], answers.get(t.key, ())), request)
    ]
    judged, waived = waivers.apply(request.waivers, verdicts, suite=__version__, today=started.date())
    known = versions(loaded, probe) | outcome.versions
    environment = Environment(
        execution=request.execution,
        profile=request.chosen_profile,
        seed=request.seed,
        repeats=request.chosen_repeats,
        versions=request.resume.environment.versions | known if request.resume else known,
        devices=tuple(probe.devices),
        python=platform.python_version(),
        platform=platform.platform(),
        started=started.isoformat(timespec="seconds"),
        seconds=time.perf_counter() - start,
        resumed=request.resume.environment.started if request.resume else "",
        limited_to=request.limited_to,
    )
    return compose(
        suite_version=__version__,
        backend=loaded.name,
        environment=environment,
        on_trial=recorded,
        not_implemented=tuple(op for op in ops.OPERATORS if not candidates(loaded, op)),
        verdicts=judged,
        waivers=waived,
        could_be_claimed=() if outcome.interrupted else beyond(trials, verdicts, loaded, probe, request),
        interrupted=outcome.interrupted,
    )


def beyond(
    trials: Sequence[Trial], verdicts: Sequence[Verdict], loaded: Loaded, probe: Probe, request: Request
) -> list[CouldBe]:
    """Return what passes although nobody claims it, where that is asked for (``Request.undeclared``)."""
    wanted = request.undeclared
    if wanted is None:
        wanted = on_host(loaded, request) and request.chosen_profile in (STANDARD, FULL)
    if not wanted:
        return []
    where = claims.target(probe, request.execution, loaded.backend.torch_device == ANY_DEVICE)
    profile = request.chosen_profile if request.chosen_profile in PROFILES else QUICK
    running = [t for t in trials if t.cases and t.implementation.name != composed.NAME]
    found = [
        unclaimed.Attempt.of(batch(t, loaded, request), t.implementation, where, profile, verdicts)
        for t in running
    ]
    return unclaimed.passed(
        found, lambda batches: run_batches(batches, child_environment(request), lanes(loaded, request))
    )


def kept(
    trials: Sequence[Trial], recorded: Sequence[OnTrial], request: Request, known: Mapping[str, str]
) -> dict[tuple[str, str], dict[str, Verdict]]:
    """Return the verdicts of the run that this one goes on from, by trial and case."""
    if request.resume:
        conditions = {
            "suite_version": __version__,
            "backend": request.backend,
            "execution": request.execution,
            "profile": request.chosen_profile,
            "seed": request.seed,
        }
        resume.check(request.resume, conditions, known)
    return {
        t.key: resume.kept(request.resume, record, [c.id for c in t.cases], request.chosen_repeats)
        for t, record in zip(trials, recorded, strict=True)
    }


def without(trial: Trial, known: Mapping[str, Verdict]) -> Trial:
    """Return a trial without the cases whose verdicts are known."""
    return replace(trial, cases=tuple(c for c in trial.cases if c.id not in known))


def joined(trial: Trial, known: Mapping[str, Verdict], answers: Sequence[Verdict]) -> list[Verdict]:
    """Return the verdicts of a trial in its cases' order; a case that an interrupted run did not reach has one too."""
    found = {**known, **{v.case: v for v in answers}}
    return [found.get(c.id) or _said(trial, c.id, NOT_RUN, NOT_REACHED) for c in trial.cases]


def versions(loaded: Loaded, probe: Probe) -> dict[str, str]:
    """Return the versions that are known without a device: ours, the libraries', the driver's."""
    required = {name for i in loaded.implementations for c in i.capabilities for name in c.requires}
    libraries = {}
    for name in sorted(required - probe.facts.keys()):
        with contextlib.suppress(PackageNotFoundError):
            libraries[name] = version(name)
    return {"kimi-hal": kimi_hal.__version__, loaded.name: loaded.backend.version, **libraries, **probe.facts}


def on_record(trial: Trial, loaded: Loaded) -> OnTrial:
    """Return what exactly an implementation is."""
    try:
        digest = source_hash(loaded.backend, trial.implementation)
    except PluginError:  # its cases fail by the same error, with a sentence
        digest = ""
    return OnTrial(
        operator=trial.implementation.operator,
        implementation=trial.full_name,
        version=trial.implementation.version or loaded.backend.version,
        source_hash=digest,
        numerics=trial.implementation.numerics,
        conforming=all(c.properties.tie_rule == "contract" for c in trial.implementation.capabilities),
    )


def on_trial(loaded: Loaded, probe: Probe, request: Request) -> Iterator[Trial]:
    """Yield every implementation that is asked for, with its cases."""
    named = [cases.get(case) for case in request.only if not is_made(case)]
    every = [(op, i) for op in ops.OPERATORS for i in candidates(loaded, op)]
    known = {f"{loaded.name}.{i.name}" for _, i in every}
    if request.implementation and request.implementation not in known:
        raise unknown(f"implementation of {loaded.name}", request.implementation, known)
    wanted = {ops.get(name).name for name in request.operators}
    for operator, implementation in every:
        if wanted and operator not in wanted:
            continue
        full_name = f"{loaded.name}.{implementation.name}"
        everything = named if request.only else cases.CASES.values()
        mine = [c for c in everything if c.operator == operator]
        if request.implementation not in ("", full_name):
            continue
        found = trial(implementation, full_name, mine, loaded, probe, request)
        if found.cases or found.left_out or not request.only:
            yield found


def trial(
    implementation: Implementation,
    full_name: str,
    mine: Sequence[Case],
    loaded: Loaded,
    probe: Probe,
    request: Request,
) -> Trial:
    """Sort the cases of an operator into those that run and those that are left out."""
    everything = f"{implementation.operator}/*"
    if reason := cannot_run(implementation, loaded, probe, request.execution):
        return Trial(
            implementation, full_name, (), ((everything, reason),) if mine or not request.only else ()
        )
    reasons = {case.id: left_out(case, implementation, loaded, request.chosen_profile) for case in mine}
    where = claims.target(probe, request.execution, loaded.backend.torch_device == ANY_DEVICE)
    claimed = claims.claimed(implementation, where, request.chosen_profile, request.only)
    return Trial(
        implementation,
        full_name,
        (*(case for case in mine if not reasons[case.id]), *(cases.get(made.id) for made in claimed.made)),
        tuple((case, reason) for case, reason in reasons.items() if reason),
        claimed,
    )


def cannot_run(implementation: Implementation, loaded: Loaded, probe: Probe, execution: str) -> str:
    """Say why an implementation cannot run in this mode, or return an empty string."""
    if execution not in implementation.execution:
        ways = ", ".join(way for way in implementation.execution if way != "compile_only")
        return f"it {f'runs {ways}' if ways else 'is compiled only'}; this run is {execution}"
    if execution == "native" and not probe.present and loaded.backend.torch_device != ANY_DEVICE:
        return f"no device: {probe.why}"
    return lacking(implementation, loaded, probe)


def lacking(implementation: Implementation, loaded: Loaded, probe: Probe) -> str:
    """Say which library an implementation lacks here, or all that could be its part do, or return an empty string."""
    if implementation.name == composed.NAME:
        for part in ops.get(implementation.operator).parts:
            reasons = [lacking(other, loaded, probe) for other in candidates(loaded, part)]
            if reasons and all(reasons):
                return f"its part {part} cannot run: {reasons[0]}"
        return ""
    absent = [
        next(
            (n for n in c.requires if n not in {*probe.facts, *loaded.backend.facts} and not installed(n)), ""
        )
        for c in implementation.capabilities
    ]
    if not absent or not all(absent):
        return ""
    name = absent[0]
    return f"{name} is not installed; it needs {name}{implementation.capabilities[0].requires.get(name, '')}"


def installed(name: str) -> bool:
    """Tell whether a distribution is installed."""
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def left_out(case: Case, implementation: Implementation, loaded: Loaded, profile: str) -> str:
    """Say why a case is left out, or return an empty string."""
    if implementation.name == composed.NAME:  # first: no other profile would run it
        missing = [part for part in part_specs(case.operator, case.spec) if not candidates(loaded, part)]
        if missing:
            return f"{loaded.name} does not implement its parts: {', '.join(missing)}"
    if profile in PROFILES and not case.runs_in(profile):
        reason = (
            "too large for an interpreter" if profile == INTERP else f"too long for the {profile} profile"
        )
        return f"{reason}; the {case.since} profile has it"
    return ""


def batch(trial: Trial, loaded: Loaded, request: Request) -> Batch:
    """Return what the trial's process is told."""
    return Batch(
        implementation=trial.full_name,
        device="cpu" if on_host(loaded, request) else loaded.backend.torch_device,
        hooks=HOST if request.execution == "interpreted" else loaded.backend.device,
        cases=tuple(case.id for case in trial.cases),
        seed=request.seed,
        limit=request.limit or LIMITS[request.execution],
        repeats=request.chosen_repeats,
        relations=request.chosen_relations,
        untimed=untimed(loaded, request),
        made=tuple(made for made in trial.claims.made if made.id in {case.id for case in trial.cases}),
    )


def untimed(loaded: Loaded, request: Request) -> str:
    """Say why nothing is timed, or return an empty string."""
    if request.execution != "native" or on_host(loaded, request):
        return "speed is measured on a device, natively"
    if request.chosen_profile in (INTERP, QUICK):
        return f"the {STANDARD} profile measures speed"
    return ""


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


def concluded(trial: Trial, answers: Sequence[Verdict], request: Request) -> Iterator[Verdict]:
    """Yield the verdicts on an implementation, with the command that replays each, and on what it claims."""
    for verdict in answers:
        yield _with_replay(claims.verdict(verdict, trial.claims.made), request)
    yield from claims.beside(trial.claims, trial.implementation.operator, trial.full_name)
    for case, reason in trial.left_out:
        yield _said(trial, case, NOT_RUN, reason)
    if request.only or not trial.cases:
        return
    if all(verdict.status == REFUSED for verdict in answers):
        yield _said(trial, f"{trial.implementation.operator}/*", FAILED, UNTESTED)


NOT_REACHED = "the run was interrupted before this case"
#: How every replay begins.
COMMAND = "kimi-hal conformance replay"
UNTESTED = "it refuses every case: what it claims is not tested, and no claim stands without a test"


def _said(trial: Trial, case: str, status: str, problem: str) -> Verdict:
    return Verdict(
        case=case,
        operator=trial.implementation.operator,
        implementation=trial.full_name,
        status=status,
        problems=(problem,),
        level=levels.of_id(case),
    )


def _with_replay(verdict: Verdict, request: Request) -> Verdict:
    level = verdict.level or levels.of_id(verdict.case)
    return msgspec.structs.replace(verdict, replay=replay(verdict, request), level=level)


def replay(verdict: Verdict, request: Request) -> str:
    """Return the command that runs one case of one implementation again.

    How often it is repeated matters for what failed alone.
    """
    repeats = max(request.chosen_repeats, REPEATS_OF_NAMED) if verdict.status in AGAINST else REPEATS_OF_NAMED
    options = {
        "backend": request.backend,
        "execution": request.execution,
        "implementation": verdict.implementation,
        "seed": verdict.seed,
        "repeats": repeats,
    }
    defaults = {"execution": "native", "seed": 0, "repeats": REPEATS_OF_NAMED}
    given = [f"--{name} {value}" for name, value in options.items() if defaults.get(name) != value]
    return " ".join((COMMAND, verdict.case, *given))


def operators_without_cases() -> list[str]:
    """Return the operators that no case covers: a fault of the suite."""
    return sorted(set(ops.OPERATORS) - {case.operator for case in cases.CASES.values()})
