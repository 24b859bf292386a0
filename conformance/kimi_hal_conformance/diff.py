"""``kimi-hal conformance diff``: what a release changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from kimi_hal_conformance.asked import Between
from kimi_hal_conformance.terminal import Terminal, say

if TYPE_CHECKING:
    from kimi_hal_conformance.changes import Change

STYLE = {"worse": "red", "better": "green", "other": "dim"}
#: A share that grew by more is told whatever is asked for.
LARGEST = 1e6
REPORT = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.argument("old", metavar="OLD.json", type=REPORT)
@click.argument("new", metavar="NEW.json", type=REPORT)
@click.option(
    "--factor",
    type=Between(1, LARGEST),
    default=1.5,
    show_default=True,
    help="Tell a share of a budget that grew or shrank by more than this.",
)
@click.pass_context
def diff(ctx: click.Context, old: Path, new: Path, factor: float) -> None:
    """Print what changed from one JSON report of a backend to another; nothing is run.

    Exit status: 0, nothing got worse; 1, something did; 2, a file is none that this suite reads, or they are of
    two backends.
    """
    from kimi_hal_conformance.changes import WORSE, ComparisonError, changes
    from kimi_hal_conformance.show import stored

    try:
        found = list(changes(stored(old), stored(new), factor))
    except ComparisonError as error:
        raise click.UsageError(str(error)) from error
    print_changes(found, Terminal())
    ctx.exit(1 if any(change.effect == WORSE for change in found) else 0)


def print_changes(found: Sequence[Change], console: Console) -> None:
    """Print the changes, what got worse first, and how many there are."""
    for effect, style in STYLE.items():
        for change in (c for c in found if c.effect == effect):
            line = f"{effect:6}  {change.kind}: {change.subject}: {change.before} → {change.after}"
            say(console, line, style)
    counts = Counter(change.effect for change in found)
    said = ", ".join(f"{counts[effect]} {effect}" for effect in STYLE if counts[effect])
    style = "bold red" if counts["worse"] else "bold green"
    console.print(said or "nothing changed", style=style, highlight=False)
