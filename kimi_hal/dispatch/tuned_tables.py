"""Which table of measurements a backend uses on this machine.

A backend ships tables (``Backend.tables``), which are used where the device is theirs; ``kimi-hal bench --tune`` writes
one. ``KIMI_HAL_<BACKEND>_TUNE``, where the backend declares it, names another, or ``off``. Nothing is measured when
planning. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kimi_hal.dispatch.contract import Backend, Probe
from kimi_hal.dispatch.sources import package_files
from kimi_hal.dispatch.tuned import Line, Table
from kimi_hal.dispatch.tuned_file import read
from kimi_hal.errors import TableError
from kimi_hal.ops.spec import Limits, Spec
from kimi_hal.settings import prefix

OFF = "off"


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
    try:
        table = read(path, str(path))
    except TableError as error:
        raise TableError(f"{variable(backend.name)}: {error}") from error
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
