"""One implementation held against one request: every reason against it, or where and how it would run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from kimi_hal.dispatch import composed, matching
from kimi_hal.dispatch.contract import Backend, Capability, Implementation, Preference, Probe, Split
from kimi_hal.dispatch.loader import Loaded, Registry, candidates
from kimi_hal.dispatch.matching import Target
from kimi_hal.dispatch.tuned import Entry
from kimi_hal.dispatch.tuned_tables import Decision
from kimi_hal.dispatch.wish import REFERENCE, Request, Wish
from kimi_hal.ops.operator import OPERATORS, Operator

#: Rank of the fastest candidate of a table's line.
TABLE = 1 << 30
#: ``Backend.torch_device`` of code that runs wherever torch does.
ANY_DEVICE = "*"


@dataclass(frozen=True)
class Candidate:
    """One line of an explanation.

    Args:
        full_name: ``backend.implementation``.
        refusals: every reason why it was not taken; empty for what fits.
        chosen: it was taken.
        execution: how it would run.
        rank: its largest preference that matches, ``None`` if none does.
        measured: where that rank comes from.
        numerics: classes of rounding beyond the contract.
        conforming: its tie rule is the contract's.
        split: which compute unit does what, by architecture.
    """

    full_name: str
    refusals: tuple[str, ...]
    chosen: bool
    execution: str = "native"
    rank: int | None = None
    measured: str = ""
    numerics: tuple[str, ...] = ()
    conforming: bool = True
    split: tuple[Split, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        split = {arch: dict(item.parts) for item in self.split for arch in item.arch}
        own = asdict(replace(self, split=()))
        return own | {"refusals": list(self.refusals), "numerics": list(self.numerics), "split": split}


@dataclass(frozen=True)
class Assessment:
    """What is known of one implementation for one request.

    Args:
        loaded: its backend.
        implementation: it.
        capability: the first of its capabilities that covers the request, or ``None``.
        execution: how it would run.
        bars: what is asked for is something else.
        refusals: what it does not cover, or lacks here.
        preference: the one with the largest rank that matches, or ``None``.
        entry: what a table of measurements says of it, or ``None``.
    """

    loaded: Loaded
    implementation: Implementation
    capability: Capability | None
    execution: str
    bars: tuple[str, ...]
    refusals: tuple[str, ...]
    preference: Preference | None
    entry: Entry | None = None

    @property
    def full_name(self) -> str:
        """Return ``backend.implementation``."""
        return f"{self.loaded.name}.{self.implementation.name}"

    @property
    def rank(self) -> float:
        """Return the rank that decides; below every number where no preference matches."""
        return self.preference.rank if self.preference else -float("inf")

    @property
    def conforming(self) -> bool:
        """Tell whether the tie rule is the contract's."""
        return self.capability is None or self.capability.properties.tie_rule == "contract"

    def candidate(self, chosen: bool = False, beaten: tuple[str, ...] = ()) -> Candidate:
        """Return the line of an explanation; ``beaten`` says what was preferred to one that fits."""
        return Candidate(
            full_name=self.full_name,
            refusals=() if chosen else (*self.bars, *self.refusals) or beaten,
            chosen=chosen,
            execution=self.execution,
            rank=self.preference.rank if self.preference else None,
            measured=self.preference.measured if self.preference else "",
            numerics=self.implementation.numerics,
            conforming=self.conforming,
            split=self.implementation.split,
        )


def assess(request: Request, wish: Wish, registry: Registry) -> list[Assessment]:
    """Hold every loaded implementation of the operator against the request: the asked backend's first."""
    order = sorted(registry.backends, key=lambda n: (n != wish.backend, n == REFERENCE, n))
    found = [
        _assess(request, wish, registry.backends[name], registry.probe(name), implementation)
        for name in order
        for implementation in candidates(registry.backends[name], request.op.name)
    ]
    decision = measured(request, wish, registry)
    return found if decision is None else [_ranked(a, decision, wish) for a in found]


def measured(request: Request, wish: Wish, registry: Registry) -> Decision | None:
    """Return the line of the asked backend's table that is about a request, where it runs natively."""
    if (
        wish.backend is None
        or request.settings.execution != "native"
        or not registry.probe(wish.backend).present
    ):
        return None
    return registry.tables(wish.backend).decide(request.op.name, request.spec, request.limits)


def _ranked(found: Assessment, decision: Decision, wish: Wish) -> Assessment:
    """Put what a table has measured before everything else, the fastest first."""
    ranking = [e.implementation for e in decision.line.ranking]
    if found.loaded.name != wish.backend or found.implementation.name not in ranking:
        return found
    place = ranking.index(found.implementation.name)
    entry = decision.line.ranking[place]
    preference = Preference(rank=TABLE - place, measured=f"{decision.place}: {entry.us:g} µs")
    return replace(found, preference=preference, entry=entry)


def _assess(request: Request, wish: Wish, loaded: Loaded, probe: Probe, item: Implementation) -> Assessment:
    full_name = f"{loaded.name}.{item.name}"
    named = wish.implementation == full_name
    execution, reasons = _execution(request, loaded, probe, item)
    target = _target(loaded.backend, probe, execution)
    capability, uncovered = _covering(request, item, target, named)
    admitted = named or set(item.numerics) <= set(request.spec.numerics)
    if not admitted:
        reasons.append(_rounds(item, request))
    if request.implementation is None:
        reasons += _fused(request, item)
    return Assessment(
        loaded=loaded,
        implementation=item,
        capability=capability,
        execution=execution,
        bars=tuple(_bars(wish, loaded.name, full_name)),
        refusals=(*reasons, *uncovered),
        preference=_preference(request, item, target),
    )


def _bars(wish: Wish, backend: str, full_name: str) -> Iterator[str]:
    if wish.implementation is not None and wish.implementation != full_name:
        yield f"{wish.source} names another"
    elif wish.backend is None and backend == REFERENCE:
        yield "auto takes no reference on an accelerator; KIMI_HAL_FALLBACK=reference admits it"
    elif wish.backend is not None and wish.backend != backend:
        yield f"auto took {wish.backend}" if wish.auto else f"{wish.source} names another"


def _execution(request: Request, loaded: Loaded, probe: Probe, item: Implementation) -> tuple[str, list[str]]:
    """Return how an implementation would run, and why it cannot."""
    if loaded.backend.torch_device == ANY_DEVICE:
        return "native", []
    mode = request.settings.execution
    against = list(_absent(request, loaded, probe))
    if mode == "interpreted":
        against = [] if request.device_type == "cpu" else [_interpreter(request)]
    elif mode == "portable" and against:
        against = []
    else:
        mode = "native"  # portable code on its own device is native
    if mode not in item.execution:
        against.insert(0, _otherwise(item, mode))
    return mode, against


def _otherwise(item: Implementation, mode: str) -> str:
    """Say how an implementation runs that does not run in the way that is asked for; compiling is no way to run."""
    ways = [way for way in item.execution if way != "compile_only"]
    return f"it runs {' or '.join(ways)} only, not {mode}" if ways else f"it is compiled only, not run {mode}"


def _absent(request: Request, loaded: Loaded, probe: Probe) -> Iterator[str]:
    if not probe.present:
        yield f"no device: {probe.why}"
    if loaded.backend.torch_device != request.device_type:
        yield f"it runs on {loaded.backend.torch_device} tensors, not {request.device_type}"


def _interpreter(request: Request) -> str:
    return f"KIMI_HAL_EXECUTION=interpreted runs on the CPU; plan with device='cpu', not {request.device!r}"


def _target(backend: Backend, probe: Probe, execution: str) -> Target:
    foreign = execution != "native" or not probe.present
    return Target(
        arch="" if foreign else probe.arch, facts=probe.facts, foreign=foreign, probed=backend.facts
    )


def _covering(
    request: Request, item: Implementation, target: Target, named: bool
) -> tuple[Capability | None, list[str]]:
    """Return the first capability that covers the request, or the reasons against each."""
    against: list[list[str]] = []
    for capability in item.capabilities:
        found = list(matching.refusals(request.op, request.spec, request.limits, capability, target))
        found += _policy(request, capability, named)
        if not found:
            return capability, []
        against.append(found)
    if len(against) == 1:
        return None, against[0]
    total = len(against)
    return None, [f"[{i} of {total}] {'; '.join(found)}" for i, found in enumerate(against, 1)]


def _policy(request: Request, capability: Capability, named: bool) -> Iterator[str]:
    if request.settings.batch_invariant and not capability.properties.batch_invariant:
        yield "KIMI_HAL_BATCH_INVARIANT=1, and it does not declare batch_invariant"
    if capability.properties.tie_rule != "contract" and not named:
        yield "its tie rule is not the contract's; it is reachable by name only"


def _rounds(item: Implementation, request: Request) -> str:
    beyond = sorted(set(item.numerics) - set(request.spec.numerics))
    return f"it rounds beyond the contract ({', '.join(beyond)}); Spec.numerics or its name admits it"


def _fused(request: Request, item: Implementation) -> Iterator[str]:
    """Yield the parts that ``KIMI_HAL_OPS`` names and that a fused kernel would not run."""
    if item.name == composed.NAME:
        return
    for part in sorted(_parts(request.op)):
        full_name = request.settings.override(part)
        if full_name is not None:
            yield f"KIMI_HAL_OPS={part}={full_name} names a part that it would not run"


def _parts(op: Operator) -> set[str]:
    """Return the operators that a composite is made of, theirs included."""
    found: set[str] = set()
    for part in op.parts:
        found |= {part, *(_parts(OPERATORS[part]) if part in OPERATORS else ())}
    return found


def _preference(request: Request, item: Implementation, target: Target) -> Preference | None:
    matches = [p for p in item.preferences if matching.prefers(p, request.spec, request.limits, target)]
    return max(matches, key=lambda p: p.rank, default=None)
