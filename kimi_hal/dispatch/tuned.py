"""A table of measurements: which implementation was fastest on a device, by operator, Spec and class of shapes.

A table ranks what fits; it makes nothing fit. Which one is used: ``tuned_tables.py``; its file: ``tuned_file.py``.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kimi_hal.dispatch import shapes
from kimi_hal.dispatch.shapes import Shape
from kimi_hal.ops.spec import Limits, Spec


def told(settings: Mapping[str, Any], before: str = " ") -> str:
    """Return settings as a person reads them, each ``name=value`` behind ``before``; empty where there are none."""
    return "".join(f"{before}{name}={value}" for name, value in settings.items())


@dataclass(frozen=True)
class Entry:
    """One measured candidate of a line.

    Args:
        implementation: its name, without the backend's.
        us: median microseconds of a call.
        configuration: what its builder is told, by name; empty: it chooses itself.
        source: the first digits of its source hash when it was measured.
    """

    implementation: str
    us: float
    configuration: Mapping[str, int] = field(default_factory=dict)
    source: str = ""

    def __str__(self) -> str:
        return f"{self.implementation}{told(self.configuration)} {self.us:g} µs"


@dataclass(frozen=True)
class Line:
    """What was measured for one operator, Spec and class of shapes; the fastest candidate first."""

    operator: str
    spec: Mapping[str, Any]
    shape: Shape
    ranking: tuple[Entry, ...]

    def about(self, operator: str, spec: Mapping[str, Any]) -> bool:
        """Tell whether it was measured for this operator and these decisive fields."""
        return self.operator == operator and dict(self.spec) == dict(spec)


@dataclass(frozen=True)
class Table:
    """One table.

    Args:
        label: the file, as a person finds it.
        backend: whose implementations it ranks.
        version: the backend's when it was measured.
        arch: the architecture.
        device: its name.
        measured: when, and with which versions of what.
        lines: in the file's order.
    """

    label: str
    backend: str
    version: str
    arch: str
    device: str
    measured: str
    lines: tuple[Line, ...]

    def find(self, operator: str, spec: Spec, limits: Limits) -> tuple[int, Line] | None:
        """Return the line of the nearest measured class and its number from 1, the larger class where two are near."""
        fields, wanted = shapes.decisive(operator, spec), shapes.shape(operator, spec, limits)
        found = [
            (distance, -line.shape.rows, -line.shape.length, number)
            for number, line in enumerate(self.lines, 1)
            if line.about(operator, fields) and (distance := wanted.distance(line.shape)) is not None
        ]
        if not found:
            return None
        number = min(found)[-1]
        return number, self.lines[number - 1]
