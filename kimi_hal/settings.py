"""The ``KIMI_HAL_*`` variables as one frozen object, from which everything that depends on them is decided.

An unknown name or value is an error that names the nearest legal one, and every problem is told at once.
``kimi_hal.triton`` alone reads a variable by itself, since Triton must know before it is imported whether it
is to interpret.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any

from kimi_hal.errors import SettingsError, nearest

PREFIX = "KIMI_HAL_"
FALLBACKS = ("error", "reference")
EXECUTIONS = ("native", "portable", "interpreted")
#: Digits of N in ``shadow:N``: Python refuses to read thousands of them.
DIGITS = 18
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

#: Names that a cluster injects for a service called ``kimi-hal`` or ``kimi-hal-…``; none of ours.
INJECTED = ("*_SERVICE_HOST", "*_SERVICE_PORT*", "*_PORT", "*_PORT_*")

#: Variables that an earlier version read -> what replaces them. A plugin brings its own table.
REMOVED: dict[str, str] = {}

Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Settings:
    """What the variables say, checked. Every field has the default of an unset variable.

    Args:
        backend: ``KIMI_HAL_BACKEND``: ``"auto"``, ``"reference"`` or a plugin's name.
        ops: ``KIMI_HAL_OPS`` as (operator, full implementation name) pairs, sorted.
        fallback: ``KIMI_HAL_FALLBACK``: ``"error"`` or ``"reference"``.
        execution: ``KIMI_HAL_EXECUTION``: ``"native"``, ``"portable"`` or ``"interpreted"``.
        batch_invariant: ``KIMI_HAL_BATCH_INVARIANT``: only implementations that declare it.
        check: ``KIMI_HAL_CHECK``: ``"off"``, ``"args"`` or ``"shadow"``.
        shadow: N of ``shadow:N``: the reference runs on one call in N; 0 unless ``check="shadow"``.
        log: ``KIMI_HAL_LOG``: a level of ``logging``; ``""`` leaves the logger as the engine configured it.
        plugins: variables under an installed plugin's prefix, as (name, value) pairs, sorted.
    """

    backend: str = "auto"
    ops: Pairs = ()
    fallback: str = "error"
    execution: str = "native"
    batch_invariant: bool = False
    check: str = "off"
    shadow: int = 0
    log: str = ""
    plugins: Pairs = ()

    @classmethod
    def from_env(
        cls, environ: Mapping[str, str] | None = None, plugins: Iterable[str] | None = None
    ) -> Settings:
        """Read the variables.

        Args:
            environ: where they stand; ``None`` = ``os.environ``. An empty value counts as unset.
            plugins: names of installed plugins; ``None`` = ask the installed distributions. A variable
                under a plugin's prefix is kept here and compared with what the plugin declares when that
                plugin is loaded.

        Raises:
            SettingsError: unknown names and illegal values, all of them together.
        """
        ours = variables(os.environ if environ is None else environ)
        names = sorted(set(_installed() if plugins is None else plugins) | {"reference"})
        problems: list[str] = []
        values: dict[str, Any] = {}
        for name, variable in VARIABLES.items():
            if name in ours:
                try:
                    values |= variable(ours.pop(name), names)
                except SettingsError as error:
                    problems.append(f"{name}: {error}")
        own = {n: ours.pop(n) for n in list(ours) if owner(n, names)}
        problems += _unknown_names(ours, names)
        if problems:
            raise SettingsError("\n".join(problems))
        return cls(**values, plugins=tuple(sorted(own.items())))

    def override(self, operator: str) -> str | None:
        """Return the full implementation name that ``KIMI_HAL_OPS`` gives this operator, or ``None``."""
        return dict(self.ops).get(operator)

    def variables(self) -> dict[str, str]:
        """Return variable -> value, in the variables' own spelling, defaults left out."""
        default = Settings()
        texts = {
            "KIMI_HAL_BACKEND": self.backend,
            "KIMI_HAL_OPS": ",".join(f"{op}={name}" for op, name in self.ops),
            "KIMI_HAL_FALLBACK": self.fallback,
            "KIMI_HAL_EXECUTION": self.execution,
            "KIMI_HAL_BATCH_INVARIANT": str(int(self.batch_invariant)),
            "KIMI_HAL_CHECK": f"shadow:{self.shadow}" if self.check == "shadow" else self.check,
            "KIMI_HAL_LOG": self.log,
        }
        changed = {f.name for f in fields(self) if getattr(self, f.name) != getattr(default, f.name)}
        return {n: t for n, t in texts.items() if FIELD[n] in changed} | dict(self.plugins)


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the set ``KIMI_HAL_*`` variables of an environment, white space around values removed."""
    return {n: v.strip() for n, v in environ.items() if n.startswith(PREFIX) and v.strip()}


def prefix(plugin: str) -> str:
    """Return the beginning of a plugin's own variables: ``"acme"`` has ``"KIMI_HAL_ACME_"``."""
    return f"{PREFIX}{plugin.upper()}_"


def owner(variable: str, plugins: Iterable[str]) -> str | None:
    """Return the plugin under whose prefix a variable stands; the longest prefix wins."""
    owners = [name for name in plugins if variable.startswith(prefix(name))]
    return max(owners, key=len, default=None)


def injected(variable: str) -> bool:
    """Tell whether a cluster injects this name for a service of ours."""
    return any(fnmatchcase(variable, pattern) for pattern in INJECTED)


def choose(value: str, legal: Iterable[str], kind: str = "value") -> str:
    """Return the value if it is legal, else raise with the nearest and all of them."""
    legal = tuple(legal)
    if value not in legal:
        raise SettingsError(f"unknown {kind} {value!r}{_near(value, legal)} Possible: {', '.join(legal)}")
    return value


def _near(value: str, legal: Iterable[str]) -> str:
    return nearest(value, legal) or "."


def _installed() -> tuple[str, ...]:
    from kimi_hal.dispatch.points import installed

    return installed()


def _unknown_names(ours: Mapping[str, str], plugins: list[str]) -> Iterator[str]:
    known = [*VARIABLES, *(prefix(p) + "*" for p in plugins if p != "reference")]
    for name in sorted(ours):
        if name in REMOVED:
            yield f"{name} was removed: {REMOVED[name]}"
        elif not injected(name):
            yield f"unknown variable {name}{_near(name, VARIABLES)} Known: {', '.join(known)}"


def _backend(value: str, plugins: list[str]) -> dict[str, Any]:
    return {"backend": choose(value, ("auto", *plugins), "backend")}


def _ops(value: str, plugins: list[str]) -> dict[str, Any]:
    pairs: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in value.split(","))):
        operator, full_name = _override(item, plugins)
        if operator in pairs:
            raise SettingsError(f"{operator} is named twice: {pairs[operator]} and {full_name}")
        pairs[operator] = full_name
    return {"ops": tuple(sorted(pairs.items()))}


def _override(item: str, plugins: list[str]) -> tuple[str, str]:
    from kimi_hal.ops import OPERATORS

    operator, equals, full_name = (part.strip() for part in item.partition("="))
    backend, dot, implementation = full_name.partition(".")
    if not (operator and equals and backend and dot and implementation):
        raise SettingsError(f"{item!r} is not of the form operator=backend.implementation")
    choose(operator, sorted(OPERATORS), "operator")
    choose(backend, plugins, "backend")
    return operator, full_name


def _check(value: str, plugins: list[str]) -> dict[str, Any]:
    mode, colon, count = value.partition(":")
    if mode == "shadow" and colon:
        if not (count.isascii() and count.isdecimal() and count.strip("0")):
            raise SettingsError(f"shadow:{count} needs a whole number of calls, 1 or more: shadow:100")
        if len(count) > DIGITS:
            raise SettingsError(f"shadow: a number of {len(count)} digits; at most {DIGITS}: shadow:100")
        return {"check": "shadow", "shadow": int(count)}
    if value == "shadow":
        raise SettingsError("shadow needs the number of calls of which one is checked: shadow:100")
    try:
        return {"check": choose(value, ("off", "args"))}
    except SettingsError:
        hint = _near(value, ("off", "args", "shadow:N"))
        raise SettingsError(f"unknown value {value!r}{hint} Possible: off, args, shadow:N") from None


def _one_of(field: str, legal: tuple[str, ...]) -> Parser:
    return lambda value, plugins: {field: choose(value, legal)}


def _flag(field: str) -> Parser:
    return lambda value, plugins: {field: choose(value, ("0", "1")) == "1"}


def _log(value: str, plugins: list[str]) -> dict[str, Any]:
    return {"log": choose(value.upper(), LEVELS)}


#: (value, plugin names) -> Settings fields
Parser = Callable[[str, list[str]], dict[str, Any]]

VARIABLES: dict[str, Parser] = {
    "KIMI_HAL_BACKEND": _backend,
    "KIMI_HAL_OPS": _ops,
    "KIMI_HAL_FALLBACK": _one_of("fallback", FALLBACKS),
    "KIMI_HAL_EXECUTION": _one_of("execution", EXECUTIONS),
    "KIMI_HAL_BATCH_INVARIANT": _flag("batch_invariant"),
    "KIMI_HAL_CHECK": _check,
    "KIMI_HAL_LOG": _log,
}

FIELD = {name: name.removeprefix(PREFIX).lower() for name in VARIABLES}
