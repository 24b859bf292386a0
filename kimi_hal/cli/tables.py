"""Tables of names and numbers, printed whole."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

#: Characters of the longest line.
LONGEST = 1000


@dataclass(frozen=True)
class Whole:
    """A table as wide as its cells; rich breaks names at the width of a terminal, and takes 80 for that of a log."""

    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table for lines that are long enough."""
        yield from console.render(self.table, options.update(max_width=LONGEST))


def print_whole(table: Table, console: Console) -> None:
    """Print a table with every row in one line; where the terminal is narrower, it goes on below itself."""
    console.print(Whole(table), soft_wrap=True)
