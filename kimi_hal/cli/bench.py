"""``kimi-hal bench``: time every implementation that fits here; with ``--tune`` write down which was fastest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from kimi_hal.errors import TableError, nearest
from kimi_hal.presets import INDEX, LATENT

ROWS = (1, 8, 64, 512, 4096)
LENGTHS = (8192, 32768, 131072, 1048576)
#: Scores of one call at most: more than a plan of logits is made for.
SCORES = 1 << 28
#: Where a request's keys are read for all of its rows: so many rows are of as many requests, and more are of one.
ALONE = 64


@click.command(name="bench")
@click.argument("operators", nargs=-1)
@click.option(
    "--tune", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write the table here."
)
@click.option(
    "--tp", multiple=True, type=int, default=(8,), show_default=True, help="Tensor-parallel size; repeatable."
)
@click.option(
    "--index", multiple=True, default=(INDEX,), metavar="FORMAT", help="Format of index keys; repeatable."
)
@click.option(
    "--latent", multiple=True, default=(LATENT,), metavar="FORMAT", help="Format of latents; repeatable."
)
@click.option("--rows", multiple=True, type=int, default=ROWS, help="Query rows of a call; repeatable.")
@click.option("--length", multiple=True, type=int, default=LENGTHS, help="Keys of a row; repeatable.")
@click.option("--budget", default=0.02, show_default=True, help="Seconds of device time for each candidate.")
@click.option("--implementation", "only", multiple=True, metavar="NAME", help="This one alone; repeatable.")
@click.option("--without", multiple=True, metavar="NAME", help="Leave this one out; repeatable.")
@click.option("--device", metavar="DEVICE", help="A torch device; default: where the settings lead.")
def command(operators: tuple[str, ...], tune: Path | None, device: str | None, **options: Any) -> None:
    """Time the implementations of OPERATORS (default: all that it has operands for) on this device.

    Sizes are powers of two. A plan made later takes the nearest class, no farther than four times in any size. The
    table is used where KIMI_HAL_<BACKEND>_TUNE names it, or where the backend ships it.
    """
    from kimi_hal.dispatch import policy
    from kimi_hal.dispatch.tuned_file import text
    from kimi_hal.tuning.tune import Bench, Question

    wanted = chosen(operators)
    settings = policy.settings()
    question = Question(
        specs={name: specs(name, options) for name in wanted},
        shapes={name: shapes(name, options["rows"], options["length"]) for name in wanted},
        budget=options["budget"],
        only=options["only"],
        without=options["without"],
        choices=tune is not None,
    )
    bench = Bench(question, settings, policy.registry(settings), device, click.echo)
    for table in bench.tables(str(tune or "")):
        if tune is not None and table.lines:  # after each line: what an interrupted run found is kept
            tune.write_text(text(table), encoding="utf-8")
    click.echo(f"{table.device} ({table.arch}), {table.measured}: {len(table.lines)} lines")
    if tune is None:
        return
    if not table.lines:
        raise TableError(f"{tune} is not written: no class was measured. What left each out stands above.")
    click.echo(f"written to {tune}")


def chosen(operators: Sequence[str]) -> list[str]:
    """Return the operators to measure, all of them where none is named."""
    from kimi_hal.tuning.operands import OPERANDS

    for name in operators:
        if name not in OPERANDS:
            raise click.BadParameter(
                f"no operands for {name!r}{nearest(name, OPERANDS) or '.'} Possible: {', '.join(OPERANDS)}"
            )
    return list(operators or OPERANDS)


def specs(operator: str, options: dict[str, Any]) -> list[Any]:
    """Return the model's own Specs of an operator over tensor-parallel sizes and formats, each once."""
    from kimi_hal.dispatch.shapes import decisive
    from kimi_hal.presets import Deployment

    found: dict[str, Any] = {}
    for tp in options["tp"]:
        for index in options["index"]:
            for latent in options["latent"]:
                try:
                    spec = Deployment(tp=tp, index=index, latent=latent).specs()[operator]
                except ValueError as error:
                    raise click.BadParameter(str(error)) from error
                found.setdefault(str(decisive(operator, spec)), spec)
    return list(found.values())


def shapes(operator: str, rows: Sequence[int], lengths: Sequence[int]) -> list[Any]:
    """Return the classes of shapes to measure, each once."""
    from kimi_hal.dispatch.shapes import CONTEXT, SELECTED, Shape, kind, power
    from kimi_hal.model import K3_1_PRO

    own = kind(operator)
    keys = {CONTEXT: [power(n) for n in lengths], SELECTED: [power(K3_1_PRO.topk)]}.get(own.keys, [1])
    found = (
        Shape(count, count if own.together and count > ALONE else 1, length)
        for count in map(power, rows)
        for length in keys
        if own.keys != CONTEXT or count * length <= SCORES
    )
    return list(dict.fromkeys(found))
