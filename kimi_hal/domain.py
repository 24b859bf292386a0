"""Sets of legal values, as data: what a Spec field may hold and what a capability covers.

No callables: a domain can be printed in a support matrix, compared, walked pairwise by the conformance
suite and quoted in a refusal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class OneOf:
    """Membership in an explicit tuple of values."""

    values: tuple[Any, ...]

    def __contains__(self, value: object) -> bool:
        # 1 == True and 0 == False in Python; a flag is not a number here.
        return any(type(value) is type(v) and value == v for v in self.values)

    def __str__(self) -> str:
        return " | ".join(repr(v) if isinstance(v, str) else str(v) for v in self.values)


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``, both included, that are whole multiples of ``multiple``.

    ``multiple`` constrains integers only; a float inside the bounds is always covered.
    """

    low: float
    high: float
    multiple: int = 1

    def __contains__(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        if not self.low <= value <= self.high:
            return False
        return not isinstance(value, int) or value % self.multiple == 0

    def __str__(self) -> str:
        step = f", a multiple of {self.multiple}" if self.multiple != 1 else ""
        low, high = (str(n) if isinstance(n, int) else f"{n:g}" for n in (self.low, self.high))
        return f"{low} to {high}{step}"


Domain = OneOf | Range
