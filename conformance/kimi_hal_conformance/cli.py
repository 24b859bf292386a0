"""``kimi-hal conformance``: run the suite over a backend and write its reports."""

from __future__ import annotations

from pathlib import Path

import click

from kimi_hal.errors import KimiHalError
from kimi_hal.settings import EXECUTIONS
from kimi_hal_conformance.asked import PROFILE_NAMES, AskedError, Seconds
from kimi_hal_conformance.compiling import command as compiling
from kimi_hal_conformance.diff import diff
from kimi_hal_conformance.interruption import STATUS, hold, interruptible
from kimi_hal_conformance.listing import listing
from kimi_hal_conformance.mutants.command import prove
from kimi_hal_conformance.replay import replay
from kimi_hal_conformance.show import apart, html_option, in_a_folder, show
from kimi_hal_conformance.terminal import Terminal, say


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
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
    type=click.Choice(PROFILE_NAMES),
    help="Which cases; interp where kernels are interpreted, else quick.",
)
@click.option(
    "--operator", "operators", multiple=True, metavar="NAME", help="This operator alone; may be repeated."
)
@click.option("--case", "only", multiple=True, metavar="ID", help="This case alone; may be repeated.")
@click.option("--implementation", default="", metavar="NAME", help="This implementation alone.")
@click.option("--seed", default=0, show_default=True, help="Seed of the operands.")
@click.option("--limit", type=Seconds(), metavar="SECONDS", help="Limit of a case.")
@click.option("--lanes", type=click.IntRange(min=1), metavar="N", help="Processes at once.")
@click.option(
    "--repeats", type=click.IntRange(min=0), metavar="N", help="Calls beside the first, to compare bits."
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=in_a_folder,
    metavar="FILE",
    help="Write JSON here, also what an interrupted run found.",
)
@click.option(
    "--junitxml",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=in_a_folder,
    metavar="FILE",
    help="Write JUnit XML here.",
)
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
@interruptible
def run(
    ctx: click.Context,
    backend: str,
    execution: str,
    profile: str | None,
    operators: tuple[str, ...],
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
    stale or not needed, nothing ran, or a report cannot be written; 2, what was asked for does not exist; 130,
    it was interrupted.
    """
    from kimi_hal_conformance import files, page, resume, suite, waivers
    from kimi_hal_conformance import report as output
    from kimi_hal_conformance.cases import load
    from kimi_hal_conformance.compiling import run as compiled
    from kimi_hal_conformance.progress import Progress
    from kimi_hal_conformance.request import Request
    from kimi_hal_conformance.schema import INTERRUPTED

    compiling.refuse(ctx, compile_only)
    apart(json=json_path, junitxml=junitxml, html=html, waivers=waivers_path)
    console = Terminal()
    load()
    try:
        waived = waivers.read(waivers_path) if waivers_path else ()
        request = Request(
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
            operators=operators,
        )
        compile_request = compiled.CompileRequest(
            backend, targets, implementation, only, limit, lanes, compiling.strict(strict), operators
        )
        with Progress(console, backend) as told:
            report = (
                compiled.run(compile_request, told) if compile_only else suite.run(request, told, told.begin)
            )
    except KimiHalError as error:
        raise AskedError(str(error)) from error
    hold()
    wanted = ((output.write_json, json_path), (output.write_junit, junitxml), (page.write_html, html))
    unwritten = files.unwritten(report, wanted)  # before anything is printed, which nobody may read
    output.print_report(report, console)
    for line in unwritten.values():
        say(console, line, "bold red")
    if report.verdict == INTERRUPTED:
        kept = json_path and json_path not in unwritten
        line = f"go on with --resume {json_path}" if kept else "--json FILE would have kept it"
        say(console, line)
        ctx.exit(STATUS)
    ctx.exit(0 if report.ok and not unwritten else 1)


cli.add_command(replay)
cli.add_command(listing)
cli.add_command(show)
cli.add_command(diff)
cli.add_command(prove)


if __name__ == "__main__":
    cli()
