"""``kimi-hal explain``: who would compute an operator, and every reason against the others."""

from __future__ import annotations

import dataclasses
import json

import click

from kimi_hal.ops.operator import get
from kimi_hal.ops.spec import Limits, Spec


@click.command(name="explain")
@click.argument("operator")
@click.option("--tp", default=8, show_default=True, help="Tensor-parallel size of the model's own Spec.")
@click.option(
    "--spec",
    "fields",
    metavar="JSON",
    default="{}",
    help='Spec fields to change, {"num_heads": 64} or {"numerics": ["logits=fp8_sum"]}.',
)
@click.option("--rows", default=256, show_default=True, help="Query rows of one call, at most.")
@click.option(
    "--rows-per-req",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Of these, rows of one request: 1 in decode, all of them in one request's prefill.",
)
@click.option("--context", default=1 << 20, show_default=True, help="Tokens of a request, at most.")
@click.option("--device", metavar="DEVICE", help="A torch device; default: where the settings lead.")
@click.option("--implementation", metavar="NAME", help="Ask for this one, backend.implementation.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
@click.pass_context
def command(
    ctx: click.Context,
    operator: str,
    tp: int,
    fields: str,
    rows: int,
    rows_per_req: int,
    context: int,
    device: str | None,
    implementation: str | None,
    as_json: bool,
) -> None:
    """Say which implementation OPERATOR gets for Kimi K3.1 Pro, and why not the others.

    Nothing is built. Exit status: 0, something fits; 1, nothing does; 2, what was asked for does not exist.
    """
    from kimi_hal.dispatch.explain import explain

    limits = Limits(
        max_rows=rows, max_reqs=-(-rows // rows_per_req), max_context=context, rows_per_req=rows_per_req
    )
    answer = explain(
        operator, spec_of(operator, tp, fields), limits, device=device, implementation=implementation
    )
    click.echo(json.dumps(answer.to_dict(), indent=2) if as_json else str(answer))
    ctx.exit(0 if answer.chosen else 1)


def spec_of(operator: str, tp: int, fields: str) -> Spec:
    """Return the model's own Spec with some fields changed."""
    from kimi_hal.presets import Deployment

    get(operator)
    try:
        changes = json.loads(fields)
    except json.JSONDecodeError as error:
        raise click.BadParameter(f"--spec is not JSON: {error}") from error
    if not isinstance(changes, dict):
        raise click.BadParameter(f"--spec must be a JSON object, got {fields}")
    try:
        spec = Deployment(tp=tp).specs()[operator]
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    return type(spec).from_dict({**spec.to_dict(), **changes}) if changes else dataclasses.replace(spec)
