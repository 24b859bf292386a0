"""What was raised, in words: whatever its class is called, and whatever its message holds or raises itself."""

from __future__ import annotations

import traceback

from kimi_hal_conformance.printable import printable

#: Characters kept of a message, and of a traceback.
LONGEST, OUTPUT = 2000, 4000
HEADING = "Traceback (most recent call last):\n"


def described(error: BaseException) -> str:
    """Say what was raised, and by which rank's own error where ranks meet."""
    text = ""
    for cause in reversed(causes(error)):
        said = _named(cause)
        text = f"{said} (from {text})" if text and _message(cause.__cause__) not in said else said
    return text


def causes(error: BaseException) -> list[BaseException]:
    """Return an exception and what it was raised from, the inmost last; a chain that comes back to itself ends."""
    found = [error]
    while (cause := found[-1].__cause__) is not None and all(cause is not e for e in found):
        found.append(cause)
    return found


def traced(error: BaseException) -> str:
    """Return the end of the traceback of an exception, whatever its message is."""
    chain = []
    for cause in reversed(causes(error)):
        lines = traceback.format_tb(cause.__traceback__)
        chain.append("".join((HEADING, *map(printable, lines), _named(cause))))
    return "\n\n".join(chain)[-OUTPUT:]


def _named(error: BaseException) -> str:
    """Return an exception's class and message, as the last line of a traceback has them."""
    return f"{printable(type(error).__name__)}: {_message(error)}".rstrip(": ")


def _message(error: BaseException | None) -> str:
    """Return what an exception says of itself, as far as it can be printed; it may raise when it is asked."""
    try:
        text = str(error)
    except BaseException as other:
        return f"its own message raised {printable(type(other).__name__)}"
    text = text if len(text) <= LONGEST else f"{text[:LONGEST]} … ({len(text)} characters)"
    return printable(text)
