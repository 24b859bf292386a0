"""The model's rows as Markdown tables, those that ``docs/scale.md`` shows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Row = dict[str, Any]


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table: words to the left, numbers to the right."""
    lines = [[str(cell) for cell in row] for row in rows]
    right = [all(line[i][:1].isdigit() for line in lines) for i in range(len(heads))]
    rule = ["--:" if number else "---" for number in right]
    return "\n".join("| " + " | ".join(line) + " |" for line in (heads, rule, *lines))


def all_tables(result: dict[str, list[Row]]) -> dict[str, str]:
    """Return every table by the name of its section."""
    return {
        "Against what is published": table(
            ("", "model", "published"),
            ((r["what"], r["model"], r["published"]) for r in result["published"]),
        ),
        "What is sent": table(
            (
                "W",
                "`full`",
                "`compact`",
                "`scores_only`",
                "`compact` / `full`",
                "second message: a row",
                "a step of 64 rows",
                "of 320",
                "quota that 320 rows need, · k/W",
            ),
            (_message(r) for r in result["messages"]),
        ),
        "The time of a merge": table(
            (
                "on",
                "W",
                "rows",
                "generic",
                "`full`",
                "`compact`",
                "with a quota that suffices",
                "`scores_only`",
            ),
            (_time(r) for r in result["times"] if _shown(r)),
        ),
        "The time of a layer": table(
            ("requests", "context", "TP8", "W = 2", "4", "8", "16", "32", "first", "fits from W"),
            (_layer(r) for r in result["layers"] if r["transport"] == "collective"),
        ),
        "What is held": table(
            ("W", "tokens", "full contexts", "· one rank", "a rank", "states' share"),
            (_capacity(r) for r in result["capacities"]),
        ),
    }


def _message(r: Row) -> tuple[object, ...]:
    chances = (f"{r[name]:.2%}" for name in ("row_again", "step_of_64_again", "step_of_320_again"))
    sizes = (f"{r[name]:,}" for name in ("full", "compact", "scores_only"))
    return (r["world"], *sizes, r["compact_of_full"], *chances, r["quota_for_320"])


def _shown(r: Row) -> bool:
    return r["transport"] == "collective" and r["device"] != "mi355x" and r["world"] in (2, 8, 32, 64)


def _time(r: Row) -> tuple[object, ...]:
    names = ("generic", "full", "compact", "compact_wide", "scores_only")
    return (r["device"], r["world"], r["rows"], *(round(r[name]) for name in names))


def _layer(r: Row) -> tuple[object, ...]:
    times = (round(r[f"w{world}"]) for world in (1, 2, 4, 8, 16, 32))
    first = "TP8" if r["first"] == 1 else f"W = {r['first']}"
    return (r["requests"], f"{r['context'] // 1024:,}K", *times, first, r["held_from"])


def _capacity(r: Row) -> tuple[object, ...]:
    tokens = f"{r['tokens'] / 1e6:.2f}M"
    return (r["world"], tokens, r["contexts"], r["times"], r["times_a_rank"], f"{r['state_share']:.1%}")
