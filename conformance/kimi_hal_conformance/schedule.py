"""What each implementation of a backend is to run, and what is left out for which reason."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from kimi_hal import ops
from kimi_hal.dispatch import composed
from kimi_hal.dispatch.contract import ANY_DEVICE, Implementation, Probe
from kimi_hal.dispatch.loader import Loaded, candidates
from kimi_hal.dispatch.matching import Target, unmet
from kimi_hal.dispatch.sources import source_hash
from kimi_hal.errors import PluginError, unknown
from kimi_hal.ops.composites import part_specs
from kimi_hal_conformance import case as cases
from kimi_hal_conformance.case import PROFILES, Case
from kimi_hal_conformance.claims import told as claims
from kimi_hal_conformance.claims.made import is_made
from kimi_hal_conformance.claims.walk import NO_CLAIMS, Walk
from kimi_hal_conformance.conditions import HOST, LIMITS, on_host, untimed
from kimi_hal_conformance.messages import Batch
from kimi_hal_conformance.request import Request
from kimi_hal_conformance.verdict import OnTrial, Verdict


@dataclass(frozen=True)
class Schedule:
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


def schedules(loaded: Loaded, probe: Probe, request: Request) -> Iterator[Schedule]:
    """Yield every implementation that is asked for, with its cases."""
    named = [cases.get(case) for case in request.only if not is_made(case)]
    everything = named if request.only else list(cases.CASES.values())
    for implementation in chosen(loaded, request.implementation, request.operators):
        mine = [c for c in everything if c.operator == implementation.operator]
        found = scheduled(implementation, full_name(implementation, loaded), mine, loaded, probe, request)
        if found.cases or found.left_out or not request.only:
            yield found


def chosen(loaded: Loaded, implementation: str, operators: Sequence[str]) -> Iterator[Implementation]:
    """Yield the implementations of a backend that are asked for, by operator.

    Args:
        loaded: the backend.
        implementation: full name of the one that is asked for; empty: all.
        operators: these alone; empty: all of the contract.

    Raises:
        UnknownNameError: no such implementation or operator; the nearest is named.
    """
    every = [(op, i) for op in ops.OPERATORS for i in candidates(loaded, op)]
    known = {full_name(i, loaded) for _, i in every}
    if implementation and implementation not in known:
        raise unknown(f"implementation of {loaded.name}", implementation, known)
    wanted = {ops.get(name).name for name in operators}
    for operator, found in every:
        if (not wanted or operator in wanted) and implementation in ("", full_name(found, loaded)):
            yield found


def scheduled(
    implementation: Implementation,
    full_name: str,
    mine: Sequence[Case],
    loaded: Loaded,
    probe: Probe,
    request: Request,
) -> Schedule:
    """Sort the cases of an operator into those that run and those that are left out."""
    everything = f"{implementation.operator}/*"
    if reason := cannot_run(implementation, loaded, probe, request.execution):
        return Schedule(
            implementation, full_name, (), ((everything, reason),) if mine or not request.only else ()
        )
    reasons = {case.id: left_out(case, implementation, loaded, request.chosen_profile) for case in mine}
    where = claims.target(probe, request.execution, loaded.backend.torch_device == ANY_DEVICE)
    interpreted = request.execution == "interpreted"  # elsewhere the profiles from standard on try pairs
    claimed = claims.claimed(implementation, where, request.chosen_profile, request.only, pairs=interpreted)
    return Schedule(
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
    """Say which library, or which version, an implementation lacks, or all that could be its part do; else nothing."""
    if implementation.name == composed.NAME:
        for part in ops.get(implementation.operator).parts:
            reasons = [lacking(other, loaded, probe) for other in candidates(loaded, part)]
            if reasons and all(reasons):
                return f"its part {part} cannot run: {reasons[0]}"
        return ""
    here = Target(
        facts=probe.facts, foreign=True, probed=loaded.backend.facts
    )  # a device's own facts are none
    reasons = [next(unmet(c.requires, here), "") for c in implementation.capabilities]
    return reasons[0] if reasons and all(reasons) else ""


def left_out(case: Case, implementation: Implementation, loaded: Loaded, profile: str) -> str:
    """Say why a case is left out, or return an empty string."""
    if implementation.name == composed.NAME:  # first: no other profile would run it
        missing = [part for part in part_specs(case.operator, case.spec) if not candidates(loaded, part)]
        if missing:
            return f"{loaded.name} does not implement its parts: {', '.join(missing)}"
    if profile in PROFILES and not case.runs_in(profile):
        return f"not in the {profile} profile; the {case.since} profile has it"
    return ""


def without(schedule: Schedule, known: Mapping[str, Verdict]) -> Schedule:
    """Return a schedule without the cases whose verdicts are known."""
    return replace(schedule, cases=tuple(c for c in schedule.cases if c.id not in known))


def batch(schedule: Schedule, loaded: Loaded, request: Request) -> Batch:
    """Return what the schedule's process is told."""
    return Batch(
        implementation=schedule.full_name,
        device="cpu" if on_host(loaded, request) else loaded.backend.torch_device,
        hooks=HOST if request.execution == "interpreted" else loaded.backend.device,
        cases=tuple(case.id for case in schedule.cases),
        seed=request.seed,
        limit=request.limit or LIMITS[request.execution],
        repeats=request.chosen_repeats,
        relations=request.chosen_relations,
        untimed=untimed(loaded, request),
        made=tuple(made for made in schedule.claims.made if made.id in {case.id for case in schedule.cases}),
    )


def share_out(whole: Batch, parts: int) -> list[Batch]:
    """Share a batch out among processes, every n-th case to each; the first times the operator.

    Args:
        whole: of one implementation.
        parts: at most so many.
    """
    parts = max(1, min(parts, len(whole.cases)))
    return [
        msgspec.structs.replace(
            whole,
            cases=whole.cases[i::parts],
            relations=-(-whole.relations // parts),
            untimed=whole.untimed or ("another process was to time it" if i else ""),
        )
        for i in range(parts)
    ]


def on_record(implementation: Implementation, loaded: Loaded) -> OnTrial:
    """Return what exactly an implementation is."""
    try:
        digest = digest_of(implementation, loaded)
    except PluginError:  # its cases fail by the same error, with a sentence
        digest = ""
    return OnTrial(
        operator=implementation.operator,
        implementation=full_name(implementation, loaded),
        version=implementation.version or loaded.backend.version,
        source_hash=digest,
        numerics=implementation.numerics,
        conforming=all(c.properties.tie_rule == "contract" for c in implementation.capabilities),
    )


def digest_of(implementation: Implementation, loaded: Loaded) -> str:
    """Return the hash of an implementation's sources; of a composition, also of all that could be a part of it.

    Who says that it was never run is a part of none: a name alone takes it, and a run of the suite names no part.

    Raises:
        PluginError: there is nothing to hash.
    """
    own = source_hash(loaded.backend, implementation)
    if implementation.name != composed.NAME:
        return own
    could = [i for part in ops.get(implementation.operator).parts for i in candidates(loaded, part)]
    parts = [i for i in could if not i.not_run]
    lines = (f"{i.operator} {i.name} {source_hash(loaded.backend, i)}" for i in parts)
    return hashlib.sha256("\n".join([own, *lines]).encode()).hexdigest()


def full_name(implementation: Implementation, loaded: Loaded) -> str:
    """Return the name by which an implementation is asked for."""
    return f"{loaded.name}.{implementation.name}"


def missing(loaded: Loaded, operators: Sequence[str]) -> tuple[str, ...]:
    """Return the operators that a backend has no implementation of, of those that are asked for; empty: of all."""
    wanted = {ops.get(name).name for name in operators} or {*ops.OPERATORS}
    return tuple(op for op in ops.OPERATORS if op in wanted and not candidates(loaded, op))


def operators_without_cases() -> list[str]:
    """Return the operators that no case covers: a fault of the suite."""
    return sorted(set(ops.OPERATORS) - {case.operator for case in cases.CASES.values()})
