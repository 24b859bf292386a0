"""Ctrl-C, what a CI sends instead (SIGTERM), and a terminal that goes away (SIGHUP): the first of them ends a run.

Later ones wait until its reports are written: who is impatient would lose what was found.
"""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn, ParamSpec

import click

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STATUS = 130
P = ParamSpec("P")


def interruptible(command: Callable[P, None]) -> Callable[P, None]:
    """Let the first signal end a command: with what it makes of ``KeyboardInterrupt``, else with ``STATUS``."""

    @functools.wraps(command)
    def whole(*args: P.args, **kwargs: P.kwargs) -> None:
        with once():
            try:
                command(*args, **kwargs)
            except KeyboardInterrupt:
                click.echo("interrupted, and nothing was kept", err=True)
                raise click.exceptions.Exit(STATUS) from None

    return whole


@contextmanager
def once() -> Iterator[None]:
    """Make the first signal a ``KeyboardInterrupt`` in here and pass over the others.

    What is ignored stays so, and so does a handler that Python did not set and cannot put back.
    """
    before = {number: signal.getsignal(number) for number in SIGNALS}
    before = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}

    def first(number: int, frame: FrameType | None) -> NoReturn:
        hold()
        raise KeyboardInterrupt

    for number in before:
        signal.signal(number, first)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def hold() -> None:
    """Pass over every further signal of ``once``."""
    for number in SIGNALS:
        if callable(signal.getsignal(number)):
            signal.signal(number, lambda *given: None)
