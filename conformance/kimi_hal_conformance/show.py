"""``kimi-hal conformance show``, and the option that writes a page."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console


def _in_a_folder(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    """Refuse a file that could not be written: not after minutes of running."""
    if path is not None and not path.absolute().parent.is_dir():
        raise click.UsageError(f"cannot write {path}: there is no folder {path.parent}", ctx)
    return path


html_option = click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=_in_a_folder,
    help="Write one HTML page here.",
)


@click.command()
@click.argument("stored", metavar="REPORT.json", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@html_option
def show(stored: Path, html: Path | None) -> None:
    """Print a stored JSON report as its run did, and write it as an HTML page; nothing is run.

    Exit status: 0, whatever the report says; 2, it is none that this suite reads.
    """
    from kimi_hal_conformance import page
    from kimi_hal_conformance import report as output
    from kimi_hal_conformance.schema import read

    try:
        report = read(stored.read_bytes())
    except ValueError as error:
        raise click.UsageError(f"{stored}: {error}") from error
    output.print_report(report, Console())
    if html:
        page.write_html(report, html)
