"""The command line of the builder."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from kimi_hal.errors import KimiHalError
from kimi_hal.model import K3_1_PRO


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Build the real-text workload: activations and experts of a small trained encoder at K3.1's widths.

    Nothing it makes is the output or a weight of Kimi K3.1.
    """


@cli.command()
@click.option(
    "--experts", default=28, show_default=True, help="Experts of the shard, from 0 on; 0: no shard."
)
@click.option("--tokens", default=32768, show_default=True, help="Length of the context.")
@click.option("--seed", default=31, show_default=True, help="Seed of the maps.")
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path), help="Instead of the cache.")
def build(experts: int, tokens: int, seed: int, folder: Path | None) -> None:
    """Build what is not in the cache yet, and print where it lies."""
    from kimi_hal_conformance.workload import build as activations
    from kimi_hal_conformance.workload import experts as shard

    if tokens < 1:
        raise KimiHalError(f"--tokens {tokens}: a workload needs at least one")
    path = activations.activations(tokens, seed, folder)
    _say(f"{tokens:,} tokens", path)
    if experts:
        _say(f"{experts} of {K3_1_PRO.experts} experts", shard.build(experts, seed, folder))


def _say(what: str, path: Path) -> None:
    size = path.stat().st_size
    click.echo(f"{what}: {path} ({size / 2**20:,.1f} MiB)")


def main() -> None:
    """Run the command line; an error of the project ends it with its sentence."""
    try:
        cli()
    except KimiHalError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(1)
