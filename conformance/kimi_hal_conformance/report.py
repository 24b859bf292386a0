"""A report as a table, as JSON and as JUnit XML."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import defaultdict
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from kimi_hal_conformance.verdict import CRASHED, FAILED, HUNG, NOT_RUN, PASSED, REFUSED, Report, Verdict

STYLE = {PASSED: "green", NOT_RUN: "dim", REFUSED: "yellow", FAILED: "red", CRASHED: "red", HUNG: "red"}


def print_table(report: Report, console: Console) -> None:
    """Print one line an implementation, then every problem with the command that replays it."""
    table = Table("operator", "implementation", "cases", "passed", "worst error / budget", "seconds")
    groups: dict[tuple[str, str], list[Verdict]] = defaultdict(list)
    for verdict in report.verdicts:
        groups[verdict.operator, verdict.implementation].append(verdict)
    for (operator, implementation), verdicts in sorted(groups.items()):
        passed = sum(v.status == PASSED for v in verdicts)
        style = "green" if passed == len(verdicts) else "red"
        seconds = f"{sum(v.seconds for v in verdicts):.1f}"
        table.add_row(
            operator, implementation, str(len(verdicts)), f"[{style}]{passed}", worst(verdicts), seconds
        )
    console.print(table)
    for verdict in report.verdicts:
        if verdict.status in (PASSED, NOT_RUN):
            continue
        console.print(f"[{STYLE[verdict.status]}]{verdict.status}[/] {verdict.implementation} {verdict.case}")
        for problem in verdict.problems:
            console.print(f"    {problem}", markup=False, highlight=False)
        console.print(f"    replay: {verdict.replay}", markup=False, highlight=False)
    console.print(summary(report))


def worst(verdicts: list[Verdict]) -> str:
    """Return the largest fraction of a budget that any compared tensor used; discrete results say exact."""
    measures = [m for v in verdicts for m in v.measures]
    real = [max(m.norm, m.maximum) for m in measures if not m.exact]
    if not real:
        return "exact" if measures else "–"
    return f"{max(real):.2f}"


def summary(report: Report) -> str:
    """Return the closing line."""
    counts = ", ".join(f"{n} {status}" for status, n in report.counts().items() if n)
    word = "conforms" if report.ok else "does NOT conform"
    return f"{report.backend} ({report.execution}) {word}: {counts or 'no case ran'}"


def write_json(report: Report, path: Path) -> None:
    """Write the report in its versioned schema."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")


def write_junit(report: Report, path: Path) -> None:
    """Write JUnit XML: a suite an implementation, a testcase a case."""
    root = ET.Element("testsuites", name=f"kimi-hal conformance {report.backend}")
    groups: dict[str, list[Verdict]] = defaultdict(list)
    for verdict in report.verdicts:
        groups[verdict.implementation].append(verdict)
    for implementation, verdicts in groups.items():
        failed = [v for v in verdicts if v.status in (FAILED, REFUSED)]
        errors = [v for v in verdicts if v.status in (CRASHED, HUNG)]
        counts = {"tests": len(verdicts), "failures": len(failed), "errors": len(errors)}
        suite = ET.SubElement(
            root, "testsuite", name=implementation, **{k: str(n) for k, n in counts.items()}
        )
        for verdict in verdicts:
            _testcase(suite, verdict)
    ET.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)


def _testcase(suite: ET.Element, verdict: Verdict) -> None:
    test = ET.SubElement(
        suite, "testcase", classname=verdict.operator, name=verdict.case, time=f"{verdict.seconds:.3f}"
    )
    if verdict.status == PASSED:
        return
    tag = {NOT_RUN: "skipped", CRASHED: "error", HUNG: "error"}.get(verdict.status, "failure")
    element = ET.SubElement(test, tag, message=f"{verdict.status}: {'; '.join(verdict.problems)}")
    element.text = "\n".join((*verdict.problems, f"replay: {verdict.replay}"))
