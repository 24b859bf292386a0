"""``kimi-hal step``: one decode step of a DSA, a KDA and a MoE layer at Kimi K3.1 Pro's widths, measured."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from kimi_hal.presets import INDEX, LATENT


@click.command(name="step")
@click.option("--tp", default=8, show_default=True, help="Tensor-parallel size: heads are divided by it.")
@click.option(
    "--context", default=32768, show_default=True, help="Tokens of the sequence, the batch's included."
)
@click.option("--batch", default=4, show_default=True, help="Query rows, one token each.")
@click.option(
    "--latent", default=LATENT, show_default=True, metavar="FORMAT", help="Format of the latent cache."
)
@click.option("--index", default=INDEX, show_default=True, metavar="FORMAT", help="Format of the index keys.")
@click.option(
    "--experts", type=click.Path(path_type=Path), metavar="FILE", help="Checkpoint shard of the experts."
)
@click.option("--local-experts", default=28, show_default=True, help="Experts of this expert-parallel rank.")
@click.option("--expert-tp", default=1, show_default=True, help="Tensor-parallel size inside an expert.")
@click.option("--layer", default=1, show_default=True, help="Layer whose experts are read.")
@click.option(
    "--workload", type=click.Path(path_type=Path), metavar="FILE", help="Activations; default: the cache's."
)
@click.option("--random", is_flag=True, help="Random activations instead of the real-text workload.")
@click.option("--seed", default=0, show_default=True, help="Seed of random activations.")
@click.option("--device", metavar="DEVICE", help="A torch device; default: where the settings lead.")
@click.option(
    "--picks", default=0, metavar="N", help="Show the N best keys that the indexer found for one query."
)
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), metavar="FILE", help="Write the rows as JSON."
)
def command(json_path: Path | None, **options: Any) -> None:
    """Run one decode step of each kind of layer; per operator: who ran it, time, bytes, error."""
    from rich.console import Console

    from kimi_hal.step.report import picks_table, rows_table, write_json

    console = Console()
    try:
        step = prepare(options)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    rows: list[Any] = []
    try:
        rows.extend(with_progress(step, console))
    finally:  # what ran before an operator that a backend lacks is shown all the same
        if rows:
            console.print(rows_table(rows, step.title))
    if options["picks"]:
        console.print()
        console.print(picks_table(step.attention, step.inputs, options["picks"]))
    if json_path:
        write_json(rows, step, json_path)


def prepare(options: dict[str, Any]) -> Any:
    """Return the step that the options describe."""
    from kimi_hal.presets import Deployment
    from kimi_hal.step.step import Step
    from kimi_hal.workload import experts_path

    if not 0 < options["batch"] <= options["context"]:
        raise ValueError(
            f"--batch must be between 1 and --context {options['context']}, got {options['batch']}"
        )
    deployment = Deployment(tp=options["tp"], latent=options["latent"], index=options["index"])
    deployment.specs()  # an unknown format or a size that does not divide is said before anything is read
    step = Step(
        deployment=deployment,
        experts=Deployment(tp=options["expert_tp"], local_experts=options["local_experts"]),
        shard=options["experts"] or experts_path(),
        layer=options["layer"],
        context=options["context"],
        batch=options["batch"],
        workload=options["workload"],
        random=options["random"],
        seed=options["seed"],
        device=options["device"],
    )
    usable(step.target)
    _ = step.inputs  # and so are a workload that is missing, and one that is shorter than the context
    return step


def usable(device: str) -> None:
    """Make sure that tensors can be made on a device, before anything is read.

    Raises:
        ValueError: says what torch says of it, and what to type.
    """
    import torch

    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # AssertionError: a torch that was built without CUDA
        raise ValueError(
            f"torch has no device {device!r} here: {str(error).splitlines()[0]}. --device cpu runs the reference; "
            "KIMI_HAL_EXECUTION=interpreted runs a backend's kernels there"
        ) from error


def with_progress(step: Any, console: Any) -> Iterator[Any]:
    """Fill the caches behind a progress bar, then yield rows as they are measured."""
    from rich.progress import Progress

    with Progress(console=console, transient=True) as progress:
        filling = progress.add_task("filling caches", total=step.context)
        step.fill(lambda tokens: progress.advance(filling, tokens))
        progress.update(filling, completed=step.context)
        running = progress.add_task("running operators", total=None)
        for row in step.rows():
            progress.update(running, description=f"{row.operator} done")
            yield row
