"""Which settings hold in this process, and the registry that goes with them. ``freeze()`` pins both."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from kimi_hal.dispatch import loader, points, sources
from kimi_hal.dispatch.contract import Backend, Implementation
from kimi_hal.dispatch.loader import Registry
from kimi_hal.errors import FrozenError
from kimi_hal.log import configure
from kimi_hal.settings import Settings, variables


@dataclass(frozen=True)
class Frozen:
    """What ``freeze()`` saw, and the hashes of sources that a plan has needed since."""

    variables: dict[str, str]
    settings: Settings
    registry: Registry
    hashes: dict[tuple[str, str, str], str] = field(default_factory=dict)


_frozen: Frozen | None = None


def freeze() -> None:
    """Pin the settings, the plugins and what their probes found, for every later plan.

    An engine calls it once its model is loaded. Later plans obey the same policy; a ``KIMI_HAL_*`` variable
    that was changed since is an error at the next plan. A second call changes nothing.

    Raises:
        FrozenError: a variable has changed since the first call.
        PluginError: what is asked for by name cannot be used.
    """
    global _frozen
    now = settings()
    if _frozen is None:
        pinned = registry(now)
        for name in pinned.backends:
            pinned.probe(name)
        _frozen = Frozen(variables(os.environ), now, pinned)


def settings() -> Settings:
    """Read the variables of this process.

    Raises:
        SettingsError: unknown names and illegal values.
        FrozenError: a variable differs from what ``freeze()`` saw; names it, the old and the new value.
    """
    if _frozen is not None:
        _compare(_frozen.variables, variables(os.environ))
        return _frozen.settings
    now = Settings.from_env()
    configure(now.log)
    return now


def registry(wanted: Settings) -> Registry:
    """Return the loaded backends for these settings; loaded once for equal settings and plugins.

    Raises:
        FrozenError: these are not the settings that were frozen.
        PluginError: what is asked for by name cannot be used.
    """
    if _frozen is not None:
        _compare(_frozen.settings.variables(), wanted.variables())
        return _frozen.registry
    return _loaded(wanted, tuple((p.name, p.value) for p in points.found()))


def source_hash(backend: Backend, implementation: Implementation) -> str:
    """Return the hash of an implementation's sources; after ``freeze()`` that of its first plan.

    Finding and reading its files costs more than the rest of a plan, and what a process has imported does not
    change with a file.

    Raises:
        PluginError: as ``sources.source_hash``.
    """
    if _frozen is None:
        return sources.source_hash(backend, implementation)
    name = (backend.name, implementation.operator, implementation.name)
    if name not in _frozen.hashes:
        _frozen.hashes[name] = sources.source_hash(backend, implementation)
    return _frozen.hashes[name]


def thaw() -> None:
    """Forget the frozen policy and every loaded plugin: for tests, and for a notebook after an install."""
    global _frozen
    _frozen = None
    _loaded.cache_clear()


@lru_cache(maxsize=8)
def _loaded(wanted: Settings, installed: tuple[tuple[str, str], ...]) -> Registry:
    return loader.load(wanted)


def _compare(old: Mapping[str, str], new: Mapping[str, str]) -> None:
    changes = [
        f"{name} was {_text(old.get(name))}, now {_text(new.get(name))}"
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    ]
    if changes:
        raise FrozenError(f"changed after hal.freeze(): {'; '.join(changes)}. Set it before that call.")


def _text(value: str | None) -> str:
    return "not set" if value is None else repr(value)
