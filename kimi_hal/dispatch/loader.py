"""Find plugins, load them one by one, and keep what goes wrong with its traceback.

A plugin is an entry point of the group ``kimi_hal`` whose name is its backend's name. Only what
``KIMI_HAL_BACKEND`` and ``KIMI_HAL_OPS`` name is loaded; ``auto`` loads all. Loading imports neither torch
nor a driver: a backend's parts are strings, resolved when they are needed.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from typing import Any

from kimi_hal.dispatch import hooks, points, tuned_tables, validation
from kimi_hal.dispatch.contract import Backend, Implementation, Probe
from kimi_hal.dispatch.failure import BrokenError, Failure, attempt, require, warn
from kimi_hal.dispatch.tuned_tables import Tables
from kimi_hal.errors import PluginError, SettingsError, UnknownNameError, nearest, unknown
from kimi_hal.settings import Settings, injected, owner


@dataclass
class Loaded:
    """A plugin that is usable: its Backend, its implementations, and its probe, run once."""

    backend: Backend
    implementations: tuple[Implementation, ...]
    distribution: str = ""
    _probe: Probe | None = None
    _tables: Tables | None = None

    @property
    def name(self) -> str:
        """Return the backend's name."""
        return self.backend.name

    def of(self, operator: str) -> tuple[Implementation, ...]:
        """Return the implementations of one operator, in declared order."""
        return tuple(i for i in self.implementations if i.operator == operator)


@dataclass
class Registry:
    """The backends of this process.

    Attributes:
        settings: what was asked for.
        points: every installed entry point by name, loaded or not.
        backends: the loaded ones.
        failures: those that could not be loaded, validated or probed.
        strict: raise for what is asked for by name; else only keep the failure.
    """

    settings: Settings
    points: dict[str, EntryPoint]
    strict: bool = True
    backends: dict[str, Loaded] = field(default_factory=dict)
    failures: dict[str, Failure] = field(default_factory=dict)

    def get(self, name: str) -> Loaded:
        """Return a backend that is asked for by name, loading it now if it was not.

        Raises:
            UnknownNameError: no such plugin is installed; the nearest is named.
            PluginError: it is installed and cannot be used.
        """
        if name not in self.points:
            raise unknown("backend", name, self.points)
        if name not in self.backends and name not in self.failures:
            self._load(name)
            self._load(points.REFERENCE.name)  # which covers the formats that the plugin brought
        if name in self.failures:
            raise self.failures[name].error()
        return self.backends[name]

    def probe(self, name: str) -> Probe:
        """Return what a loaded backend found on this machine; asked once, then kept.

        A probe that raises makes the backend absent, and says why; ``failures`` keeps the traceback.
        """
        loaded = self.backends[name]
        if loaded._probe is None:
            try:
                loaded._probe = _probe(loaded.backend)
            except BrokenError as broken:
                self.failures[name] = broken.failure
                loaded._probe = Probe(present=False, why=broken.failure.message)
                if self.strict and not self.named(name):
                    warn(broken.failure)
        if self.named(name) and name in self.failures:
            raise self.failures[name].error()
        return loaded._probe

    def tables(self, name: str) -> Tables:
        """Return a loaded backend's tables of measurements as they are on this machine; read once, then kept.

        Raises:
            TableError: the one that its variable names cannot be used here.
        """
        loaded = self.backends[name]
        if loaded._tables is None:
            chosen = self.variables(name).get(tuned_tables.variable(name))
            loaded._tables = tuned_tables.tables(loaded.backend, self.probe(name), chosen)
        return loaded._tables

    def named(self, name: str) -> bool:
        """Tell whether the settings ask for this backend by name."""
        return self.strict and name in _named(self.settings)

    def variables(self, name: str) -> dict[str, str]:
        """Return the set variables that a backend declares as its own."""
        declared = self.backends[name].backend.variables
        return {n: v for n, v in self.settings.plugins if n in declared}

    def _load(self, name: str) -> None:
        try:
            self.backends[name] = _loaded(self.points[name])
        except BrokenError as broken:
            self.failures[name] = broken.failure


def load(settings: Settings, *, strict: bool = True) -> Registry:
    """Load what the settings name; under ``auto``, everything.

    Args:
        settings: which plugins are wanted.
        strict: raise for what is named, for breaches of the plugin contract and for settings that name
            nothing, and warn about the rest. ``doctor`` and ``list`` pass False and print
            ``Registry.failures`` and ``problems_of_settings``.

    Raises:
        PluginError: a plugin asked for by name cannot be used; two plugins have one name; a hook is wrong.
        SettingsError: ``KIMI_HAL_OPS`` names an implementation, or the environment a plugin's variable, that
            does not exist.
    """
    registry = Registry(settings, {}, strict)
    for point in (points.REFERENCE, *points.found()):
        first = registry.points.setdefault(point.name, point)
        if first is not point:
            message = points.duplicate(first, point)
            registry.failures[point.name] = Failure(point.name, message, breach=True)
    for name in _wanted(registry):
        if name not in registry.failures:
            registry._load(name)
    if strict:
        _judge(registry)
    return registry


def resolve(name: str) -> Any:
    """Import what ``"module:attribute"`` names.

    Raises:
        UnknownNameError: the text has another form, or the module has no such attribute.
        ImportError: whatever importing the module raises comes through.
    """
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise UnknownNameError(f"{name!r} is not of the form 'module:function'")
    module = importlib.import_module(module_name)
    try:
        return getattr(module, attribute)
    except AttributeError:
        public = [n for n in vars(module) if not n.startswith("_")]
        hint = nearest(attribute, public) or "."
        raise UnknownNameError(f"module {module_name} has no {attribute!r}{hint}") from None


def _named(settings: Settings) -> set[str]:
    overrides = {full_name.partition(".")[0] for _, full_name in settings.ops}
    return overrides | ({settings.backend} - {"auto"})


def _wanted(registry: Registry) -> Iterable[str]:
    if registry.settings.backend == "auto":
        names = set(registry.points)
    else:
        names = (_named(registry.settings) | {points.REFERENCE.name}) & set(registry.points)
    # The reference comes last: it covers the formats that plugins bring.
    return sorted(names, key=lambda n: (n == points.REFERENCE.name, n))


def _judge(registry: Registry) -> None:
    """Raise for what may not be passed over; warn about the rest, once a plugin."""
    for name in sorted(_named(registry.settings)):
        registry.get(name)
    for name in _wanted(registry):
        failure = registry.failures.get(name)
        if failure is not None and failure.breach:
            raise failure.error()
        if failure is not None:
            warn(failure)
    problems = list(problems_of_settings(registry))
    if problems:
        raise SettingsError("\n".join(problems))


def _loaded(point: EntryPoint) -> Loaded:
    """Load one entry point: import it, ask its hook, check every declaration."""
    name = point.name
    require(name, validation.name_problems(name))
    module = attempt(name, f"importing {point.value}", point.load)
    require(name, hooks.problems(module), breach=True)
    backend = attempt(name, f"{hooks.HOOK}()", lambda: hooks.ask(module, name))
    require(name, validation.backend_problems(name, backend))
    if backend.formats is not None:
        attempt(name, backend.formats, lambda: _register_formats(backend.formats))
    declared = attempt(name, backend.implementations, lambda: resolve(backend.implementations))
    require(name, validation.implementations_problems(declared))
    return Loaded(backend, declared, points.distribution(point))


def _register_formats(where: str) -> None:
    from kimi_hal import formats

    for fmt in resolve(where):
        formats.register(fmt)


def _probe(backend: Backend) -> Probe:
    probe: Probe = attempt(backend.name, backend.probe, lambda: resolve(backend.probe)())
    require(backend.name, (f"{backend.probe}: {p}" for p in validation.probe_problems(probe)))
    return probe


def problems_of_settings(registry: Registry) -> Iterator[str]:
    """Yield variables that no loaded plugin declares, and overrides that no plugin implements."""
    for variable, _ in registry.settings.plugins:
        loaded = registry.backends.get(owner(variable, registry.points) or "")
        if loaded is not None and variable not in loaded.backend.variables:
            yield from _undeclared(variable, loaded)
    for operator, full_name in registry.settings.ops:
        try:
            find(registry, operator, full_name)
        except (UnknownNameError, PluginError) as error:
            yield f"KIMI_HAL_OPS: {error}"


def _undeclared(variable: str, loaded: Loaded) -> Iterator[str]:
    removed, declared = loaded.backend.removed_variables, loaded.backend.variables
    if variable in removed:
        yield f"{variable} was removed: {removed[variable]}"
    elif not injected(variable):
        known = ", ".join(sorted(declared)) or "none"
        hint = nearest(variable, declared) or "."
        yield f"unknown variable {variable}{hint} Declared by {loaded.name}: {known}"


def find(registry: Registry, operator: str, full_name: str) -> tuple[Loaded, Implementation]:
    """Return the backend and the implementation that a full name stands for.

    Raises:
        UnknownNameError: no such backend or implementation, or it implements another operator.
        PluginError: its plugin cannot be used.
    """
    backend, dot, short = full_name.partition(".")
    if not (backend and dot and short):
        raise UnknownNameError(f"{full_name!r} is not of the form backend.implementation")
    loaded = registry.get(backend)
    known = {f"{backend}.{i.name}": i for i in candidates(loaded, operator)}
    if full_name in known:
        return loaded, known[full_name]
    others = sorted({i.operator for i in loaded.implementations if i.name == short})
    if others:
        has = ", ".join(sorted(known)) or "none"
        raise UnknownNameError(f"{full_name} implements {', '.join(others)}, not {operator}. Known: {has}")
    raise unknown(f"implementation of {operator}", full_name, known)


def candidates(loaded: Loaded, operator: str) -> tuple[Implementation, ...]:
    """Return a backend's implementations of an operator; a composite can also be made of its parts."""
    from kimi_hal.ops import get

    own = loaded.of(operator)
    op = get(operator)
    if not op.composite:
        return own
    from kimi_hal.dispatch.composed import implementation

    return (*own, implementation(op))
