"""A terminal that may go away, or lack a letter: what is printed there ends no run and loses no report."""

from __future__ import annotations

import io
import os
import sys

from rich.console import Console


class Terminal(Console):
    """Standard output: a letter that it has none for becomes "?", and what nobody reads any more is not printed."""

    def __init__(self) -> None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")
        super().__init__()

    def on_broken_pipe(self) -> None:
        """Print nothing more; rich would end the process, and with it the run."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left is flushed at the end


def say(console: Console, line: str, style: str | None = None) -> None:
    """Print a line as it is: brackets are no markup, numbers have no colour, and a long one is not broken."""
    console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)
