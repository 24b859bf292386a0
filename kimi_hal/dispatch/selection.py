"""Choose the implementation of an operator for one Spec: by authority, then by capability, then by measure.

Authority, in this order: the argument ``implementation=``; ``KIMI_HAL_OPS``; ``KIMI_HAL_BACKEND``; ``auto``,
which asks the plugins' probes. Among a backend's implementations that cover the request, its own measured
preference decides, never the order of registration. Plugins are never ranked against each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kimi_hal.dispatch import composed, policy
from kimi_hal.dispatch.assess import assess
from kimi_hal.dispatch.candidate import Assessment, Candidate
from kimi_hal.dispatch.contract import ANY_DEVICE, Backend, Capability, Implementation, Probe
from kimi_hal.dispatch.loader import Registry
from kimi_hal.dispatch.tuned import told
from kimi_hal.dispatch.wish import REFERENCE, Request, Wish, wish
from kimi_hal.errors import SelectionError
from kimi_hal.log import log
from kimi_hal.ops.operator import Operator
from kimi_hal.ops.spec import Limits, Spec
from kimi_hal.settings import Settings


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
        fallback: it is the reference, taken because ``KIMI_HAL_FALLBACK`` admits it.
        configuration: what a table of measurements found best for it; empty: it chooses itself.
    """

    backend: Backend
    implementation: Implementation
    capability: Capability
    probe: Probe
    execution: str
    candidates: tuple[Candidate, ...]
    why: str
    conforming: bool = True
    fallback: bool = False
    configuration: Mapping[str, int] = field(default_factory=dict)

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
    if choice.fallback and op.name not in _WARNED:
        _WARNED.add(op.name)
        log.warning("%s runs the reference: %s", op.name, choice.why)
    return choice


#: Operators whose fallback was told of.
_WARNED: set[str] = set()


def decide(request: Request, registry: Registry) -> Choice:
    """Choose, or raise with every reason; ``select`` for a request and a registry."""
    asked = wish(request, registry)
    assessed = assess(request, asked, registry)
    chosen = _pick(request, asked, assessed) or _fallback(request, asked, assessed)
    if chosen is None:
        raise _refusal(request, asked, assessed, registry)
    return _choice(asked, chosen, assessed, registry)


def _pick(request: Request, asked: Wish, assessed: list[Assessment]) -> Assessment | None:
    """Return what fits and has the largest rank."""
    best = _best([a for a in assessed if a.loaded.name == asked.backend and not (a.bars or a.refusals)])
    if len(best) > 1:
        names = " and ".join(a.full_name for a in best)
        raise SelectionError(
            f"{request.op.name}: {names} have equal rank for this request, and order decides nothing. "
            f"Name one: KIMI_HAL_OPS={request.op.name}={best[0].full_name}"
        )
    return best[0] if best else None


def _fallback(request: Request, asked: Wish, assessed: list[Assessment]) -> Assessment | None:
    """Return the reference where ``KIMI_HAL_FALLBACK`` admits it, never for what was named by itself."""
    if request.settings.fallback != "reference" or asked.implementation is not None:
        return None
    best = _best(_reference(assessed))
    return best[0] if best else None


def _best(fits: list[Assessment]) -> list[Assessment]:
    """Return those of the largest rank; one kernel for a composite goes before its composition."""
    fits = [a for a in fits if a.implementation.name != composed.NAME] or fits
    top = max((a.rank for a in fits), default=None)
    return [a for a in fits if a.rank == top]


def _reference(assessed: list[Assessment]) -> list[Assessment]:
    return [a for a in assessed if a.loaded.name == REFERENCE and not a.refusals]


def _choice(asked: Wish, chosen: Assessment, assessed: list[Assessment], registry: Registry) -> Choice:
    assert chosen.capability is not None  # nothing is chosen that is not covered
    beaten = (f"{chosen.full_name} is preferred",)
    return Choice(
        backend=chosen.loaded.backend,
        implementation=chosen.implementation,
        capability=chosen.capability,
        probe=registry.probe(chosen.loaded.name),
        execution=chosen.execution,
        candidates=tuple(a.candidate(a is chosen, beaten) for a in assessed),
        why=_why(asked, chosen, assessed),
        conforming=chosen.conforming,
        fallback=bool(chosen.bars),
        configuration=chosen.entry.configuration if chosen.entry else {},
    )


def _why(asked: Wish, chosen: Assessment, assessed: list[Assessment]) -> str:
    """Say in one sentence who asked, what decided, and what is unusual about the choice."""
    parts = [asked.source]
    own = [a for a in assessed if a.loaded.name == asked.backend and a is not chosen and not a.bars]
    if chosen.bars:
        parts.append("KIMI_HAL_FALLBACK=reference admits the reference")
    else:
        parts += _preferred(chosen, [a for a in own if not a.refusals])
    parts += [f"not {a.full_name} ({', '.join(a.refusals)})" for a in own if a.refusals]
    if chosen.execution != "native":
        parts.append(f"it runs {chosen.execution}")
    if chosen.implementation.numerics:
        parts.append(f"it rounds beyond the contract ({', '.join(chosen.implementation.numerics)})")
    if not chosen.conforming:
        parts.append("it does not conform: its tie rule is not the contract's")
    if chosen.implementation.not_run:
        parts.append(f"it was not run: {chosen.implementation.not_run}")
    return "; ".join(parts)


def _preferred(chosen: Assessment, others: list[Assessment]) -> Iterable[str]:
    ranked = [a for a in others if a.implementation.name != composed.NAME]
    if chosen.entry is not None and chosen.preference is not None:
        behind = [f"{a.full_name} {a.entry.us:g} µs" if a.entry else a.full_name for a in ranked]
        first = chosen.preference.measured + told(chosen.entry.configuration, ", ")
        yield first + (f" before {', '.join(behind)}" if behind else "")
    elif ranked and chosen.preference is not None:
        measured = f" ({chosen.preference.measured})" if chosen.preference.measured else ""
        yield f"rank {chosen.preference.rank}{measured} before {', '.join(a.full_name for a in ranked)}"
    elif others and not ranked:
        yield "one kernel goes before its composition"


def _refusal(request: Request, asked: Wish, assessed: list[Assessment], registry: Registry) -> SelectionError:
    """Build the error: what was asked, every reason, what to type next."""
    name = request.op.name
    if asked.backend is None:
        return SelectionError(f"{name}: {asked.source}.{_advice(asked, assessed)}")
    own = [a for a in assessed if a.loaded.name == asked.backend and not a.bars]
    if not own:
        implements = ", ".join(sorted({i.operator for i in registry.backends[asked.backend].implementations}))
        return SelectionError(
            f"{name}: {asked.backend} does not implement it ({asked.source}); "
            f"it implements {implements or 'nothing'}.{_advice(asked, assessed)}"
        )
    elsewhere = _elsewhere(request, own[0], registry)
    if elsewhere:
        return SelectionError(f"{name}: {asked.source}, but {elsewhere}. {_instead(asked, own)}")
    who = asked.implementation or f"no implementation of {asked.backend}"
    verb = "does not cover" if asked.implementation else "covers"
    return SelectionError(
        f"{name}: {who} {verb} this request ({asked.source}).{_advice(asked, assessed)}",
        {a.full_name: a.refusals for a in own},
    )


def _elsewhere(request: Request, own: Assessment, registry: Registry) -> str:
    """Say why no kernel of this backend can run natively here, whatever it covers."""
    backend, probe = own.loaded.backend, registry.probe(own.loaded.name)
    if request.settings.execution != "native" or backend.torch_device == ANY_DEVICE:
        return ""
    if not probe.present:
        return f"there is no device: {probe.why}"
    if request.device_type == "cpu" != backend.torch_device:
        return f"it runs on {backend.torch_device} tensors, not cpu"
    return ""


def _instead(asked: Wish, own: list[Assessment]) -> str:
    """Return what to type where there is no device; a name goes before the backend's variable."""
    if any("interpreted" in a.implementation.execution for a in own):
        return "KIMI_HAL_EXECUTION=interpreted runs its kernels on the CPU"
    unnamed = "Without that name " if asked.implementation else ""
    return f"{unnamed}KIMI_HAL_BACKEND=reference runs the reference"


def _advice(asked: Wish, assessed: list[Assessment]) -> str:
    """Return what to type next; a named implementation never falls back."""
    named = asked.implementation is not None
    fitting = [a.full_name for a in assessed if not a.refusals and (named or a.loaded.name != REFERENCE)]
    if fitting:
        return f" These fit: {', '.join(fitting)}"
    if _reference(assessed):
        return " KIMI_HAL_FALLBACK=reference runs the reference"
    return ""
