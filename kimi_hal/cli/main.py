"""The entry point: a click group whose commands are imported when used.

``--help``, ``list`` and ``doctor --no-probe`` import no torch.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click

from kimi_hal import __version__
from kimi_hal.errors import KimiHalError, nearest

#: command -> (module that holds ``command``, one line of help)
COMMANDS = {
    "bench": ("kimi_hal.cli.bench", "Time the implementations that fit here, and write down the fastest."),
    "capacity": ("kimi_hal.cli.capacity", "Count the tokens and contexts that a memory holds."),
    "conformance": ("kimi_hal.cli.conformance", "Check a backend against the reference."),
    "doctor": ("kimi_hal.cli.doctor", "Say what is installed, what was found, and what is wrong."),
    "explain": ("kimi_hal.cli.explain", "Say which implementation an operator gets, and why not the others."),
    "list": ("kimi_hal.cli.list", "Print the support matrix of every installed backend."),
    "new-backend": ("kimi_hal.cli.new_backend", "Write the package of a new backend, ready to run."),
    "step": ("kimi_hal.cli.step", "Run one decode step of each kind of layer and measure it."),
}


class LazyGroup(click.Group):
    """A group that knows its commands by name and imports one when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in order."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of one command."""
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(COMMANDS[cmd_name][0]).command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands from the table, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in self.list_commands(ctx)])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Name the nearest command for an unknown one."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            ctx.fail(f"no command {args[0]!r}{nearest(args[0], COMMANDS)}")
        return super().resolve_command(ctx, args)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kimi-hal")
def cli() -> None:
    """Kimi K3.1 Pro's operators on whatever accelerator is here: chosen, explained, checked."""


def main(args: list[str] | None = None) -> Any:
    """Run the command line; an error of ours is one sentence and exit status 2, never a traceback."""
    try:
        return cli.main(args=args, prog_name="kimi-hal", standalone_mode=True)
    except KimiHalError as error:
        click.echo(f"kimi-hal: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
