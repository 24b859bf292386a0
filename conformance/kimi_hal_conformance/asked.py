"""What commands of the suite have in common: the names that options take, and the error for a wrong one."""

from __future__ import annotations

import math
from typing import Any

import click

from kimi_hal_conformance.printable import printable

#: As ``case.PROFILES``, which is not imported for a command that only prints its help.
PROFILE_NAMES = ("interp", "quick", "standard", "full")

#: Seconds of a week: what takes longer is no limit.
LONGEST = 604_800


class Between(click.FloatRange):
    """A number above one and up to another, which nan is not."""

    def __init__(self, low: float, high: float) -> None:
        super().__init__(min=low, max=high, min_open=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number, or fail with a sentence."""
        found = super().convert(value, param, ctx)
        if math.isnan(found):
            self.fail(f"{found} is not in the range {self._describe_range()}.", param, ctx)
        return found


class Seconds(Between):
    """A limit of time."""

    name = "seconds"

    def __init__(self) -> None:
        super().__init__(0, LONGEST)


class AskedError(click.ClickException):
    """Something that does not exist was asked for: exit status 2, as for a wrong option."""

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))  # a plugin may have raised it
