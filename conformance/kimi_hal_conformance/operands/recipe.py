"""What makes small, legal operands for any Spec of an operator: one recipe an operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kimi_hal_conformance.case import Make

#: Dotted Spec fields by value, as a walk over claims chooses them.
Fields = dict[str, Any]


def no_ranks(spec: Any) -> int:
    """Say that an operator is called without a group."""
    return 0


def itself(rows: int) -> int:
    """Say that a call has as many rows as it is asked for."""
    return rows


def unbound(fields: Fields) -> None:
    """Leave every field as it was chosen."""


@dataclass(frozen=True)
class Recipe:
    """How to try one operator under any Spec that it has.

    Args:
        make: ``make(spec, rows)`` returns what draws operands of at most so many rows or sequences.
        nbytes: ``nbytes(spec, rows)`` is about what the operands, and the oracle in float64, hold at once.
        ranks: of a loopback group, by Spec; 0: none.
        bind: gives fields that a Spec ties to others their only legal values.
        tied: the fields that ``bind`` always gives: they are chosen with others, never by themselves.
        leading: fields on which it depends what other fields may be.
        small: values to begin from where the Spec's defaults are the model's own sizes.
        rows: of one call, or its sequences.
        total: the rows of a call with so many rows or sequences.
        rows_per_req: that the operands need of Limits.
        max_context: that the operands need of Limits.
    """

    make: Callable[[Any, int], Make]
    nbytes: Callable[[Any, int], int]
    ranks: Callable[[Any], int] = no_ranks
    bind: Callable[[Fields], None] = unbound
    tied: frozenset[str] = frozenset()
    leading: tuple[str, ...] = ()
    small: Mapping[str, Any] = field(default_factory=dict)
    rows: int = 3
    total: Callable[[int], int] = itself
    rows_per_req: int = 1
    max_context: int = 4096
