"""``kimi-hal conformance``: run the suite over a backend and write its reports."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from kimi_hal.errors import KimiHalError
from kimi_hal.settings import EXECUTIONS
from kimi_hal_conformance.compiling import command as compiling
from kimi_hal_conformance.mutants.command import prove
from kimi_hal_conformance.show import html_option, show
from kimi_hal_conformance.verdict import Verdict


class AskedError(click.ClickException):
    """Something that does not exist was asked for: exit status 2, as for a wrong option."""

    exit_code = 2


@click.group()
def cli() -> None:
    """Check a backend against the reference."""


@cli.command()
@click.option("--backend", required=True, metavar="NAME", help="An installed backend.")
@click.option(
    "--execution",
    type=click.Choice(EXECUTIONS),
    default="native",
    show_default=True,
    help="How its kernels run.",
)
@click.option(
    "--profile",
    type=click.Choice(["interp", "quick", "standard", "full"]),
    help="Which cases; interp where kernels are interpreted, else quick.",
)
@click.option("--case", "only", multiple=True, metavar="ID", help="This case alone; may be repeated.")
@click.option("--implementation", default="", metavar="NAME", help="This implementation alone.")
@click.option("--seed", default=0, show_default=True, help="Seed of the operands.")
@click.option(
    "--limit", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS", help="Limit of a case."
)
@click.option("--lanes", type=click.IntRange(min=1), metavar="N", help="Processes at once.")
@click.option(
    "--repeats", type=click.IntRange(min=0), metavar="N", help="Calls beside the first, to compare bits."
)
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write JSON here.")
@click.option("--junitxml", type=click.Path(dir_okay=False, path_type=Path), help="Write JUnit XML here.")
@click.option(
    "--waivers",
    "waivers_path",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="TOML: failures that are admitted for a while.",
)
@click.option(
    "--resume",
    "resume_path",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="JSON of an earlier run: what passed or was refused there is kept.",
)
@click.option(
    "--undeclared/--no-undeclared",
    default=None,
    help='Try what is not claimed, for "could be claimed"; on the host the default from the standard profile on.',
)
@html_option
@compiling.compile_options
@click.pass_context
def run(
    ctx: click.Context,
    backend: str,
    execution: str,
    profile: str | None,
    only: tuple[str, ...],
    implementation: str,
    seed: int,
    limit: float | None,
    lanes: int | None,
    repeats: int | None,
    json_path: Path | None,
    junitxml: Path | None,
    html: Path | None,
    waivers_path: Path | None,
    resume_path: Path | None,
    undeclared: bool | None,
    compile_only: bool,
    targets: tuple[str, ...],
    strict: bool,
) -> None:
    """Run a backend's cases, or compile its kernels for devices that are not here.

    Exit status: 0, something passed, and what did not is waived; 1, something did not pass, a waiver is
    stale or not needed, or nothing ran; 2, what was asked for does not exist.
    """
    from kimi_hal_conformance import page, resume, suite, waivers
    from kimi_hal_conformance import report as output
    from kimi_hal_conformance.cases import load
    from kimi_hal_conformance.compiling import run as compiled

    compiling.refuse(ctx, compile_only)
    for path in filter(None, (json_path, junitxml)):
        if not path.absolute().parent.is_dir():  # not after minutes of running
            raise AskedError(f"cannot write {path}: there is no folder {path.parent}")
    console = Console()
    load()
    try:
        waived = waivers.read(waivers_path) if waivers_path else ()
        request = suite.Request(
            backend,
            execution,
            profile or "",
            only,
            implementation,
            seed,
            limit,
            lanes,
            waivers=waived,
            repeats=repeats,
            resume=resume.read(resume_path) if resume_path else None,
            undeclared=undeclared,
        )
        compile_request = compiled.CompileRequest(
            backend, targets, implementation, only, limit, lanes, compiling.strict(strict)
        )
        with console.status(f"{backend}: starting") as status:

            def tell(found: Verdict) -> None:
                status.update(f"{found.implementation} {found.case}: {found.status}")

            report = compiled.run(compile_request, tell) if compile_only else suite.run(request, tell)
    except KimiHalError as error:
        raise AskedError(str(error)) from error
    output.print_report(report, console)
    if json_path:
        output.write_json(report, json_path)
    if junitxml:
        output.write_junit(report, junitxml)
    if html:
        page.write_html(report, html)
    ctx.exit(0 if report.ok else 1)


@cli.command()
@click.option("--operator", metavar="NAME", help="Of this operator alone.")
def cases(operator: str | None) -> None:
    """Print the ids of all cases, with the profiles that they are part of."""
    from kimi_hal import ops
    from kimi_hal_conformance.case import CASES, PROFILES
    from kimi_hal_conformance.cases import load

    load()
    try:
        wanted = None if operator is None else ops.get(operator).name
    except KimiHalError as error:
        raise AskedError(str(error)) from error
    for case in CASES.values():
        if wanted in (None, case.operator):
            profiles = [profile for profile in PROFILES if case.runs_in(profile)]
            click.echo(f"{case.id}  {' '.join(profiles)}")


cli.add_command(prove)
cli.add_command(show)


if __name__ == "__main__":
    cli()
