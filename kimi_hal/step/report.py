"""The step's rows as a table and as JSON, and the indexer's picks as readable text."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from kimi_hal.ops.indexer import IndexerTopKSpec
from kimi_hal.reference.backend import function
from kimi_hal.step.attention import AttentionStep
from kimi_hal.step.measure import Row

#: What the columns of the rows' table are.
COLUMNS = (
    "time: of one call, by itself. bytes: what the operator must read and write at least. error: against float64, "
    "relative; exact or not where results are discrete."
)
#: What is said of a step that the reference ran.
PLAIN = " The reference is written to be read: its times say nothing of an accelerator."


def rows_table(rows: list[Row], title: str) -> Table:
    """Return one line an operator, and below them what the columns are."""
    plain = any(row.implementation.startswith("reference.") for row in rows)
    table = _table(title, COLUMNS + PLAIN * plain)
    table.add_column("operator", no_wrap=True)
    table.add_column("implementation", overflow="fold")
    for name in ("time", "bytes", "GB/s", "error"):
        table.add_column(name, no_wrap=True, justify="right")
    for row in rows:
        ran = row.implementation if row.execution == "native" else f"{row.implementation} ({row.execution})"
        rate = f"{row.bytes / row.seconds / 1e9:.2g}" if row.seconds else "–"
        table.add_row(row.operator, ran, duration(row.seconds), amount(row.bytes), rate, error(row))
    return table


def _table(title: str | Text, caption: str = "") -> Table:
    """Return an empty table of the form that fits a terminal of 80 columns."""
    return Table(
        title=title,
        caption=caption or None,
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )


def duration(seconds: float) -> str:
    """Return seconds in a unit that reads well."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return f"{seconds / scale:.2f} {unit}"
    return f"{seconds * 1e6:.0f} µs"


def amount(count: int) -> str:
    """Return bytes in a unit that reads well."""
    size, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def error(row: Row) -> str:
    """Return the error as it is judged: discrete results are exact or not."""
    if row.error == 0:
        return "exact"
    return f"{row.error:.2%} differ" if row.discrete else f"{row.error:.1e}"


def picks_table(attention: AttentionStep, inputs: Any, count: int) -> Table:
    """Return the best keys that the indexer found for the batch's last query, with the text around them."""
    scores, position = best(attention), attention.context - 1
    table = _table(
        Text.assemble(f"Best keys of the indexer for the query at {position}: ", context_of(inputs, position))
    )
    for name in ("rank", "position", "score"):
        table.add_column(name, justify="right")
    table.add_column("where")
    table.add_column("the key's token, and the text around it", overflow="fold")
    for rank, (score, key) in enumerate(scores[:count], 1):
        where = inputs.place(key) if hasattr(inputs, "place") else "–"
        table.add_row(str(rank), str(key), f"{score:.2f}", where, context_of(inputs, key))
    return table


def best(attention: AttentionStep) -> list[tuple[float, int]]:
    """Return (score, position) of the last row's picks, best first."""
    fields = attention.specs["indexer_topk"].to_dict() | {"return_selected": True}
    spec = IndexerTopKSpec.from_dict(fields)
    indices, scores = function_on(attention, spec)
    live = indices[-1] >= 0
    order = scores[-1][live].argsort(descending=True, stable=True)
    return [(float(scores[-1][live][i]), int(indices[-1][live][i])) for i in order]


def function_on(attention: AttentionStep, spec: IndexerTopKSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the reference selects for the last row, with its scores."""
    from kimi_hal.ops.operator import get

    q, weights = attention.inputs.index_query(slice(attention.context - 1, attention.context))
    quantised = function(get("quantize_index_query"))(attention.specs["quantize_index_query"], q, weights)
    scored = attention.scored(*quantised)
    last = {name: scored[name][-1:] for name in ("row_req", "row_len")}
    operands = {name: value.cpu() for name, value in (scored | last).items()}
    found: tuple[torch.Tensor, torch.Tensor] = function(get("indexer_topk"))(spec, **operands)
    return found


def context_of(inputs: Any, position: int, around: int = 4) -> Text:
    """Return the text around a position on one line, its token marked; its number where there is no text."""
    if not hasattr(inputs, "source"):
        return Text(f"token {position}")
    source = inputs.source
    begin = int(source.start[position])
    before = source.content[int(source.start[max(position - around, 0)]) : begin]
    token, window = source.token(position), source.around(position, around)
    after = window[len(before) + len(token) :]
    return Text.assemble(one_line(before), (f"»{token}«", "bold"), one_line(after))


def one_line(text: str) -> str:
    """Return text with every run of white space as one space."""
    return re.sub(r"\s+", " ", text)


def write_json(rows: list[Row], step: Any, path: Path) -> None:
    """Write the rows with what they were measured on."""
    about = {"title": step.title, "versions": step.hooks.versions(), "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(about, indent=2) + "\n")
