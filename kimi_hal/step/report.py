"""The step's rows as a table and as JSON, and the indexer's picks as readable text."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from rich.text import Text

from kimi_hal.ops.indexer import IndexerTopKSpec
from kimi_hal.reference.backend import function
from kimi_hal.step.attention import AttentionStep
from kimi_hal.step.measure import Row


def rows_table(rows: list[Row], title: str) -> Table:
    """Return one line an operator."""
    table = Table(title=title, title_justify="left")
    for name in ("operator", "implementation", "time", "bytes", "GB/s", "error"):
        table.add_column(
            name, no_wrap=True, justify="left" if name in ("operator", "implementation") else "right"
        )
    for row in rows:
        ran = row.implementation if row.execution == "native" else f"{row.implementation} ({row.execution})"
        rate = f"{row.bytes / row.seconds / 1e9:.3g}" if row.seconds else "–"
        table.add_row(row.operator, ran, duration(row.seconds), amount(row.bytes), rate, error(row))
    return table


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
    if not row.discrete:
        return f"{row.error:.1e}"
    return "exact" if row.error == 0 else f"{row.error:.2%} differ"


def picks_table(attention: AttentionStep, inputs: Any, count: int) -> Table:
    """Return the best keys that the indexer found for the batch's last query, with the text around them."""
    scores, position = best(attention), attention.context - 1
    table = Table("rank", "position", "score", "where", "text around it", title_justify="left")
    query = text_of(inputs, position)
    table.title = Text(f"What the indexer picked for the query at {position}: {query}")
    for rank, (score, key) in enumerate(scores[:count], 1):
        where = inputs.place(key) if hasattr(inputs, "place") else "–"
        table.add_row(str(rank), str(key), f"{score:.2f}", where, Text(text_of(inputs, key)))
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


def text_of(inputs: Any, position: int) -> str:
    """Return the text around a position on one line, or its number where there is no text."""
    if not hasattr(inputs, "text"):
        return f"token {position}"
    return " ".join(inputs.text(position, 4).split())


def write_json(rows: list[Row], step: Any, path: Path) -> None:
    """Write the rows with what they were measured on."""
    about = {"title": step.title, "versions": step.hooks.versions(), "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(about, indent=2) + "\n")
