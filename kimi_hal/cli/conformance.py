"""``kimi-hal conformance``: hand over to the suite, a distribution of its own."""

from __future__ import annotations

import importlib.util

import click


@click.command(
    name="conformance",
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
    add_help_option=False,
)
@click.pass_context
def command(ctx: click.Context) -> None:
    """Check a backend against the reference; every option goes to the suite (``conformance --help``)."""
    if importlib.util.find_spec("kimi_hal_conformance") is None:
        raise click.ClickException(
            "the conformance suite is not installed; install it with: pip install kimi-hal-conformance"
        )
    from kimi_hal_conformance.cli import cli

    cli.main(args=ctx.args, prog_name="kimi-hal conformance", standalone_mode=True)
