"""Properties of the core that no operator's case can show: who owns what, which kernel is chosen, and why."""

from __future__ import annotations

import importlib

from kimi_hal_conformance.properties.property import PROPERTIES, USES, Property

AREAS = (
    "ownership",
    "offsets",
    "exchange",
    "formats",
    "cache",
    "operands",
    "selection",
    "settings",
)

for _area in AREAS:
    importlib.import_module(f"kimi_hal_conformance.properties.{_area}")

__all__ = ["AREAS", "PROPERTIES", "USES", "Property"]
