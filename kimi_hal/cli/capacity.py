"""``kimi-hal capacity``: tokens and full contexts that a memory holds, by TP, DCP and formats. Imports no torch."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import click

from kimi_hal import formats
from kimi_hal.cache.counting import Capacity, capacity
from kimi_hal.cache.layout import Layout
from kimi_hal.cache.planner import plan
from kimi_hal.errors import CacheError, unknown
from kimi_hal.presets import INDEX, LATENT

#: Short names of the formats that are asked for most.
LATENTS = {"fp8": LATENT, "nvfp4": "latent.nvfp4.352", "bf16": "latent.bf16"}
INDEXES: dict[str, str | None] = {"fp8": INDEX, "mxfp4": "index.mxfp4.page64", "none": None}

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
BINARY = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class Size(click.ParamType[int]):
    """A number of bytes or tokens: ``48GiB``, ``52GB``, or for tokens ``1M``, which is 2^20."""

    def __init__(self, name: str) -> None:
        self.name = name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number; bytes by their unit, tokens in powers of two."""
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"([\d.]+|\.\d+)\s*([kmgt]?)(i?)(b?)", str(value).strip().lower())
        try:
            number = float(found[1]) if found else -1.0
        except ValueError:
            number = -1.0
        if found is None or number < 0:
            self.fail(f"{value!r} is not a size: write 48GiB, 52GB or 1M", param, ctx)
        binary = found[3] or self.name == "TOKENS"
        return round(number * (BINARY if binary else UNITS)[found[2]])


@dataclass(frozen=True)
class Row:
    """One line of the table: what was asked, and what it holds or why it cannot be planned."""

    memory: int
    tp: int
    dcp: int
    latent: str
    index: str
    layout: Layout | None = None
    holds: Capacity | None = None
    problem: str = ""

    def to_dict(self, first: Row) -> dict[str, Any]:
        """Return JSON-ready values."""
        asked = {name: getattr(self, name) for name in ("memory", "tp", "dcp", "latent", "index")}
        if self.layout is None or self.holds is None:
            return asked | {"problem": self.problem}
        groups = {g.name: len(g.places) for g in self.layout.groups}
        return asked | {
            "block_size": self.layout.block_size,
            "groups": groups,
            **self.holds.to_dict(),
            "ratio": self.ratio(first),
        }

    def ratio(self, first: Row) -> float:
        """Return the tokens in contexts relative to the first row of this memory."""
        assert self.holds is not None
        assert first.holds is not None
        return self.holds.contexts / first.holds.contexts

    def cells(self, first: Row) -> tuple[str, ...]:
        """Return the row's words in the table."""
        assert self.holds is not None
        h = self.holds
        return (
            str(self.tp),
            str(self.dcp),
            f"{self.latent}+{self.index}",
            f"{h.bytes_per_token:,g}",
            f"{h.padding:.2%}",
            f"{h.tokens / 1e6:,.2f}M",
            f"{h.context_tokens / 1e6:,.2f}M",
            f"{h.contexts:,.2f}",
            f"{self.ratio(first):.2f}",
        )


@click.command(name="capacity")
@click.option(
    "--memory",
    type=Size("BYTES"),
    multiple=True,
    default=("48GiB",),
    show_default=True,
    help="Of one device.",
)
@click.option("--tp", multiple=True, default=(8,), show_default=True, help="Tensor-parallel size.")
@click.option("--dcp", multiple=True, default=(1, 8), show_default=True, help="Ranks of a DCP group.")
@click.option(
    "--latent",
    multiple=True,
    default=("fp8", "nvfp4"),
    show_default=True,
    metavar="FORMAT",
    help="fp8, nvfp4, bf16, or a name of docs/formats.md.",
)
@click.option(
    "--index",
    multiple=True,
    default=("fp8", "mxfp4"),
    show_default=True,
    metavar="FORMAT",
    help="fp8, mxfp4, a format's name, or none: dense.",
)
@click.option("--block-size", default=1024, show_default=True, help="Tokens of a block, a power of two.")
@click.option("--context", type=Size("TOKENS"), default="1M", show_default=True, help="Tokens of a request.")
@click.option("--states", default=1, show_default=True, help="States kept a request: live, checkpoints.")
@click.option(
    "--reserve", type=Size("BYTES"), default="0", help="Of the memory, bytes that are not for blocks."
)
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def command(as_json: bool, **asked: Any) -> None:
    """Print how many tokens and full contexts of Kimi K3.1 Pro fit a memory."""
    rows = list(table(**asked))
    fits = [row for row in rows if row.holds is not None]
    if not fits:
        raise CacheError(rows[0].problem)
    first = {row.memory: row for row in reversed(fits)}
    if as_json:
        click.echo(json.dumps([row.to_dict(first.get(row.memory, row)) for row in rows], indent=2))
    else:
        show(rows, dict(reversed(first.items())))


def table(
    memory: tuple[int, ...],
    tp: tuple[int, ...],
    dcp: tuple[int, ...],
    latent: tuple[str, ...],
    index: tuple[str, ...],
    block_size: int,
    context: int,
    states: int,
    reserve: int,
) -> Iterator[Row]:
    """Yield a row for each combination; one that cannot be planned carries the sentence that says why."""
    for kind, named, short in (("latent", latent, LATENTS), ("index", index, INDEXES)):
        known = (*short, *formats.names(kind))
        for name in named:
            if name not in known:
                raise unknown(f"{kind} format", name, known)
    for asked in itertools.product(memory, tp, dcp, latent, index):
        size, ranks, spread, rows, keys = asked
        try:
            layout = plan(
                block_size=block_size,
                tp=ranks,
                dcp=spread,
                latent=LATENTS.get(rows, rows),
                index=INDEXES.get(keys, keys),
            )
            holds = capacity(layout, size, context=context, states=states, reserve=reserve)
        except CacheError as error:
            yield Row(*asked, problem=str(error))
        else:
            yield Row(*asked, layout=layout, holds=holds)


def show(rows: list[Row], first: dict[int, Row]) -> None:
    """Print a table for each memory, what its columns mean, and what could not be planned."""
    from rich.console import Console

    console = Console()
    for memory, row in first.items():
        console.print(lines([r for r in rows if r.memory == memory and r.holds is not None], row))
    holds = next(row.holds for row in rows if row.holds is not None)
    console.print(
        f"B/token: bytes that a token takes of one device. tokens: if every block held tokens. usable: in "
        f"requests of {holds.context:,} tokens, each with {holds.states} state(s) kept.",
        highlight=False,
    )
    for problem in dict.fromkeys(f"TP{r.tp} DCP{r.dcp}: {r.problem}" for r in rows if r.problem):
        console.print(problem, style="red", markup=False, highlight=False)


def lines(rows: list[Row], first: Row) -> Any:
    """Return the table of one memory."""
    from rich import box
    from rich.table import Table

    size = first.memory
    made = Table(
        title=f"{size / 1e9:,.1f} GB ({size / (1 << 30):,.1f} GiB) a device",
        box=box.SIMPLE,
        padding=0,
        pad_edge=False,
    )
    for name in ("TP", "DCP", "latent+index", "B/token", "pad", "tokens", "usable", "contexts", "×"):
        made.add_column(name, justify="left" if "+" in name else "right", no_wrap=True)
    for row in rows:
        made.add_row(*row.cells(first))
    return made
