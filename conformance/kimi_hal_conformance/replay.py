"""``kimi-hal conformance replay``: one case again, and all that can be told of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kimi_hal.errors import KimiHalError, nearest
from kimi_hal.settings import EXECUTIONS
from kimi_hal_conformance.asked import AskedError, Seconds
from kimi_hal_conformance.interruption import interruptible
from kimi_hal_conformance.show import stored
from kimi_hal_conformance.terminal import Terminal, say

if TYPE_CHECKING:
    from kimi_hal_conformance.request import Request
    from kimi_hal_conformance.schema import Report
    from kimi_hal_conformance.verdict import Measure, Verdict


@dataclass(frozen=True)
class Given:
    """What the command line says; ``None`` where it says nothing."""

    backend: str | None
    execution: str | None
    implementation: str | None
    seed: int | None
    repeats: int | None
    limit: float | None


@click.command()
@click.argument("case", metavar="ID")
@click.option("--backend", metavar="NAME", help="An installed backend, or reference.")
@click.option("--execution", type=click.Choice(EXECUTIONS), help="How its kernels run; default native.")
@click.option("--implementation", metavar="NAME", help="This implementation alone.")
@click.option("--seed", type=int, help="Seed of the operands; default 0.")
@click.option("--repeats", type=click.IntRange(min=0), metavar="N", help="Calls beside the first; default 1.")
@click.option("--limit", type=Seconds(), metavar="SECONDS", help="Limit of the case.")
@click.option(
    "--report",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="JSON of a run: all that is not given here is taken from what it says of the case.",
)
@click.pass_context
@interruptible
def replay(
    ctx: click.Context,
    case: str,
    backend: str | None,
    execution: str | None,
    implementation: str | None,
    seed: int | None,
    repeats: int | None,
    limit: float | None,
    report: Path | None,
) -> None:
    """Run one case again and print everything: its reason, problems, errors, input and output.

    From a report, it is run over every implementation that did not pass it there, or over all if each did.
    Exit status: 0, it passed; 1, it did not; 2, what was asked for does not exist; 130, it was interrupted.
    """
    from kimi_hal_conformance import suite
    from kimi_hal_conformance.cases import load

    given = Given(backend, execution, implementation, seed, repeats, limit)
    console = Terminal()
    load()
    try:
        requests = list(from_report(case, given, stored(report), report) if report else named(case, given))
        reports = [suite.run(request) for request in requests]
    except KimiHalError as error:
        raise AskedError(str(error)) from error
    for found in reports:
        for verdict in found.verdicts:
            for line in told(verdict):
                say(console, line)
    ctx.exit(0 if all(found.ok for found in reports) else 1)


def named(case: str, given: Given) -> Iterator[Request]:
    """Yield what a command line alone asks for."""
    from kimi_hal_conformance.request import Request

    if given.backend is None:
        raise click.UsageError("say which backend is to be tried: --backend NAME, or --report FILE")
    yield Request(
        given.backend,
        given.execution or "native",
        only=(case,),
        implementation=given.implementation or "",
        seed=given.seed or 0,
        repeats=given.repeats,
        limit=given.limit,
    )


def from_report(case: str, given: Given, report: Report, path: Path) -> Iterator[Request]:
    """Yield what a report asks for: the case of every implementation that did not pass it, else of all.

    Of another backend than the report's every implementation is tried, or the one that is given.
    """
    from kimi_hal_conformance.conclusions import COMMAND
    from kimi_hal_conformance.verdict import AGAINST, WAIVED

    other = given.backend not in (None, report.backend)
    mine = [v for v in report.verdicts if v.case == case]
    if not other:
        mine = [v for v in mine if given.implementation in (None, v.implementation)]
    if not mine:
        hint = nearest(case, {v.case for v in report.verdicts}) or ""
        by = f" of {given.implementation}" if given.implementation else ""
        raise AskedError(f"{path} has no case {case!r}{by}{hint}")
    against = [v for v in mine if v.status in (*AGAINST, WAIVED)]
    for verdict in mine[:1] if other else against or mine:
        if verdict.replay and not verdict.replay.startswith(COMMAND):
            raise AskedError(f"{case!r} is no case that is run: `{verdict.replay}`")
        if case.endswith("/*"):
            raise AskedError(f"{case!r} is said of all cases of an operator: run the backend again")
        (request,) = named(case, replace(given, backend=given.backend or report.backend))
        yield replace(
            request,
            execution=given.execution or report.environment.execution,
            implementation=request.implementation if other else verdict.implementation,
            seed=verdict.seed if given.seed is None else given.seed,
            repeats=report.environment.repeats if given.repeats is None else given.repeats,
        )


def told(verdict: Verdict) -> Iterator[str]:
    """Yield all that is known of a verdict, a line each."""
    from kimi_hal_conformance.case import find

    case = find(verdict.case)
    yield f"{verdict.status} {verdict.implementation} {verdict.case} ({verdict.seconds:.2f} s)"
    if case is not None:
        fault = f" (class {case.fault} of docs/faults.md)" if case.fault else ""
        yield f"    why it exists: {case.why}{fault}"
        yield f"    spec: {case.spec}"
    for problem in verdict.problems:
        yield f"    {problem}"
    for measure in verdict.measures:
        yield f"    {_measured(measure)}"
    if verdict.smallest:
        yield f"    smallest input that fails: {verdict.smallest}"
    if verdict.input:
        yield f"    {verdict.input}"
    for name, why in verdict.untried.items():
        yield f"    {name} was not tried: {why}"
    for line in verdict.output.splitlines():
        yield f"    | {line}"


def _measured(measure: Measure) -> str:
    if measure.exact:
        return f"{measure.tensor}: exact" if measure.norm == 0.0 else f"{measure.tensor}: differs"
    norm, maximum = ("beyond" if s is None else f"{s:.3g}" for s in (measure.norm, measure.maximum))
    return (
        f"{measure.tensor}: {norm} of its budget in root mean square, {maximum} at the worst entry "
        f"(rounding {measure.rounding:.3g}, accumulation {measure.accumulation:.3g}, inner {measure.inner:.3g})"
    )
