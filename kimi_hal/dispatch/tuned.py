"""Tables of measurements: which implementation was fastest on a device, by operator, Spec and class of shapes.

A backend ships tables (``Backend.tables``), which are used where the device is theirs; ``kimi-hal bench --tune`` writes
one. ``KIMI_HAL_<BACKEND>_TUNE``, where the backend declares it, names another, or ``off``. Nothing is measured when
planning. A table ranks what fits; it makes nothing fit. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kimi_hal.dispatch import shapes
from kimi_hal.dispatch.contract import Backend, Probe
from kimi_hal.dispatch.shapes import Shape
from kimi_hal.dispatch.sources import package_files
from kimi_hal.errors import TableError
from kimi_hal.ops.spec import Limits, Spec
from kimi_hal.settings import prefix

SCHEMA = 1
OFF = "off"


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
        told = "".join(f" {name}={value}" for name, value in self.configuration.items())
        return f"{self.implementation}{told} {self.us:g} µs"


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


@dataclass(frozen=True)
class Decision:
    """The line of a table that ranks the candidates of a request."""

    table: Table
    number: int
    line: Line

    @property
    def place(self) -> str:
        """Return where it stands, as a person finds it."""
        return f"{self.table.label}, line {self.number} ({self.line.shape})"


@dataclass(frozen=True)
class Tables:
    """A backend's tables on this machine: the one that is used, and why each other is not."""

    used: Table | None = None
    unused: Mapping[str, str] = field(default_factory=dict)

    def decide(self, operator: str, spec: Spec, limits: Limits | None) -> Decision | None:
        """Return the line for a request, if there is one."""
        if self.used is None or limits is None:
            return None
        found = self.used.find(operator, spec, limits)
        return None if found is None else Decision(self.used, *found)


def variable(backend: str) -> str:
    """Return the variable that chooses a backend's table: ``"off"`` or a file."""
    return f"{prefix(backend)}TUNE"


def tables(backend: Backend, probe: Probe, chosen: str | None) -> Tables:
    """Return a backend's tables as this machine has them.

    Args:
        backend: whose.
        probe: what it found here.
        chosen: the value of its variable: ``None`` = what it ships, ``"off"`` = none, else a file.

    Raises:
        TableError: the chosen file cannot be read, is no table, or was measured on another device or version.
    """
    if chosen == OFF:
        return Tables()
    if chosen is not None:
        return Tables(_chosen(Path(chosen), backend, probe))
    used, unused = None, {}
    for path in package_files(backend, backend.tables):
        label = f"{path.parent.parent.name}/{path.parent.name}/{path.name}"
        try:
            table = read(path, label)
            why = unfit(table, backend, probe)
        except TableError as error:
            why = str(error)
        if why:
            unused[label] = why
        elif used is not None:
            unused[label] = f"{used.label} is for this device too"
        else:
            used = table
    return Tables(used, unused)


def _chosen(path: Path, backend: Backend, probe: Probe) -> Table:
    table = read(path, str(path))
    why = unfit(table, backend, probe)
    if why:
        raise TableError(
            f"{variable(backend.name)}={path}: {why}. `kimi-hal bench --tune FILE` measures here"
        )
    return table


def unfit(table: Table, backend: Backend, probe: Probe) -> str:
    """Say why a table says nothing about this machine, or return an empty string."""
    if table.backend != backend.name:
        return f"it ranks implementations of {table.backend}, not of {backend.name}"
    if table.version != backend.version:
        return f"it was measured with {table.backend} {table.version}, this is {backend.version}"
    if table.arch != probe.arch or table.device not in probe.names:
        here = f"{', '.join(probe.names) or 'no device'} ({probe.arch})" if probe.arch else "no device"
        return f"it was measured on {table.device} ({table.arch}), here is {here}"
    return ""


def read(path: Path, label: str) -> Table:
    """Read a table.

    Raises:
        TableError: it cannot be read, is no table, or is of another schema; says where and what.
    """
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TableError(f"{label} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise TableError(f"{label} is no JSON: {error}") from error
    try:
        if not isinstance(held, dict) or held["schema"] != SCHEMA:
            of = held.get("schema") if isinstance(held, dict) else None
            raise TableError(f"{label} is of schema {of!r}, this kimi-hal reads {SCHEMA}")
        texts = {name: _text(held, name) for name in ("backend", "version", "arch", "device", "measured")}
        return Table(label=label, **texts, lines=tuple(_lines(held["lines"], label)))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TableError(f"{label} is no table of measurements: {type(error).__name__}: {error}") from error


def _text(held: Mapping[str, Any], name: str) -> str:
    value = held[name]
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}, not a text")
    return value


def _lines(held: Sequence[Any], label: str) -> Iterator[Line]:
    for number, line in enumerate(held, 1):
        try:
            sizes = {name: int(line["shape"][name]) for name in ("rows", "rows_per_req", "length")}
            if min(sizes.values()) < 1:
                raise ValueError(f"sizes are 1 or more, got {sizes}")
            ranking = tuple(
                Entry(
                    str(e["implementation"]),
                    float(e["us"]),
                    {str(n): int(v) for n, v in e.get("configuration", {}).items()},
                    str(e.get("source", "")),
                )
                for e in line["ranking"]
            )
            yield Line(str(line["operator"]), dict(line["spec"]), Shape(**sizes), ranking)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise TableError(f"{label}, line {number}: {type(error).__name__}: {error}") from error


def text(table: Table) -> str:
    """Return a table as its file holds it: a line of the file for each line of the table."""
    head = {
        "schema": SCHEMA,
        "backend": table.backend,
        "version": table.version,
        "arch": table.arch,
        "device": table.device,
        "measured": table.measured,
    }
    lines = ",\n".join("    " + json.dumps(_line(line), ensure_ascii=False) for line in table.lines)
    body = json.dumps(head, indent=2, ensure_ascii=False)[:-2]
    held = f"\n{lines}\n  " if lines else ""
    return f'{body},\n  "lines": [{held}]\n}}\n'


def _line(line: Line) -> dict[str, Any]:
    return {
        "operator": line.operator,
        "spec": dict(line.spec),
        "shape": asdict(line.shape),
        "ranking": [
            {"implementation": e.implementation, "us": e.us}
            | ({"configuration": dict(e.configuration)} if e.configuration else {})
            | ({"source": e.source} if e.source else {})
            for e in line.ranking
        ],
    }
