"""``kimi-hal conformance prove``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from kimi_hal.errors import KimiHalError
from kimi_hal_conformance import files
from kimi_hal_conformance.asked import AskedError
from kimi_hal_conformance.interruption import interruptible
from kimi_hal_conformance.show import in_a_folder
from kimi_hal_conformance.terminal import Terminal, say

if TYPE_CHECKING:
    from kimi_hal_conformance.prove import Killed, Proof


@click.command()
@click.option("--only", multiple=True, metavar="ID", help="This mutant alone; may be repeated.")
@click.option("--operator", default="", metavar="NAME", help="The mutants of this operator alone.")
@click.option("--list", "listed", is_flag=True, help="Print the mutants, and run nothing.")
@click.option("--quick", is_flag=True, help="The quick profile's cases alone.")
@click.option(
    "--every", is_flag=True, help="Run all tests over each mutant, not only up to the first that kills it."
)
@click.option("--seed", default=0, show_default=True, help="Seed of the operands.")
@click.option("--lanes", type=click.IntRange(min=1), metavar="N", help="Processes at once.")
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=in_a_folder,
    help="Write JSON here.",
)
@click.pass_context
@interruptible
def prove(
    ctx: click.Context,
    only: tuple[str, ...],
    operator: str,
    listed: bool,
    quick: bool,
    every: bool,
    seed: int,
    lanes: int | None,
    json_path: Path | None,
) -> None:
    """Run the suite over wrong implementations; each must be killed.

    Exit status: 0, all were; 1, one survived, or the proof cannot be written; 2, what was asked for does not exist;
    130, it was interrupted.
    """
    from kimi_hal_conformance import prove as proving
    from kimi_hal_conformance.mutants import catalogue, mutant

    catalogue.load()
    try:
        known = mutant.of(operator)
    except KimiHalError as error:
        raise AskedError(str(error)) from error
    if listed:
        for found in known.values():
            click.echo(f"{found.id}: {found.breaks} ({found.imitates})")
        return
    if operator:
        only = (*only, *(name for name in known if name not in only))
    console = Terminal()
    done = 0

    def told(killed: Killed) -> None:
        nonlocal done
        done += 1
        status.update(f"{done} mutants: {killed.name} {'killed' if killed.killed else 'SURVIVED'}")

    try:
        with console.status("starting") as status:
            proof = proving.run(proving.Wanted(only, quick, every, seed, lanes), told)
    except KimiHalError as error:
        raise AskedError(str(error)) from error
    unwritten = files.unwritten(proof, [(write_json, json_path)])
    print_proof(proof, console)
    for line in unwritten.values():
        say(console, line, "bold red")
    ctx.exit(0 if proof.ok and not unwritten else 1)


def write_json(proof: Proof, path: Path) -> None:
    """Write the proof in its versioned schema."""
    files.write(path, files.as_json(proof))


def print_proof(proof: Proof, console: Console) -> None:
    """Print what killed each mutant, the smallest input that shows it, and the closing line."""
    for found in proof.mutants:
        for line in lines(found, proof.every):
            say(console, line)
    for name in proof.refusing:
        console.print(f"{name} refused a case: it is not on trial there", style="red", highlight=False)
    for why, tests in Counter(proof.untried.values()).items():
        say(console, f"not tried, {tests}: {why}", "yellow")
    say(console, summary(proof), "green" if proof.ok else "red")


def lines(found: Killed, every: bool) -> Iterator[str]:
    """Yield a mutant's lines."""
    yield f"{found.name}: {found.breaks}"
    if not found.killed:
        yield f"    SURVIVED {found.tried} tests"
        return
    first = found.kills[0]
    count = f" ({len(found.kills)} of {found.of} kill it)" if every else ""
    yield f"    killed by {first.test}{count}: {'; '.join(first.problem.splitlines())}"
    part = first.smallest.removeprefix(first.test).removeprefix(", ")
    yield f"    smallest input: {part}: {first.input}" if part else f"    smallest input: {first.input}"


def summary(proof: Proof) -> str:
    """Return the closing line."""
    killed = len(proof.mutants) - len(proof.survivors)
    text = f"{killed} of {len(proof.mutants)} mutants killed ({proof.profile}) in {proof.seconds:.0f} s"
    if proof.survivors:
        text += f"; survivors: {', '.join(proof.survivors)}"
    if proof.every:
        text += f"; {sum(m.by_all for m in proof.mutants)} killed by every test"
    return text
