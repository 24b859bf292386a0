"""Measure every candidate of operators, Specs and classes of shapes on this device, and make a table of it."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kimi_hal.dispatch import composed, planning, policy, shapes
from kimi_hal.dispatch.assess import assess
from kimi_hal.dispatch.candidate import Assessment
from kimi_hal.dispatch.explain import default_device
from kimi_hal.dispatch.hookspecs import DeviceHooks
from kimi_hal.dispatch.loader import Loaded, Registry, resolve
from kimi_hal.dispatch.matching import distribution
from kimi_hal.dispatch.shapes import Shape, decisive
from kimi_hal.dispatch.tuned import Entry, Line, Table, told
from kimi_hal.dispatch.wish import Request, of_backend, wish
from kimi_hal.errors import KimiHalError, TableError
from kimi_hal.ops.operator import get
from kimi_hal.ops.spec import Spec
from kimi_hal.settings import Settings
from kimi_hal.tuning import operands
from kimi_hal.tuning.measure import Flush, timed

#: Candidates that are this near to the fastest count as equally fast: the backend's own order then decides.
NEAR = 1.03
#: Bytes of the largest operands, as a share of the device's free memory, that a class may take.
SHARE = 0.5

Say = Callable[[str], None]


@dataclass(frozen=True)
class Question:
    """What is measured.

    Args:
        specs: by operator.
        shapes: classes, by operator.
        budget: seconds of device time for each candidate.
        only: full names; empty: every candidate.
        without: full names that are left out.
        choices: only where there is a choice: several candidates, or one with configurations.
    """

    specs: dict[str, Sequence[Spec]]
    shapes: dict[str, Sequence[Shape]]
    budget: float = 0.02
    only: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    choices: bool = False

    def asks(self, full_name: str) -> bool:
        """Tell whether an implementation is to be measured."""
        return full_name not in self.without and (not self.only or full_name in self.only)


class Bench:
    """A question to the backend that the settings lead to, on its device.

    Args:
        question: what is measured.
        settings: the variables.
        registry: the loaded backends.
        device: a torch device; ``None`` = where the settings lead.
        say: told each line as it is found, and what is left out and why.

    Raises:
        TableError: there is no backend, or none that runs here as an engine runs it.
    """

    def __init__(
        self, question: Question, settings: Settings, registry: Registry, device: str | None, say: Say
    ) -> None:
        self.question, self.settings, self.registry, self.say = question, settings, registry, say
        self.device = device or default_device(settings, registry)
        asked = of_backend(settings, self.device, registry)
        if asked.backend is None:
            raise TableError(f"nothing to measure: {asked.source}")
        self.backend: Loaded = registry.get(asked.backend)
        self.probe = registry.probe(asked.backend)
        if not self.probe.present or settings.execution != "native":
            where = self.probe.why or f"KIMI_HAL_EXECUTION={settings.execution} is not how an engine runs"
            raise TableError(f"nothing to measure on {self.backend.name}: {where}")
        self.hooks: DeviceHooks = resolve(self.backend.backend.device)()
        self.flush = Flush(self.device)

    def tables(self, label: str) -> Iterator[Table]:
        """Measure, and yield the table as it grows, line by line; the last one is whole."""
        table = Table(
            label=label,
            backend=self.backend.name,
            version=self.backend.backend.version,
            arch=self.probe.arch,
            device=next(iter(self.probe.names), "present"),
            measured=self.conditions(),
            lines=(),
        )
        yield table
        for line in self.lines():
            table = dataclasses.replace(table, lines=(*table.lines, line))
            yield table

    def conditions(self) -> str:
        """Return when and with which versions of what."""
        day = datetime.datetime.now(datetime.UTC).date().isoformat()
        required = {n for i in self.backend.implementations for c in i.capabilities for n in c.requires}
        libraries = {name: found for name in required if (found := distribution(name)) is not None}
        versions = {**self.hooks.versions(), **libraries, **self.probe.facts}
        return ", ".join((day, *(f"{name} {version}" for name, version in sorted(versions.items()))))

    def lines(self) -> Iterator[Line]:
        """Measure each class of each Spec of each operator."""
        for operator, specs in self.question.specs.items():
            for spec in specs:
                for sizes in self.question.shapes[operator]:
                    line = self.line(operator, spec, sizes)
                    if line is not None:
                        yield line

    def line(self, operator: str, spec: Spec, sizes: Shape) -> Line | None:
        """Measure the candidates of one class; None where none runs."""
        what = f"{operator}{told(decisive(operator, spec))}, {sizes}"
        if operands.size(operator, spec, sizes) > SHARE * self.hooks.memory()[0]:
            self.say(f"{what}: left out, too large for this device")
            return None
        limits = shapes.limits(operator, spec, sizes)
        if shapes.shape(operator, spec, limits) != sizes:
            self.say(f"{what}: left out, not a class of this Spec")
            return None
        found = [a for a in self.candidates(operator, spec, limits) if self.question.asks(a.full_name)]
        if not found:
            self.say(f"{what}: nothing fits")
            return None
        if self.question.choices and len(found) == 1 and not found[0].implementation.configurations:
            self.say(f"{what}: left out, {found[0].full_name} alone fits")
            return None
        work = operands.make(operator, spec, sizes, self.device)
        entries = [entry for a in found for entry in self.entries(a, spec, work)]
        if not entries:
            return None
        ranking = ranked(entries, {a.implementation.name: a.rank for a in found})
        self.say(f"{what}: {', '.join(map(str, ranking))}")
        return Line(operator, decisive(operator, spec), sizes, ranking)

    def candidates(self, operator: str, spec: Spec, limits: Any) -> list[Assessment]:
        """Return the implementations that fit, those that round beyond the contract included."""
        own = self.backend.of(operator)
        numerics = tuple(sorted({name for i in own for name in i.numerics}))
        admitting = dataclasses.replace(spec, numerics=numerics)
        settings = dataclasses.replace(self.settings, backend=self.backend.name, ops=())
        request = Request(get(operator), admitting, limits, self.device, None, settings)
        found = assess(request, wish(request, self.registry), self.registry)
        return [
            a
            for a in found
            if a.loaded is self.backend and not a.refusals and a.implementation.name != composed.NAME
        ]

    def entries(self, found: Assessment, spec: Spec, work: operands.Work) -> Iterator[Entry]:
        """Time a candidate in its own configuration and in each that it names; what fails is told and left out."""
        where = found.implementation.configurations
        named = resolve(where)(spec, work.limits, self.probe.arch) if where else ()
        source = policy.source_hash(found.loaded.backend, found.implementation)[:12]
        for configuration in ({}, *named):
            wanted = planning.Wanted(
                op=get(found.implementation.operator),
                spec=spec,
                limits=work.limits,
                device=self.device,
                group=None,
                implementation=found.full_name,
                pair=None,
                settings=self.settings,
                registry=self.registry,
                configuration=configuration,
            )
            try:
                us = timed(wanted, work, self.hooks, self.question.budget, self.flush)
            except (KimiHalError, RuntimeError) as error:
                self.say(f"  {found.full_name}: {type(error).__name__}: {str(error).splitlines()[0]}")
                continue
            yield Entry(found.implementation.name, round(us, 2), dict(configuration), source)


def ranked(entries: Sequence[Entry], ranks: dict[str, float]) -> tuple[Entry, ...]:
    """Return the best configuration of each implementation, the fastest first.

    Those within ``NEAR`` of the fastest stand in the order of their own ranks, a configuration of the builder's own
    choice before another.
    """
    best: dict[str, Entry] = {}
    for entry in entries:
        kept = best.get(entry.implementation)
        if kept is None or entry.us * (NEAR if not kept.configuration else 1.0) < kept.us:
            best[entry.implementation] = entry
    bound = NEAR * min(entry.us for entry in best.values())
    order = sorted(best.values(), key=lambda e: e.us)
    near = sorted((e for e in order if e.us <= bound), key=lambda e: -ranks.get(e.implementation, 0.0))
    return (*near, *(e for e in order if e.us > bound))
