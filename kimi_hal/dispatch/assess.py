"""One implementation held against one request: every reason against it, or where and how it would run."""

from __future__ import annotations

from collections.abc import Iterator

from kimi_hal.dispatch import composed, matching, tuned_ranks
from kimi_hal.dispatch.candidate import Assessment
from kimi_hal.dispatch.contract import (
    ANY_DEVICE,
    Backend,
    Capability,
    Implementation,
    Preference,
    Probe,
)
from kimi_hal.dispatch.loader import Loaded, Registry, candidates
from kimi_hal.dispatch.matching import Target
from kimi_hal.dispatch.wish import REFERENCE, Request, Wish
from kimi_hal.ops.operator import OPERATORS, Operator


def assess(request: Request, wish: Wish, registry: Registry) -> list[Assessment]:
    """Hold every loaded implementation of the operator against the request: the asked backend's first."""
    order = sorted(registry.backends, key=lambda n: (n != wish.backend, n == REFERENCE, n))
    found = [
        _assess(request, wish, registry.backends[name], registry.probe(name), implementation)
        for name in order
        for implementation in candidates(registry.backends[name], request.op.name)
    ]
    decided = tuned_ranks.decision(request, wish, registry)
    return found if decided is None else [tuned_ranks.ranked(a, decided, wish) for a in found]


def _assess(request: Request, wish: Wish, loaded: Loaded, probe: Probe, item: Implementation) -> Assessment:
    full_name = f"{loaded.name}.{item.name}"
    named = wish.implementation == full_name
    execution, reasons = _execution(request, loaded, probe, item)
    target = _target(loaded.backend, probe, execution)
    capability, uncovered = _covering(request, item, target, named)
    admitted = named or set(item.numerics) <= set(request.spec.numerics)
    if not admitted:
        reasons.append(_rounds(item, request))
    if item.not_run and not named:
        reasons.append(f"it was not run: {item.not_run}; it is reachable by name only")
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
