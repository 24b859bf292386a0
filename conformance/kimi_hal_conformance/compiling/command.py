"""The options of ``kimi-hal conformance run --compile-only``, and those that mean nothing beside it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.core import ParameterSource

#: Options of a run that launches kernels.
RUNNING = ("execution", "profile", "seed", "repeats", "waivers_path", "resume_path")
#: Options of a run that compiles them.
COMPILING = ("targets", "strict")

F = TypeVar("F", bound=Callable[..., Any])


def compile_options(command: F) -> F:
    """Add the options to a command."""
    for option in (
        click.option(
            "--strict", is_flag=True, help="With --compile-only: a missing tool fails; on where CI is set."
        ),
        click.option(
            "--target",
            "targets",
            multiple=True,
            metavar="NAME",
            help="With --compile-only: this target alone.",
        ),
        click.option(
            "--compile-only", is_flag=True, help="Compile its kernels for its targets, and run nothing."
        ),
    ):
        command = option(command)
    return command


def strict(asked: bool) -> bool:
    """Tell whether a missing tool fails: where it was asked for, and in CI."""
    return asked or os.environ.get("CI", "").lower() not in ("", "0", "false")


def refuse(ctx: click.Context, compile_only: bool) -> None:
    """Refuse options of the other mode.

    Raises:
        click.UsageError: some are given.
    """
    given = {
        p.name: p.opts[0]
        for p in ctx.command.params
        if p.name and ctx.get_parameter_source(p.name) is not ParameterSource.DEFAULT
    }
    if compile_only and (wrong := [given[name] for name in RUNNING if name in given]):
        raise click.UsageError(f"--compile-only runs no case: leave out {', '.join(wrong)}", ctx)
    if not compile_only and (wrong := [given[name] for name in COMPILING if name in given]):
        raise click.UsageError(f"{', '.join(wrong)} goes with --compile-only", ctx)
