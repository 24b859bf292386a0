"""``kimi-hal conformance``: run the suite over a backend and write its reports."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from kimi_hal.errors import KimiHalError


@click.group()
def cli() -> None:
    """Check a backend against the reference."""


@cli.command()
@click.option("--backend", required=True, metavar="NAME", help="An installed backend.")
@click.option(
    "--execution",
    type=click.Choice(["native", "portable", "interpreted"]),
    default="native",
    show_default=True,
    help="How its kernels run.",
)
@click.option("--profile", type=click.Choice(["quick", "standard"]), default="quick", show_default=True)
@click.option("--case", "only", multiple=True, metavar="ID", help="This case alone; may be repeated.")
@click.option("--seed", default=0, show_default=True, help="Seed of the operands.")
@click.option("--limit", type=float, metavar="SECONDS", help="Time limit of one case.")
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), metavar="FILE", help="Write the report as JSON."
)
@click.option(
    "--junitxml", type=click.Path(path_type=Path), metavar="FILE", help="Write the report as JUnit XML."
)
@click.pass_context
def run(
    ctx: click.Context,
    backend: str,
    execution: str,
    profile: str,
    only: tuple[str, ...],
    seed: int,
    limit: float | None,
    json_path: Path | None,
    junitxml: Path | None,
) -> None:
    """Run a backend's cases; the exit status is 0 only if all passed."""
    from kimi_hal_conformance import report as output
    from kimi_hal_conformance import suite

    console = Console()
    request = suite.Request(backend, execution, profile, only, seed, limit)
    try:
        with console.status(f"{backend}: starting") as status:
            report = suite.run(request, lambda v: status.update(f"{v.implementation} {v.case}: {v.status}"))
    except KimiHalError as error:
        raise click.ClickException(str(error)) from error
    output.print_table(report, console)
    if json_path:
        output.write_json(report, json_path)
    if junitxml:
        output.write_junit(report, junitxml)
    ctx.exit(0 if report.ok else 1)


if __name__ == "__main__":
    cli()
