"""A property: what must hold of functions that are no operator, whoever's copy of the core they are in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from textwrap import shorten
from types import ModuleType

#: Imports a module of the core, or of a copy of it, by its name inside the package.
Modules = Callable[[str], ModuleType]


@dataclass(frozen=True)
class Property:
    """One property.

    Args:
        id: ``"ownership/lengths"``; its area stands before the slash.
        check: raises where the property does not hold of the modules that it gets.
        input: what it is tried on.
    """

    id: str
    check: Callable[[Modules], None]
    input: str

    @property
    def area(self) -> str:
        """Return what the property is about."""
        return self.id.partition("/")[0]


PROPERTIES: dict[str, Property] = {}
#: Area -> what an ordinary use of it gives: a tensor, or anything that can be compared.
USES: dict[str, Callable[[Modules], object]] = {}


def holds(name: str, on: str) -> Callable[[Callable[[Modules], None]], Callable[[Modules], None]]:
    """Register the decorated function as a property.

    Args:
        name: its id.
        on: what it is tried on.
    """

    def register(check: Callable[[Modules], None]) -> Callable[[Modules], None]:
        assert name not in PROPERTIES, f"property {name} is registered twice"
        PROPERTIES[name] = Property(name, check, on)
        return check

    return register


def plain(area: str) -> Callable[[Callable[[Modules], object]], Callable[[Modules], object]]:
    """Register the decorated function as the ordinary use of an area, on which its mutants are right."""

    def register(use: Callable[[Modules], object]) -> Callable[[Modules], object]:
        assert area not in USES, f"area {area} has two ordinary uses"
        USES[area] = use
        return use

    return register


def raises(error: type[BaseException], call: Callable[[], object], *words: str) -> None:
    """Raise unless a call raises an error whose text holds some words."""
    try:
        result = call()
    except error as caught:
        for word in words:
            if word not in str(caught):
                raise AssertionError(f"{word!r} is not in the error {str(caught)!r}") from caught
        return
    raise AssertionError(f"got {shorten(repr(result), 120)}, expected {error.__name__}")


def violation(found: Property, modules: Modules) -> str:
    """Return how a property is violated, or an empty string."""
    try:
        found.check(modules)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever a wrong core raises violates the property
        return f"{type(error).__name__}: {error}".rstrip(": ")
    return ""


def expect(what: str, got: object, wanted: object) -> None:
    """Raise unless two values are equal; of lists the first entries that differ are named."""
    if got == wanted:
        return
    while isinstance(got, list) and isinstance(wanted, list) and len(got) == len(wanted):
        at = next(i for i, (one, other) in enumerate(zip(got, wanted, strict=True)) if one != other)
        what, got, wanted = f"{what}[{at}]", got[at], wanted[at]
    raise AssertionError(f"{what}: got {shorten(repr(got), 120)}, expected {shorten(repr(wanted), 120)}")
