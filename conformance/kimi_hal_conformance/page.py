"""A report as one HTML page that needs nothing beside itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from kimi_hal_conformance import files
from kimi_hal_conformance.compiling import table as compiling
from kimi_hal_conformance.levels import BELOW, REACHED, STOPPED, UNTESTED
from kimi_hal_conformance.plot import Plot, Row, Share
from kimi_hal_conformance.printable import legal
from kimi_hal_conformance.report import summary, worst
from kimi_hal_conformance.schema import Report, Tested
from kimi_hal_conformance.verdict import (
    AGAINST,
    FAILED,
    NOT_RUN,
    PASSED,
    REFUSED,
    WAIVED,
    Verdict,
)

TEMPLATE = "report.html.j2"
#: How a box of a level is marked, beside its colour.
MARKS = {REACHED: "✓", STOPPED: "✗", BELOW: "<", UNTESTED: "–"}


@dataclass(frozen=True)
class Section:
    """An implementation of an operator: what was tested and all that is said of it."""

    about: Tested
    verdicts: tuple[Verdict, ...]

    @property
    def status(self) -> str:
        """Return the one word for it: the worst that was launched, then what was not."""
        found = {FAILED if v.status in AGAINST else v.status for v in self.verdicts}
        return next((s for s in (FAILED, WAIVED, PASSED, REFUSED) if s in found), NOT_RUN)

    @property
    def counts(self) -> str:
        """Return how many verdicts have each status, in words."""
        statuses = [v.status for v in self.verdicts]
        return ", ".join(f"{statuses.count(s)} {words(s)}" for s in dict.fromkeys(statuses))

    @property
    def worst(self) -> str:
        """Return the largest share of a budget that any tensor used."""
        return worst(list(self.verdicts))

    @property
    def plot(self) -> Plot:
        """Return every compared tensor's errors, a row a tensor."""
        rows: dict[str, list[Share]] = defaultdict(list)
        for tensor, share in shares(self.verdicts):
            rows[tensor].append(share)
        return Plot(tuple(Row(tensor, tuple(found)) for tensor, found in rows.items()))


def write_html(report: Report, path: Path) -> None:
    """Write the page.

    Args:
        report: of any run, also of one that was read back.
        path: the file; its folder must exist.
    """
    files.write(path, render(report).encode())


def render(report: Report) -> str:
    """Return the page: the matrix, the plots, every verdict, and the command that replays each failure.

    It loads nothing: styles and drawings stand in it, and it has no script. What a report says is escaped.
    """
    parts = tuple(sections(report))
    template = environment().get_template(TEMPLATE)
    return template.render(
        report=report,
        summary=summary(report),
        columns=tuple(dict.fromkeys(s.about.name for s in parts)),
        matrix=matrix(parts),
        sections=parts,
        overview=overview(parts),
        compiled=tuple(compiling.rows(report)) if compiling.compiled(report) else (),
        headers=compiling.HEADERS,
        marks=MARKS,
        stand_ins=compiling.stand_ins(report),
        failures=tuple(v for v in report.verdicts if v.status in AGAINST),
    )


def environment() -> Environment:
    """Return what renders the page: everything is escaped, and a name that does not exist is an error."""
    made = Environment(
        loader=PackageLoader("kimi_hal_conformance"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_legal,
    )
    made.filters |= {"words": words, "worst": lambda verdict: worst([verdict])}
    return made


def _legal(value: Any) -> Any:
    # Markup is escaped already, and stays what it is.
    return legal(value) if type(value) is str else value


def sections(report: Report) -> Iterator[Section]:
    """Yield every implementation of every operator, as the report has them."""
    said: dict[tuple[str, str], list[Verdict]] = defaultdict(list)
    for verdict in report.verdicts:
        said[verdict.operator, verdict.implementation].append(verdict)
    for about in report.implementations:
        yield Section(about, tuple(said[about.operator, about.name]))


def matrix(parts: Iterable[Section]) -> dict[str, dict[str, Section]]:
    """Return the sections by operator and implementation."""
    found: dict[str, dict[str, Section]] = defaultdict(dict)
    for section in parts:
        found[section.about.operator][section.about.name] = section
    return dict(found)


def overview(parts: Iterable[Section]) -> Plot:
    """Return the worst error of each implementation of an operator that had a budget."""
    rows = []
    for section in parts:
        found = [share for _, share in shares(section.verdicts)]
        if found:
            label = f"{section.about.operator} {section.about.name}"
            rows.append(
                Row(label, (max(found, key=lambda share: (share.value is None, share.value or 0.0)),))
            )
    return Plot(tuple(rows))


def shares(verdicts: Iterable[Verdict]) -> Iterator[tuple[str, Share]]:
    """Yield each tensor with an error that a budget allows or not; a discrete result that is right has none."""
    for verdict in verdicts:
        for measure in verdict.measures:
            kinds = {"root mean square": measure.norm, "largest entry": measure.maximum}
            for kind, value in kinds.items():
                if not measure.exact or value is None:
                    size = "beyond any share" if value is None else f"{value:.3g}"
                    yield measure.tensor, Share(value, f"{verdict.case}, {measure.tensor}, {kind}: {size}")


def words(status: str) -> str:
    """Return a status as it is read."""
    return status.replace("_", " ")
