"""A model, not a measurement: decode over 2 to 64 ranks and up to a million tokens, on machines not at hand.

Bytes follow from the protocols, times from figures of kernels and links that ``benchmarks/scale/figures.json`` gives
with their sources, capacity from the cache's planner. ``docs/scale.md`` says what follows.
"""

from __future__ import annotations

from typing import Any

from benchmarks.record import keep
from benchmarks.scale import findings, tables

SECTIONS = ("published", "fit", "messages", "times", "layers", "capacities")


def compute() -> dict[str, list[dict[str, Any]]]:
    """Return every section's rows."""
    return {name: [*getattr(findings, name)()] for name in SECTIONS}


def main() -> None:
    """Compute, print and keep."""
    result = compute()
    for name, text in tables.all_tables(result).items():
        print(f"\n{name}\n\n{text}")
    keep("scale_model", {"what": "a model, not a measurement", **result})


if __name__ == "__main__":
    main()
