"""Which values of a declared domain are tried."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from kimi_hal.dispatch import fields
from kimi_hal.dispatch.fields import Leaf
from kimi_hal.domain import Domain, OneOf, Range
from kimi_hal.presets import Deployment

#: Numbers that fit no tile, from which a range is tried inside.
AWKWARD = (5, 3, 7, 11, 13, 60, 2, 1)
#: A range of real numbers is tried this far from its low end to its high end, or to one past the low one.
INSIDE = 0.37


def tried(domain: Domain, first: Any, model: Any) -> list[Any]:
    """Return the values of a domain that are tried, the one to begin from first.

    Args:
        domain: what is declared.
        first: where to begin, if it is declared: a small value, or the Spec's default.
        model: the model's own value, or ``None``.

    Returns:
        Of a list all values; of a range the first, an awkward one inside, the model's and both ends.
    """
    values = domain.values if isinstance(domain, OneOf) else tuple(_of_range(domain, model))
    wanted = [first] if first in domain else []
    for value in values:
        if not any(type(value) is type(v) and value == v for v in wanted):
            wanted.append(value)
    return wanted


def _of_range(domain: Range, model: Any) -> Iterator[Any]:
    if isinstance(domain.low, int) and isinstance(domain.high, int):
        low = -(-domain.low // domain.multiple) * domain.multiple
        high = domain.high // domain.multiple * domain.multiple
        yield from [n for n in (m * domain.multiple for m in AWKWARD) if low < n < high][:1]
    else:
        yield from _inside(domain.low, min(domain.high, domain.low + 1))
        yield from (v for v in (model, domain.low, domain.high) if v in domain and math.isfinite(v))
        return
    yield from (v for v in (model, low, high) if v in domain)


def _inside(low: float, high: float) -> Iterator[float]:
    if math.isfinite(low) and math.isfinite(high) and low < high:
        yield low + INSIDE * (high - low)


def smaller(value: int, domain: Range, than: int) -> int | None:
    """Return a smaller value of a range than ``value``, or ``None`` where none is left above ``than``."""
    half = value // 2 // domain.multiple * domain.multiple
    return half if half > than and half in domain else None


def of_model(operator: str) -> dict[str, Any]:
    """Return the model's own value of every field of an operator's Spec."""
    return fields.values(Deployment().specs()[operator])


def legal(leaf: Leaf) -> list[Any]:
    """Return ``[None]`` where that is covered without being named: it is the field's default."""
    return [None] if leaf.optional and leaf.default is None else []
