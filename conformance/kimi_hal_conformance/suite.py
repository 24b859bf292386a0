"""Choose what to run for a backend, run it, and gather the report."""

from __future__ import annotations

import platform
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

from kimi_hal.dispatch import composed
from kimi_hal.dispatch.contract import ANY_DEVICE, Probe
from kimi_hal.dispatch.loader import Loaded
from kimi_hal.errors import UnknownNameError
from kimi_hal_conformance import __version__, plugins, resume, waivers
from kimi_hal_conformance import case as cases
from kimi_hal_conformance.case import FULL, PROFILES, QUICK, STANDARD
from kimi_hal_conformance.cases import load
from kimi_hal_conformance.claims import told as claims
from kimi_hal_conformance.claims import unclaimed
from kimi_hal_conformance.claims.made import is_made
from kimi_hal_conformance.conclusions import concluded, disproven, joined
from kimi_hal_conformance.conditions import child_environment, lanes, on_host, untimed, variables, versions
from kimi_hal_conformance.integrity import Integrity
from kimi_hal_conformance.messages import Batch
from kimi_hal_conformance.request import Request
from kimi_hal_conformance.runner import Outcome
from kimi_hal_conformance.runner import run as run_batches
from kimi_hal_conformance.schedule import Schedule, batch, missing, on_record, schedules, share_out, without
from kimi_hal_conformance.schema import Environment, Report, compose
from kimi_hal_conformance.verdict import CouldBe, OnTrial, Verdict

#: Into how many parts cases are shared out for each of several processes on one device, so that all end together.
PARTS_A_LANE = 3


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
        PluginError: the backend cannot be loaded, or loading it ends or hangs a process.
        ResumeError: the report to go on from is of other conditions.
    """
    load()
    started = datetime.now(UTC)
    judge = Integrity.now()  # before the plugin is imported
    registry = plugins.registry(request.backend)
    loaded, probe = registry.get(request.backend), registry.probe(request.backend)
    found = list(schedules(loaded, probe, request))
    _check_made(request)
    recorded = tuple(on_record(s.implementation, loaded) for s in found)  # before anything runs
    known = versions(loaded, probe)
    before = kept(found, recorded, loaded, request, known)
    running = [left for s in found if (left := without(s, before[s.key])).cases]
    begin(sum(len(s.cases) for s in running))
    answers, outcome = answered(running, loaded, request, progress)
    verdicts = [v for s in found for v in concluded(s, joined(s, before[s.key], answers[s.key]), request)]
    judged, waived = waivers.apply(request.waivers, verdicts, suite=__version__, today=started.date())
    could, interrupted = list[CouldBe](), outcome.interrupted
    try:
        could = [] if interrupted else beyond(found, verdicts, loaded, probe, request)
    except KeyboardInterrupt:  # the cases have their verdicts
        interrupted = True
    return compose(
        suite_version=__version__,
        backend=loaded.name,
        environment=environment(request, probe, known | outcome.versions, started, variables(loaded)),
        on_trial=recorded,
        not_implemented=missing(loaded, request.operators),
        verdicts=disproven(judged, judge),
        waivers=waived,
        could_be_claimed=[] if judge.problems() else could,
        interrupted=interrupted,
    )


def answered(
    running: Sequence[Schedule], loaded: Loaded, request: Request, progress: Callable[[Verdict], None]
) -> tuple[Mapping[tuple[str, str], list[Verdict]], Outcome]:
    """Run schedules; return the verdicts by schedule, also of one that has none, and what came of the processes."""
    parts = parts_of(running, loaded, request)
    outcome = run_batches(
        [part for _, part in parts], child_environment(request), lanes(loaded, request), progress
    )
    answers: dict[tuple[str, str], list[Verdict]] = defaultdict(list)
    for (key, _), told in zip(parts, outcome.verdicts, strict=True):
        answers[key].extend(told)
    return answers, outcome


def parts_of(
    running: Sequence[Schedule], loaded: Loaded, request: Request
) -> list[tuple[tuple[str, str], Batch]]:
    """Return the batches of a run, each with its schedule's key.

    An implementation is one batch, but where several processes use one device: there its cases are shared out, since
    most of their time is that of a compiler.
    """
    batches = [(s.key, batch(s, loaded, request)) for s in running]
    count = lanes(loaded, request)
    if count == 1 or on_host(loaded, request):
        return batches
    each = max(1, -(-sum(len(b.cases) for _, b in batches) // (PARTS_A_LANE * count)))
    return [(key, part) for key, b in batches for part in share_out(b, -(-len(b.cases) // each))]


def environment(
    request: Request,
    probe: Probe,
    known: Mapping[str, str],
    started: datetime,
    own: Mapping[str, str],
) -> Environment:
    """Return the conditions of a run that has just ended.

    Args:
        request: what was asked for.
        probe: of the device.
        known: versions by name; those of the run that this one goes on from are added.
        started: when it began.
        own: the backend's own variables that are set.
    """
    earlier = request.resume.environment if request.resume else None
    return Environment(
        execution=request.execution,
        profile=request.chosen_profile,
        seed=request.seed,
        repeats=request.chosen_repeats,
        versions={**(earlier.versions if earlier else {}), **known},
        devices=tuple(probe.devices),
        python=platform.python_version(),
        platform=platform.platform(),
        started=started.isoformat(timespec="seconds"),
        seconds=(datetime.now(UTC) - started).total_seconds(),
        resumed=earlier.started if earlier else "",
        limited_to=request.limited_to,
        variables=dict(own),
    )


def _check_made(request: Request) -> None:
    for case in filter(is_made, request.only):
        if case.endswith((f"/{claims.LEFT_OUT}", "/*")):
            raise UnknownNameError(
                f"{case!r} is no case: it stands in a report for claims of which none is tried, and names each"
            )
        if case not in cases.MADE:
            raise UnknownNameError(
                f"no implementation of {request.backend} that is on trial claims what {case!r} stands for; "
                "run its profile again for the ids of its claims"
            )


def beyond(
    found: Sequence[Schedule], verdicts: Sequence[Verdict], loaded: Loaded, probe: Probe, request: Request
) -> list[CouldBe]:
    """Return what passes although nobody claims it, where that is asked for (``Request.undeclared``).

    Raises:
        KeyboardInterrupt: it was interrupted.
    """
    wanted = request.undeclared
    if wanted is None:
        wanted = on_host(loaded, request) and request.chosen_profile in (STANDARD, FULL)
    if not wanted:
        return []
    where = claims.target(probe, request.execution, loaded.backend.torch_device == ANY_DEVICE)
    profile = request.chosen_profile if request.chosen_profile in PROFILES else QUICK
    running = [s for s in found if s.cases and s.implementation.name != composed.NAME]
    attempts = [
        unclaimed.Attempt.of(batch(s, loaded, request), s.implementation, where, profile, verdicts)
        for s in running
    ]
    return unclaimed.passed(
        attempts, lambda batches: run_batches(batches, child_environment(request), lanes(loaded, request))
    )


def kept(
    found: Sequence[Schedule],
    recorded: Sequence[OnTrial],
    loaded: Loaded,
    request: Request,
    known: Mapping[str, str],
) -> dict[tuple[str, str], dict[str, Verdict]]:
    """Return the verdicts of the run that this one goes on from, by schedule and case."""
    if request.resume:
        conditions = {
            "suite_version": __version__,
            "backend": request.backend,
            "execution": request.execution,
            "profile": request.chosen_profile,
            "seed": request.seed,
        }
        resume.check(request.resume, conditions, known, variables(loaded))
    before = {
        s.key: resume.kept(request.resume, record, [c.id for c in s.cases], request.chosen_repeats)
        for s, record in zip(found, recorded, strict=True)
    }
    return before if untimed(loaded, request) else {key: resume.to_time(v) for key, v in before.items()}
