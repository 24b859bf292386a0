"""What commands of the suite have in common: the names that options take, and the error for a wrong one."""

from __future__ import annotations

import click

#: As ``case.PROFILES``, which is not imported for a command that only prints its help.
PROFILE_NAMES = ("interp", "quick", "standard", "full")


class AskedError(click.ClickException):
    """Something that does not exist was asked for: exit status 2, as for a wrong option."""

    exit_code = 2
