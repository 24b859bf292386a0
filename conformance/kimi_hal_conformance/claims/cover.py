"""Rows that together hold every wanted combination of values: a small greedy covering array, the same each time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]
#: Field and index of a value, one or two of them.
Target = tuple[tuple[str, int], ...]
#: What becomes of a row of which some fields are to stay: its fields as a Spec ties them, or why there is none
#: (``None``: it is no claim).
Settle = Callable[[Row, Row], "Row | str | None"]
#: Earlier rows on which a combination is tried before it counts as none.
REMEMBERED = 12
NO_LEADING: Mapping[str, Sequence[Any]] = {}


@dataclass
class Covering:
    """The rows, and the combinations that are claimed but too large to be tried.

    ``wanted`` counts the combinations that are claims; ``untried`` those that were not looked at, claims or not.
    """

    rows: list[Row] = field(default_factory=list)
    left_out: dict[Target, str] = field(default_factory=dict)
    wanted: int = 0
    untried: int = 0


def targets(values: Mapping[str, Sequence[Any]], strength: int) -> Iterator[Target]:
    """Yield every combination of ``strength`` values of as many fields."""
    for names in combinations(values, min(strength, len(values))):
        for indices in product(*(range(len(values[name])) for name in names)):
            yield tuple(zip(names, indices, strict=True))


def covering(
    values: Mapping[str, Sequence[Any]],
    strength: int,
    settle: Settle,
    leading: Mapping[str, Sequence[Any]] = NO_LEADING,
    most: int | None = None,
) -> Covering:
    """Return rows that hold every combination of ``strength`` values that is a claim at all.

    Args:
        values: by field, the one to begin from first.
        strength: 1: each value once; 2: each pair.
        settle: returns the row as a Spec ties it, a reason why it is too large, or ``None``.
        leading: the fields on which it depends what others may be, with their values but for the first.
        most: rows, of which the first cover as much as one row can; what these leave is in ``untried``.
    """
    pending = dict.fromkeys(targets(values, strength))
    found = Covering()
    base = {name: options[0] for name, options in values.items()}
    while pending and (most is None or len(found.rows) < most):
        target = next(iter(pending))
        starts = _starts(base, leading, found.rows)
        row = _holding(target, values, starts, settle)
        if not isinstance(row, dict):
            del pending[target]
            if row is not None:
                found.left_out[target] = row
            continue
        row = _filled(row, target, values, pending, settle)
        found.rows.append(row)
        for covered in _within(row, values, strength):
            found.wanted += pending.pop(covered, 0) is None
        pending.pop(target, None)
    found.wanted += len(found.left_out)
    found.untried = len(pending)
    return found


def _holding(
    target: Target, values: Mapping[str, Sequence[Any]], starts: Iterator[Row], settle: Settle
) -> Row | str | None:
    """Return a row that holds a combination, why it is too large, or ``None`` where it is no claim.

    What is too large where all else is as it begins, small, is too large.
    """
    chosen = {name: values[name][index] for name, index in target}
    for start in starts:
        settled = settle(start | chosen, chosen)
        if settled is not None:
            return settled
    return None


def _starts(base: Row, leading: Mapping[str, Sequence[Any]], rows: Sequence[Row]) -> Iterator[Row]:
    """Yield what a combination is put into: the base, the latest rows, the base with other leading values."""
    yield base
    yield from rows[-REMEMBERED:]
    for name, options in leading.items():
        yield from ({**base, name: value} for value in options)


def _filled(
    row: Row,
    target: Target,
    values: Mapping[str, Sequence[Any]],
    pending: Mapping[Target, Any],
    settle: Settle,
) -> Row:
    """Give every other field the value that covers the most of what is pending."""
    strength, fixed = len(target), {name: values[name][index] for name, index in target}
    best = sum(t in pending for t in _within(row, values, strength))
    for name in (n for n in values if n not in fixed):
        for value in values[name]:
            if same(row.get(name), value):
                continue
            settled = settle({**row, name: value}, fixed)
            if not isinstance(settled, dict):
                continue
            gain = sum(t in pending for t in _within(settled, values, strength))
            if gain > best:
                best, row = gain, settled
    return row


def _within(row: Row, values: Mapping[str, Sequence[Any]], strength: int) -> Iterator[Target]:
    """Yield the combinations that a row holds."""
    present = []
    for name, options in values.items():
        index = next((i for i, value in enumerate(options) if same(row.get(name), value)), None)
        if index is not None:
            present.append((name, index))
    return combinations(present, min(strength, len(values)))


def same(a: Any, b: Any) -> bool:
    """Compare values as a domain does: a flag is no number."""
    return type(a) is type(b) and bool(a == b)
