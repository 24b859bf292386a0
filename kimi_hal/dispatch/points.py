"""Entry points: which plugins are installed, before any is loaded."""

from __future__ import annotations

import importlib.metadata
from importlib.metadata import EntryPoint, EntryPoints

GROUP = "kimi_hal"
#: The reference goes through the same door as every plugin, installed or not.
REFERENCE = EntryPoint(name="reference", value="kimi_hal.reference.plugin", group=GROUP)


def found() -> EntryPoints:
    """Return the installed plugins' entry points."""
    return importlib.metadata.entry_points(group=GROUP)


def installed() -> tuple[str, ...]:
    """Return the names of the installed plugins; nothing is loaded."""
    return tuple(sorted({point.name for point in found()}))


def distribution(point: EntryPoint) -> str:
    """Return the name and version of the distribution that brings a plugin; ``""`` if there is none."""
    return f"{point.dist.name} {point.dist.version}" if point.dist else ""


def duplicate(first: EntryPoint, second: EntryPoint) -> str:
    """Say that two distributions bring a plugin of one name."""
    where = [f"{distribution(p) or 'kimi-hal'} ({p.value})" for p in (first, second)]
    return f"two plugins have this name, {where[0]} and {where[1]}; uninstall one of them"


def requirement(name: str) -> str:
    """Say which kimi-hal the distribution of a plugin asks for; ``""`` if it does not say."""
    for point in found().select(name=name):
        for wish in (point.dist.requires or ()) if point.dist else ():
            if wish.startswith("kimi-hal"):
                return f"{distribution(point)} requires {wish}"
    return ""
