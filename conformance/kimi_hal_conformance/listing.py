"""``kimi-hal conformance list``: every case, with the reason why it exists."""

from __future__ import annotations

import click

from kimi_hal.errors import KimiHalError
from kimi_hal_conformance.asked import PROFILE_NAMES, AskedError


@click.command("list")
@click.option("--operator", metavar="NAME", help="Of this operator alone.")
@click.option("--profile", type=click.Choice(PROFILE_NAMES), help="Of this profile alone.")
@click.option(
    "--fault", type=int, metavar="N", help="Those alone that reproduce this class of docs/faults.md."
)
def listing(operator: str | None, profile: str | None, fault: int | None) -> None:
    """Print the cases: id, the first profile that has it, its class of fault if any, and why it exists.

    Those that an implementation's claims make are not among them: a report has their ids.
    """
    from kimi_hal import ops
    from kimi_hal_conformance.case import CASES
    from kimi_hal_conformance.cases import load
    from kimi_hal_conformance.fault_classes import CLASSES

    load()
    try:
        wanted = None if operator is None else ops.get(operator).name
    except KimiHalError as error:
        raise AskedError(str(error)) from error
    if fault is not None and fault not in CLASSES:
        raise AskedError(
            f"unknown class of fault {fault}: docs/faults.md has {min(CLASSES)} to {max(CLASSES)}"
        )
    found = [
        case
        for case in CASES.values()
        if wanted in (None, case.operator)
        and (profile is None or case.runs_in(profile))
        and fault in (None, case.fault)
    ]
    wide = max((len(case.id) for case in found), default=0)
    for case in found:
        kind = f"fault {case.fault}" if case.fault else ""
        click.echo(f"{case.id:{wide}}  {case.since:8}  {kind:8}  {case.why}")
    if not found:
        raise AskedError("no case is of all that was asked for")
