"""What an implementation prints, raises or names commands no terminal, wherever it enters a verdict."""

from __future__ import annotations

import pytest

from kimi_hal_conformance.asked import AskedError
from kimi_hal_conformance.forms import FormError, results_of
from kimi_hal_conformance.lane import Lane
from kimi_hal_conformance.printable import printable
from kimi_hal_conformance.raised import described
from kimi_hal_conformance.turn import plain
from kimi_hal_conformance.verdict import FAILED, Verdict

CLEAR = "\x1b]0;owned\x07\x1b[2J"
SAID = "\\x1b]0;owned\\x07\\x1b[2J"


class Meta(type):
    """Classes whose name no file can hold."""

    __name__ = property(lambda cls: CLEAR + "\udc80")  # type: ignore[assignment]


class Odd(metaclass=Meta):
    """What is returned."""


def test_letters_stay_and_controls_are_escaped() -> None:
    assert printable("naïve → 注意\tone\ntwo") == "naïve → 注意\tone\ntwo"
    assert printable(CLEAR + "\r\u200e\ufffe\udc80") == SAID + r"\r\u200e\ufffe\udc80"


def test_a_verdict_from_another_process_is_printable() -> None:
    told = Verdict(
        case="c",
        operator="o",
        implementation="a.b",
        status=FAILED,
        problems=(CLEAR,),
        output=CLEAR,
        untried={"speed": CLEAR},
    )
    found = plain(told)
    assert (found.problems, found.output, found.untried) == ((SAID,), SAID, {"speed": SAID})


def test_the_names_of_what_is_returned_or_raised_are_printable() -> None:
    with pytest.raises(FormError) as caught:
        results_of(Odd(), ["out", "lse_out"])
    wanted = r"\udc80, expected a tuple of 2 (out, lse_out)"
    assert str(caught.value) == f"the call returned a {SAID}{wanted}"
    assert described(type(CLEAR, (Exception,), {})("no")) == f"{SAID}: no"
    assert AskedError(CLEAR).format_message() == SAID


def test_what_a_process_printed_is_printable() -> None:
    lane = Lane({})
    try:
        lane._log.write(CLEAR.encode())
        assert lane._output(0) == SAID
    finally:
        lane.stop()
