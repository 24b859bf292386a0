"""Choose the implementation of an operator for one Spec: by authority, then by capability, then by measure.

Authority, in this order: the argument ``implementation=``; ``KIMI_HAL_OPS``; ``KIMI_HAL_BACKEND``; ``auto``,
which asks the plugins' probes. Among a backend's implementations that cover the request, its own measured
preference decides, never the order of registration. Plugins are never ranked against each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kimi_hal.dispatch import policy
from kimi_hal.dispatch.candidate import COMPOSED, Assessment, Candidate, assess
from kimi_hal.dispatch.contract import Backend, Capability, Implementation, Probe
from kimi_hal.dispatch.loader import Registry
from kimi_hal.dispatch.wish import REFERENCE, Request, Wish, wish
from kimi_hal.errors import SelectionError
from kimi_hal.log import log
from kimi_hal.ops.operator import Operator
from kimi_hal.ops.spec import Limits, Spec
from kimi_hal.settings import Settings

FALLBACK = "KIMI_HAL_FALLBACK=reference runs the reference"


@dataclass(frozen=True)
class Choice:
    """The implementation that was chosen, and why.

    Args:
        backend: whose it is.
        implementation: what was chosen.
        capability: the first of its capabilities that covers the request.
        probe: what the backend found on this machine.
        execution: ``"native"``, ``"portable"`` or ``"interpreted"``.
        candidates: every implementation that was looked at, with all reasons against it.
        why: one sentence.
        conforming: its tie rule is the contract's.
    """

    backend: Backend
    implementation: Implementation
    capability: Capability
    probe: Probe
    execution: str
    candidates: tuple[Candidate, ...]
    why: str
    conforming: bool = True

    @property
    def full_name(self) -> str:
        """Return ``backend.implementation``."""
        return f"{self.backend.name}.{self.implementation.name}"


def select(
    op: Operator,
    spec: Spec,
    limits: Limits | None,
    *,
    device: str,
    implementation: str | None,
    settings: Settings,
    registry: Registry | None = None,
) -> Choice:
    """Choose an implementation, or raise with every reason.

    Args:
        op: the operator.
        spec: its Spec.
        limits: the sizes; ``None`` = unknown, then what a capability says of sizes is not met.
        device: a torch device; only its type counts.
        implementation: a full name that overrules every setting, or ``None``.
        settings: the variables, ``policy.settings()``.
        registry: the loaded backends; ``None`` = those of ``settings``.

    Raises:
        SelectionError: nothing fits; two accelerators or two preferences have equal claims.
        UnknownNameError: no such implementation; the nearest is named.
        PluginError: the plugin that is asked for cannot be used.
        FrozenError: the settings are not those that ``hal.freeze()`` saw.
    """
    request = Request(op, spec, limits, device, implementation, settings)
    choice = decide(request, registry or policy.registry(settings))
    log.info("%s: %s, %s", op.name, choice.full_name, choice.why)
    return choice


def decide(request: Request, registry: Registry) -> Choice:
    """Choose, or raise with every reason; ``select`` for a request and a registry."""
    asked = wish(request, registry)
    assessed = assess(request, asked, registry)
    chosen = _pick(request, asked, assessed) or _fallback(request, asked, assessed)
    if chosen is None:
        raise _refusal(request, asked, assessed, registry)
    return _choice(request, asked, chosen, assessed, registry)


def _pick(request: Request, asked: Wish, assessed: list[Assessment]) -> Assessment | None:
    """Return what fits and has the largest rank; a fused kernel goes before its composition."""
    fits = [a for a in assessed if not a.bars and not a.refusals and a.loaded.name == asked.backend]
    fused = [a for a in fits if a.implementation.name != COMPOSED]
    best = _best(fused or fits)
    if len(best) > 1:
        names = " and ".join(a.full_name for a in best)
        raise SelectionError(
            f"{request.op.name}: {names} have equal rank for this Spec, and order decides nothing. "
            f"Name one: KIMI_HAL_OPS={request.op.name}={best[0].full_name}"
        )
    return best[0] if best else None


def _best(fits: list[Assessment]) -> list[Assessment]:
    top = max((a.rank for a in fits), default=None)
    return [a for a in fits if a.rank == top]


_WARNED: set[str] = set()


def _fallback(request: Request, asked: Wish, assessed: list[Assessment]) -> Assessment | None:
    """Return the reference where ``KIMI_HAL_FALLBACK`` admits it, with one warning an operator."""
    if request.settings.fallback != "reference" or asked.implementation is not None:
        return None
    fits = [a for a in assessed if a.loaded.name == REFERENCE and not a.refusals]
    fused = [a for a in fits if a.implementation.name != COMPOSED]
    best = _best(fused or fits)
    if not best:
        return None
    if request.op.name not in _WARNED:
        _WARNED.add(request.op.name)
        log.warning("%s runs the reference: %s", request.op.name, _nothing_fits(request, asked, assessed))
    return best[0]


def _nothing_fits(request: Request, asked: Wish, assessed: list[Assessment]) -> str:
    if asked.backend is None:
        return f"auto found no device for {request.device!r} ({asked.found})"
    lines = [f"{a.full_name}: {'; '.join(a.refusals)}" for a in assessed if a.loaded.name == asked.backend]
    return f"no implementation of {asked.backend} fits ({' / '.join(lines) or 'it has none'})"


def _choice(
    request: Request, asked: Wish, chosen: Assessment, assessed: list[Assessment], registry: Registry
) -> Choice:
    assert chosen.capability is not None  # nothing is chosen that is not covered
    return Choice(
        backend=chosen.loaded.backend,
        implementation=chosen.implementation,
        capability=chosen.capability,
        probe=registry.probe(chosen.loaded.name),
        execution=chosen.execution,
        candidates=tuple(a.candidate(a is chosen) for a in assessed),
        why=_why(request, asked, chosen, assessed),
        conforming=chosen.conforming,
    )


def _why(request: Request, asked: Wish, chosen: Assessment, assessed: list[Assessment]) -> str:
    """Say in one sentence who asked, what decided, and what is unusual about the choice."""
    if chosen.bars:
        return f"KIMI_HAL_FALLBACK=reference, since {_nothing_fits(request, asked, assessed)}"
    parts = [f"{asked.source} ({asked.found})" if asked.found else asked.source]
    siblings = [a for a in assessed if a.loaded is chosen.loaded and a is not chosen and not a.bars]
    parts += _decided(chosen, [a for a in siblings if not a.refusals])
    parts += [f"not {a.full_name}: {'; '.join(a.refusals)}" for a in siblings if a.refusals]
    if chosen.execution != "native":
        parts.append(f"it runs {chosen.execution}")
    if chosen.implementation.numerics:
        parts.append(f"it rounds beyond the contract: {', '.join(chosen.implementation.numerics)}")
    if not chosen.conforming:
        parts.append("it does not conform: its tie rule is not the contract's")
    return ", ".join(parts)


def _decided(chosen: Assessment, others: list[Assessment]) -> Iterable[str]:
    if not others:
        return
    if all(a.implementation.name == COMPOSED for a in others):
        yield "one kernel before its composition"
    elif chosen.preference is not None:
        measured = f" ({chosen.preference.measured})" if chosen.preference.measured else ""
        yield f"rank {chosen.preference.rank}{measured}"


def _refusal(request: Request, asked: Wish, assessed: list[Assessment], registry: Registry) -> SelectionError:
    """Build the error: what was asked, every reason, what is possible."""
    name = request.op.name
    if asked.backend is None:
        return SelectionError(
            f"{name}: auto found no accelerator for device {request.device!r} ({asked.found}). "
            f"KIMI_HAL_BACKEND=reference or KIMI_HAL_FALLBACK=reference runs the reference"
        )
    own = [a for a in assessed if a.loaded.name == asked.backend and not a.bars]
    if not own:
        implements = ", ".join(sorted({i.operator for i in registry.backends[asked.backend].implementations}))
        return SelectionError(
            f"{name}: {asked.backend} does not implement it ({asked.source}). "
            f"It implements: {implements or 'nothing'}. {FALLBACK}"
        )
    probe = registry.probe(asked.backend)
    if not probe.present and request.settings.execution == "native":
        return SelectionError(f"{name}: {asked.source}, but no device: {probe.why}. {_instead(own)}")
    fitting = [a.full_name for a in assessed if not a.refusals and a.loaded.name != REFERENCE]
    possible = f"These fit: {', '.join(fitting)}" if fitting else FALLBACK
    return SelectionError(
        f"{name}: {asked.source} does not cover this request. {possible}",
        {a.full_name: a.refusals for a in own},
    )


def _instead(own: list[Assessment]) -> str:
    if any("interpreted" in a.implementation.execution for a in own):
        return "KIMI_HAL_EXECUTION=interpreted runs its kernels on the CPU"
    return "KIMI_HAL_BACKEND=reference runs the reference"
