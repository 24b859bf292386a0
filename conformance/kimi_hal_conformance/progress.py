"""How far a run is: a bar in a terminal, a line now and then where there is none."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from kimi_hal_conformance.terminal import say
from kimi_hal_conformance.verdict import AGAINST, STATUSES, Verdict

#: Seconds between two lines where there is no terminal.
EVERY = 30.0
#: Failures that are a line at once there; the report has them all.
FIRST = 10


class Progress:
    """Told of every verdict when it is there, from several threads; a context, in which the bar stands."""

    def __init__(self, console: Console, title: str) -> None:
        self._console, self._title = console, title
        self._counts: Counter[str] = Counter()
        self._total = 0
        self._told = time.monotonic()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[counts]}"),
            TextColumn("{task.fields[last]}", style="dim"),
        )
        self._bar = Bar(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task(f"{title}: starting", total=None, counts="", last="")

    def __enter__(self) -> Progress:
        """Begin to show it."""
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the bar away."""
        with contextlib.suppress(OSError):
            self._bar.stop()

    def begin(self, total: int) -> None:
        """Say how many verdicts are to come."""
        self._total = total
        self._bar.update(self._task, total=total, description=self._title)

    def __call__(self, verdict: Verdict) -> None:
        """Count a verdict; the first that speak against an implementation are told at once."""
        self._counts[verdict.status] += 1
        last = f"{verdict.implementation} {verdict.case}"
        self._bar.update(self._task, advance=1, counts=self.counts, last=last)
        if self._console.is_terminal:
            return
        against = sum(self._counts[status] for status in AGAINST)
        if (verdict.status in AGAINST and against <= FIRST) or time.monotonic() - self._told >= EVERY:
            self._told = time.monotonic()
            done = f"{self._counts.total()} of {self._total}"
            line = f"{done} ({self.counts}), last: {verdict.status} {last}"
            with contextlib.suppress(OSError):  # the terminal is gone, the run is not
                say(self._console, line)

    @property
    def counts(self) -> str:
        """Return how many verdicts have which status."""
        return ", ".join(f"{self._counts[s]} {s.replace('_', ' ')}" for s in STATUSES if self._counts[s])
