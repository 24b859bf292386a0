"""Say what would be chosen and every reason why each other candidate would not, as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kimi_hal.dispatch import composed, policy
from kimi_hal.dispatch.assess import assess
from kimi_hal.dispatch.candidate import Candidate
from kimi_hal.dispatch.loader import Registry
from kimi_hal.dispatch.selection import Choice, decide
from kimi_hal.dispatch.wish import REFERENCE, Request, Wish, wish
from kimi_hal.errors import SelectionError
from kimi_hal.ops.composites import part_specs
from kimi_hal.ops.operator import get
from kimi_hal.ops.spec import Limits, Spec
from kimi_hal.settings import Settings

#: What an explanation cannot know of what it names.
UNBUILT = "not built: a plan imports its kernels, and says what they lack"


@dataclass(frozen=True)
class Explanation:
    """The answer of ``explain``.

    Args:
        operator: its name.
        spec: the Spec's fields.
        device: the torch device.
        chosen: full name, or ``None`` if nothing fits.
        execution: how it would run; ``""`` if nothing fits.
        why: one sentence: why it was chosen, or the error that a plan would raise.
        candidates: every implementation of every loaded backend, with all reasons against it.
        failures: plugins that could not be used, and why.
        built: a plan was made of it; else its kernels were not imported.
    """

    operator: str
    spec: dict[str, Any]
    device: str
    chosen: str | None
    execution: str
    why: str
    candidates: tuple[Candidate, ...]
    failures: dict[str, str]
    built: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return {
            "operator": self.operator,
            "spec": self.spec,
            "device": self.device,
            "chosen": self.chosen,
            "execution": self.execution,
            "why": self.why,
            "candidates": [c.to_dict() for c in self.candidates],
            "failures": self.failures,
        }

    def __str__(self) -> str:
        head = f"{self.operator} on {self.device}: {self.chosen or 'nothing fits'}"
        lines = [head, f"  why: {_brief(self.why, self.candidates)}"]
        lines += [f"  {UNBUILT}"] if self.chosen and not self.built else []
        lines += [line for c in self.candidates for line in (_line(c), *_split(c))]
        lines += [f"  plugin {name}: {why}" for name, why in self.failures.items()]
        return "\n".join(lines)


def explain(
    operator: str,
    spec: Spec,
    limits: Limits | None = None,
    *,
    device: str | None = None,
    implementation: str | None = None,
    settings: Settings | None = None,
    registry: Registry | None = None,
) -> Explanation:
    """Return what ``plan`` would choose, without building it; a refusal is an answer, not an error.

    A composition is chosen where something is for each of its parts. A library that a kernel's module imports and that
    is not there is found by a plan alone.

    Args:
        operator: its name.
        spec: its Spec.
        limits: the sizes, or ``None``.
        device: a torch device; ``None`` = that of the backend that is asked for or found, else the CPU.
        implementation: as in ``plan``.
        settings: the variables; ``None`` = those of this process.
        registry: the loaded backends; ``None`` = those of ``settings``.

    Raises:
        UnknownNameError: no such operator, backend or implementation; the nearest is named.
        SettingsError: an unknown or ill-formed variable.
        PluginError: a plugin asked for by name cannot be used.
    """
    op = get(operator)
    settings = settings or policy.settings()
    registry = registry or policy.registry(settings)
    device = device or default_device(settings, registry)
    request = Request(op, spec, limits, device, implementation, settings)
    chosen, execution = None, ""
    try:
        choice = decide(request, registry)
    except SelectionError as error:
        why, candidates = _said(error), _all(request, registry)
    else:
        why, candidates = choice.why, choice.candidates
        lacking = _lacking(request, choice, registry)
        if lacking:
            why, candidates = _said(next(iter(lacking.values()))), _without(choice, lacking)
        else:
            chosen, execution = choice.full_name, choice.execution
    failures = {name: failure.message for name, failure in sorted(registry.failures.items())}
    return Explanation(operator, spec.to_dict(), device, chosen, execution, why, candidates, failures)


def _lacking(request: Request, choice: Choice, registry: Registry) -> dict[str, SelectionError]:
    """Return the parts of a composition that no implementation of its backend covers, each with a plan's own error."""
    if choice.implementation.name != composed.NAME:
        return {}
    name, settings = choice.backend.name, dataclasses.replace(request.settings, backend=choice.backend.name)
    found = {}
    for part in part_specs(request.op.name, request.spec, request.limits).values():
        limits = part.limits or request.limits
        asked = Request(get(part.operator), part.spec, limits, request.device, None, settings)
        try:
            decide(asked, registry)
        except SelectionError as error:
            found[part.operator] = composed.needs(request.op, name, part.operator, error)
    return found


def _without(choice: Choice, lacking: Mapping[str, SelectionError]) -> tuple[Candidate, ...]:
    """Return the candidates of a choice that cannot be planned: it is refused for its parts."""
    refusals = (f"nothing fits for its parts: {', '.join(lacking)}",)
    return tuple(
        dataclasses.replace(c, chosen=False, refusals=refusals) if c.chosen else c for c in choice.candidates
    )


def _said(error: SelectionError) -> str:
    return str(error).partition("\n")[0]


def _brief(why: str, candidates: tuple[Candidate, ...]) -> str:
    """Return the sentence without the reasons against others, which stand in lines of their own."""
    for other in candidates:
        why = why.replace(f"not {other.full_name} ({', '.join(other.refusals)})", f"not {other.full_name}")
    return why


def _all(request: Request, registry: Registry) -> tuple[Candidate, ...]:
    """Return every candidate where nothing was chosen, also where ``auto`` could not decide."""
    try:
        asked = wish(request, registry)
    except SelectionError:
        asked = Wish("auto", None, auto=True)
    return tuple(a.candidate() for a in assess(request, asked, registry))


def default_device(settings: Settings, registry: Registry) -> str:
    """Return the torch device type that the settings lead to."""
    if settings.execution == "interpreted":
        return "cpu"
    names = [settings.backend] if settings.backend != "auto" else sorted(registry.backends)
    for name in names:
        device = registry.get(name).backend.torch_device
        if name != REFERENCE and (settings.backend != "auto" or registry.probe(name).present):
            return device
    return "cpu"


def _line(candidate: Candidate) -> str:
    if candidate.chosen:
        return f"  {candidate.full_name}: chosen"
    return f"  {candidate.full_name}: {'; '.join(candidate.refusals) or 'fits'}"


def _split(candidate: Candidate) -> list[str]:
    """Return a line for each way in which compute units share the work."""
    lines = []
    for item in candidate.split:
        where = "on any" if item.arch == ("*",) else f"on {', '.join(item.arch)}"
        lines.append(f"    {where}: " + "; ".join(f"{unit} {part}" for unit, part in item.parts.items()))
    return lines
