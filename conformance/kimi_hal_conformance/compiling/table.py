"""A compile-only report as rows: every kernel for every target, and every operator that has none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from kimi_hal import ops
from kimi_hal_conformance.compiling.order import ALL, PREFIX
from kimi_hal_conformance.schema import Report
from kimi_hal_conformance.verdict import Verdict

#: Spilled: bytes a thread in memory for want of registers; shared: on-chip memory of a program.
HEADERS = (
    "family",
    "operator",
    "by",
    "kernel",
    "target",
    "kB",
    "registers",
    "spilled",
    "shared kB",
    "status",
)
#: Columns of numbers.
NUMBERS = ("kB", "registers", "spilled", "shared kB")
NOT_IMPLEMENTED = "not implemented"
STYLES = {"passed": "", "not_run": "dim", "failed": "red", "crashed": "red", "hung": "red"}


@dataclass(frozen=True)
class Row:
    """One line: a kernel for a target, or an operator without one."""

    cells: tuple[str, ...]
    status: str
    verdict: Verdict | None = None


def table(report: Report) -> Table:
    """Return the rows for a terminal; a family's name stands at its first row."""
    made = Table(
        box=SIMPLE, caption="spilled: bytes a thread in memory for want of registers", padding=(0, 1, 0, 0)
    )
    for header in HEADERS:
        made.add_column(header, justify="right" if header in NUMBERS else "left", no_wrap=True)
    last = ""
    for row in rows(report):
        family, *rest = row.cells
        made.add_row("" if family == last else family, *map(Text, rest), style=STYLES[row.status])
        last = family
    return made


def rows(report: Report) -> Iterator[Row]:
    """Yield the rows by family and operator; what is not implemented has one too."""
    said: dict[str, list[Verdict]] = {operator: [] for operator in ops.OPERATORS}
    for verdict in report.verdicts:
        said[verdict.operator].append(verdict)
    for operator, verdicts in said.items():
        family = ops.get(operator).family
        if operator in report.not_implemented:
            yield Row((family, operator, "", NOT_IMPLEMENTED, *[""] * 6), "not_run")
        yield from (_row(family, verdict) for verdict in verdicts)


def _row(family: str, verdict: Verdict) -> Row:
    _, operator, kernel, target = verdict.case.split("/", 3)
    by = verdict.implementation.partition(".")[2]
    status = verdict.status.replace("_", " ")
    if kernel == ALL:
        words = ("all" if verdict.status != "not_run" else "none", target, *[""] * 4, status)
        return Row((family, operator, by, *words), verdict.status, verdict)
    code = verdict.code
    numbers = [""] * 4
    if code is not None:
        numbers = [_kilo(code.size), _count(code.registers), _count(code.spilled), _kilo(code.shared)]
    return Row((family, operator, by, kernel, target, *numbers, status), verdict.status, verdict)


def _kilo(size: int | None) -> str:
    return "?" if size is None else f"{size / 1024:.1f}"


def _count(number: int | None) -> str:
    return "?" if number is None else str(number)


def stand_ins(report: Report) -> dict[str, str]:
    """Return the targets whose code is not the device's own, with the reason."""
    found = {}
    for verdict in report.verdicts:
        if verdict.code is not None and verdict.code.stand_in:
            found[verdict.case.rpartition("/")[2]] = verdict.code.stand_in
    return found


def compiled(report: Report) -> bool:
    """Tell whether a report is of compile-only mode."""
    return any(v.case.startswith(f"{PREFIX}/") for v in report.verdicts)
