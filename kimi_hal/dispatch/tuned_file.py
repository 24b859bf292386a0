"""The file of a table of measurements: JSON, a line of the file for each line of the table. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kimi_hal.dispatch.shapes import Shape
from kimi_hal.dispatch.tuned import Entry, Line, Table
from kimi_hal.errors import TableError

SCHEMA = 1


def read(path: Path, label: str) -> Table:
    """Read a table.

    Raises:
        TableError: it cannot be read, is no table, or is of another schema; says where and what.
    """
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TableError(f"{label} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise TableError(f"{label} is no JSON: {error}") from error
    try:
        if not isinstance(held, dict) or held["schema"] != SCHEMA:
            of = held.get("schema") if isinstance(held, dict) else None
            raise TableError(f"{label} is of schema {of!r}, this kimi-hal reads {SCHEMA}")
        texts = {name: _text(held, name) for name in ("backend", "version", "arch", "device", "measured")}
        return Table(label=label, **texts, lines=tuple(_lines(held["lines"], label)))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TableError(f"{label} is no table of measurements: {type(error).__name__}: {error}") from error


def _text(held: Mapping[str, Any], name: str) -> str:
    value = held[name]
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}, not a text")
    return value


def _lines(held: Sequence[Any], label: str) -> Iterator[Line]:
    for number, line in enumerate(held, 1):
        try:
            sizes = {name: int(line["shape"][name]) for name in ("rows", "rows_per_req", "length")}
            if min(sizes.values()) < 1:
                raise ValueError(f"sizes are 1 or more, got {sizes}")
            ranking = tuple(
                Entry(
                    str(e["implementation"]),
                    float(e["us"]),
                    {str(n): int(v) for n, v in e.get("configuration", {}).items()},
                    str(e.get("source", "")),
                )
                for e in line["ranking"]
            )
            yield Line(str(line["operator"]), dict(line["spec"]), Shape(**sizes), ranking)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise TableError(f"{label}, line {number}: {type(error).__name__}: {error}") from error


def text(table: Table) -> str:
    """Return a table as its file holds it: a line of the file for each line of the table."""
    head = {
        "schema": SCHEMA,
        "backend": table.backend,
        "version": table.version,
        "arch": table.arch,
        "device": table.device,
        "measured": table.measured,
    }
    lines = ",\n".join("    " + json.dumps(_line(line), ensure_ascii=False) for line in table.lines)
    body = json.dumps(head, indent=2, ensure_ascii=False)[:-2]
    held = f"\n{lines}\n  " if lines else ""
    return f'{body},\n  "lines": [{held}]\n}}\n'


def _line(line: Line) -> dict[str, Any]:
    return {
        "operator": line.operator,
        "spec": dict(line.spec),
        "shape": asdict(line.shape),
        "ranking": [
            {"implementation": e.implementation, "us": e.us}
            | ({"configuration": dict(e.configuration)} if e.configuration else {})
            | ({"source": e.source} if e.source else {})
            for e in line.ranking
        ],
    }
