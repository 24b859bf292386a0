"""``kimi-hal conformance show``, and the options and arguments that name a stored report or a page."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kimi_hal_conformance import files

if TYPE_CHECKING:
    from kimi_hal_conformance.schema import Report


def in_a_folder(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    """Refuse a file that could not be written: not after minutes of running."""
    if path is not None and not path.absolute().parent.is_dir():
        raise click.UsageError(f"cannot write {path}: there is no folder {path.parent}", ctx)
    if path is not None and (
        path.is_file() or not path.exists()
    ):  # a pipe is written when there is something
        new = not path.exists()
        try:
            path.open("ab").close()
            if new:
                path.resolve().unlink()
        except OSError as error:
            raise click.UsageError(f"cannot write {path}: {error.strerror}", ctx) from None
    return path


def apart(**paths: Path | None) -> None:
    """Refuse a file that is named for two purposes, of which one would be written over the other.

    Raises:
        click.UsageError: names both options.
    """
    taken: dict[Path, str] = {}
    for option, path in paths.items():
        if path is None or (path.exists() and not path.is_file()):
            continue
        other = taken.setdefault(Path(os.path.realpath(path)), option)
        if other != option:
            raise click.UsageError(f"--{other} and --{option} are one file, {path}: name two")


html_option = click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=in_a_folder,
    metavar="FILE",
    help="Write one HTML page here.",
)


def stored(path: Path) -> Report:
    """Read a report that a command line names.

    Raises:
        click.UsageError: it is none, or none that this suite reads.
    """
    from kimi_hal_conformance.schema import read

    try:
        return read(path.read_bytes())
    except ValueError as error:
        raise click.UsageError(f"{path}: {error}") from error


@click.command()
@click.argument("report", metavar="REPORT.json", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@html_option
def show(report: Path, html: Path | None) -> None:
    """Print a stored JSON report as its run did, and write it as an HTML page; nothing is run.

    Exit status: 0, whatever the report says; 1, the page cannot be written; 2, it is none that this suite reads.
    """
    from kimi_hal_conformance import page
    from kimi_hal_conformance import report as output
    from kimi_hal_conformance.terminal import Terminal

    found = stored(report)
    unwritten = files.unwritten(found, [(page.write_html, html)])
    output.print_report(found, Terminal())
    for line in unwritten.values():
        raise click.ClickException(line)
