"""A report as a table, as JSON and as JUnit XML."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kimi_hal.cli.tables import print_whole
from kimi_hal_conformance import files, levels, waivers
from kimi_hal_conformance.claims import told as claims
from kimi_hal_conformance.code import figures
from kimi_hal_conformance.compiling import table as compiling
from kimi_hal_conformance.printable import legal
from kimi_hal_conformance.schema import (
    CONFORMS,
    DOES_NOT_CONFORM,
    INTERRUPTED,
    NOTHING_PASSED,
    NOTHING_RAN,
    Report,
)
from kimi_hal_conformance.terminal import say
from kimi_hal_conformance.verdict import (
    AGAINST,
    CRASHED,
    HUNG,
    NOT_RUN,
    PASSED,
    REFUSED,
    WAIVED,
    Verdict,
    Waiver,
)

STYLE = {PASSED: "green", NOT_RUN: "dim", REFUSED: "yellow"}
#: Lines of a process's output that the terminal shows; the JSON report keeps more.
SHOWN = 12
#: Of these, what was printed before the process died.
PRINTED = 4
#: How Python begins to say that it died, the stack of the thread that did, and the names of compiled modules.
DIED, HERE, MODULES = "Fatal Python error: ", "Current thread ", "Extension modules: "
#: How many names of what was asked for alone stand in the closing line; the JSON report has all.
NAMED = 3
#: From so many others on that say the same, the first alone is printed in full; the JSON report has all.
MANY = 3


def print_report(report: Report, console: Console) -> None:
    """Print one line an implementation, what was not tried, every problem, and the closing line."""
    print_whole(compiling.table(report) if compiling.compiled(report) else _table(report), console)
    for target, reason in compiling.stand_ins(report).items():
        line = f"{target} {reason}"
        say(console, line, "yellow")
    if resumed := report.environment.resumed:
        kept = sum(v.kept for v in report.verdicts)
        line = f"kept from the run of {resumed}: {kept} of {len(report.verdicts)} verdicts"
        say(console, line, "dim")
    for line in () if compiling.compiled(report) else levels.lines(report.implementations):
        say(console, line, "dim")
    for reason, count in left_out(report).items():
        say(console, f"not run, {count}: {reason}", "dim")
    if report.not_implemented:
        names = ", ".join(report.not_implemented)
        say(console, f"not implemented by {report.backend}: {names}", "dim")
    _print_problems(report.verdicts, console)
    for line in waivers.lines(report.waivers):
        say(console, line, "red")
    for free in (found for found in report.implementations if not found.conforming):
        line = f"{free.name} of {free.operator} does not conform to the tie rule: it is reached by name only"
        say(console, line, "yellow")
    for line in claims.lines(report.could_be_claimed):
        say(console, line, "dim")
    style = "bold green" if report.ok else "bold red"
    say(console, summary(report), style)


def _table(report: Report) -> Table:
    """Return one line an implementation of an operator; a column that would be empty is left out."""
    groups: dict[tuple[str, str], list[Verdict]] = defaultdict(list)
    for verdict in report.verdicts:
        groups[verdict.operator, verdict.implementation].append(verdict)
    counts = report.counts()
    kinds = {
        "passed": (PASSED,),
        "failed": AGAINST,
        "waived": (WAIVED,),
        "refused": (REFUSED,),
        "not run": (NOT_RUN,),
    }
    kinds = {name: kind for name, kind in kinds.items() if any(counts[s] for s in kind)}
    table = Table(box=SIMPLE, caption="worst: the largest error as a share of its budget")
    for column in ("operator", "by", *kinds, "worst", "seconds"):
        table.add_column(column, no_wrap=True)
    for (operator, implementation), verdicts in groups.items():
        numbers = [sum(v.status in kind for v in verdicts) for kind in kinds.values()]
        style = "red" if any(v.status in AGAINST for v in verdicts) else "" if verdicts[0].measures else "dim"
        seconds = f"{sum(v.seconds for v in verdicts):.1f}"
        cells = (*(str(n or "") for n in numbers), worst(verdicts), seconds)
        table.add_row(operator, implementation.partition(".")[2], *cells, style=style)
    return table


def left_out(report: Report) -> Counter[str]:
    """Return how many verdicts say that nothing ran, by reason."""
    return Counter(v.problems[0] for v in report.verdicts if v.status == NOT_RUN)


def _alike(verdicts: Sequence[Verdict]) -> dict[tuple[str, ...], list[Verdict]]:
    """Return the verdicts against implementations by what they say."""
    found: dict[tuple[str, ...], list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        if verdict.status in AGAINST:
            found[_said(verdict)].append(verdict)
    return found


def _said(verdict: Verdict) -> tuple[str, ...]:
    """Return what a verdict says of an implementation, whichever claim its case tries."""
    first, *rest = verdict.problems or ("",)
    first = first.partition("), but ")[2] if first.startswith("claimed (") else first
    return verdict.operator, verdict.implementation, verdict.status, first, *rest


def _print_problems(verdicts: Sequence[Verdict], console: Console) -> None:
    """Print what speaks against an implementation, once what many cases say alike, and what is waived."""
    alike = _alike(verdicts)
    for verdict in verdicts:
        if verdict.status in AGAINST:
            first, *others = alike[_said(verdict)]
            if verdict is first or len(others) < MANY:
                _print_problem(verdict, console)
            if verdict is first and len(others) >= MANY:
                line = (
                    f"    and {len(others)} others the same: {', '.join(v.case for v in others[:NAMED])}, …"
                )
                say(console, line)
        elif verdict.status == WAIVED:
            line = f"waived ({verdict.was}) {verdict.implementation} {verdict.case}: {verdict.waiver}"
            say(console, line, "yellow")


def _print_problem(verdict: Verdict, console: Console) -> None:
    console.print(
        f"[red]{verdict.status}[/] {verdict.implementation} {escape(verdict.case)}", highlight=False
    )
    lines = [f"    {problem}" for problem in verdict.problems]
    lines += [f"    smallest input: {verdict.smallest}: {verdict.input}"] if verdict.input else []
    lines += [f"    | {line}" for line in shown(verdict.output)]
    lines += [f"    replay: {verdict.replay}"] if verdict.replay else []
    for line in lines:
        say(console, line)


def shown(output: str) -> list[str]:
    """Return the lines of a process's output that tell most: its end, or the place at which it died.

    A stack that Python prints when it dies has its most recent call first, the other threads around it, and the
    names of compiled modules behind it.
    """
    lines = [line for line in output.splitlines() if not line.startswith(MODULES)]
    died = next((i for i, line in enumerate(lines) if line.startswith(DIED)), None)
    if died is None:
        return lines[-SHOWN:]
    stack = [line for line in lines[died + 1 :] if line]
    here = next((i for i, line in enumerate(stack) if line.startswith(HERE)), 0)
    return [*lines[max(0, died - PRINTED) : died + 1], *stack[here:]][:SHOWN]


def worst(verdicts: list[Verdict]) -> str:
    """Return the largest share of a budget that any tensor used; ``exact`` where all were discrete."""
    measures = [m for v in verdicts for m in v.measures]
    real = [share for m in measures if not m.exact for share in (m.norm, m.maximum)]
    if not real:
        return "exact" if measures else ""
    return "beyond" if None in real else f"{max(share for share in real if share is not None):.2f}"


#: How a verdict is said.
WORDS = {
    CONFORMS: "conforms",
    DOES_NOT_CONFORM: "does NOT conform",
    NOTHING_PASSED: "is NOT proven: nothing passed",
    NOTHING_RAN: "is NOT proven: nothing ran",
    INTERRUPTED: "is NOT proven: the run was interrupted",
}
#: The same where nothing was run.
COMPILED_WORDS = WORDS | {
    CONFORMS: "compiles, and nothing was run",
    DOES_NOT_CONFORM: "does NOT compile as it should",
    NOTHING_RAN: "is NOT proven: nothing was compiled",
}


def summary(report: Report) -> str:
    """Return the closing line."""
    counts = ", ".join(f"{n} {status.replace('_', ' ')}" for status, n in report.counts().items() if n)
    run = report.environment
    what = f"{report.backend} ({run.execution}, profile {run.profile}, {run.seconds:.0f} s)" + limits(report)
    wrong = sum(bool(w.problem) for w in report.waivers)
    word = (COMPILED_WORDS if compiling.compiled(report) else WORDS)[report.verdict]
    if report.verdict == DOES_NOT_CONFORM and not any(v.status in AGAINST for v in report.verdicts):
        word += f": {wrong} waiver{'s' if wrong > 1 else ''} stale or not needed"
    if report.verdict == CONFORMS and not (run.limited_to or compiling.compiled(report)):
        word += f", {spoken_for(report)} operators"
    return f"{what} {word}: {counts or 'nothing fits what was asked for'}"


def spoken_for(report: Report) -> str:
    """Return of how many of the contract's operators something passed: a backend may conform and lack the rest."""
    passed = {v.operator for v in report.verdicts if v.status == PASSED}
    known = {tested.operator for tested in report.implementations} | {*report.not_implemented}
    return f"{len(passed)} of {len(known)}"


def limits(report: Report) -> str:
    """Return what of a backend was asked for alone, for the closing line: the verdict is on nothing else."""
    named = report.environment.limited_to
    if len(named) > NAMED:
        named = (*named[:NAMED], f"{len(named) - NAMED} more")
    return f", {', '.join(named)} alone," if named else ""


def write_json(report: Report, path: Path) -> None:
    """Write the report in its versioned schema."""
    files.write(path, files.as_json(report))


def write_junit(report: Report, path: Path) -> None:
    """Write JUnit XML: a suite an implementation, a testcase a case."""
    root = ET.Element("testsuites", name=f"kimi-hal conformance {report.backend}")
    groups: dict[str, list[Verdict]] = defaultdict(list)
    for verdict in report.verdicts:
        groups[verdict.implementation].append(verdict)
    for implementation, verdicts in groups.items():
        suite = ET.SubElement(root, "testsuite", {"name": implementation, **_counts(verdicts)})
        for verdict in verdicts:
            _testcase(suite, verdict)
    if report.waivers:
        _waivers(ET.SubElement(root, "testsuite", name="waivers"), report.waivers)
    ET.indent(root)
    for element in root.iter():
        element.text = legal(element.text or "") or None
        element.attrib |= {name: legal(value) for name, value in element.attrib.items()}
    files.write(path, ET.tostring(root, encoding="utf-8", xml_declaration=True))


def _waivers(suite: ET.Element, given: Sequence[Waiver]) -> None:
    """Write a testcase a waiver: one that has a problem is a failure."""
    failures = sum(bool(waiver.problem) for waiver in given)
    suite.attrib |= {"tests": str(len(given)), "failures": str(failures)}
    for waiver in given:
        name = f"{waiver.case} {waiver.implementation}".rstrip()
        test = ET.SubElement(suite, "testcase", classname="waiver", name=name)
        if waiver.problem:
            ET.SubElement(test, "failure", message=waiver.problem)
        elif waiver.note:
            ET.SubElement(test, "skipped", message=waiver.note)


def _counts(verdicts: list[Verdict]) -> dict[str, str]:
    tags = Counter(TAG.get(v.status, "") for v in verdicts)
    return {
        "tests": str(len(verdicts)),
        "failures": str(tags["failure"]),
        "errors": str(tags["error"]),
        "skipped": str(tags["skipped"]),
        "time": f"{sum(v.seconds for v in verdicts):.3f}",
    }


#: What JUnit calls a status; a passed case has no element.
TAG = {
    "failed": "failure",
    CRASHED: "error",
    HUNG: "error",
    WAIVED: "skipped",
    REFUSED: "skipped",
    NOT_RUN: "skipped",
}


def _testcase(suite: ET.Element, verdict: Verdict) -> None:
    test = ET.SubElement(
        suite, "testcase", classname=verdict.operator, name=verdict.case, time=f"{verdict.seconds:.3f}"
    )
    if verdict.code is not None:
        properties = ET.SubElement(test, "properties")
        for name, value in figures(verdict.code).items():
            ET.SubElement(properties, "property", name=name, value=value)
    if verdict.status == PASSED:
        return
    message = f"{verdict.status}: {verdict.waiver or '; '.join(verdict.problems)}"
    element = ET.SubElement(test, TAG[verdict.status], message=message)
    lines = [*verdict.problems, *([f"replay: {verdict.replay}"] if verdict.replay else [])]
    element.text = "\n".join(lines)
    if verdict.output:
        ET.SubElement(test, "system-out").text = verdict.output
