"""One operator call of the step: its operands, and the bytes that it cannot avoid moving."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kimi_hal.ops.spec import Limits, Spec

#: Yields calls and is sent what each returned, as a tuple.
Steps = Generator["Call", tuple[Any, ...], None]


@dataclass(frozen=True)
class Call:
    """One call.

    Args:
        operator: its name.
        spec: its Spec.
        limits: its sizes.
        operands: tensors and scalars by name. ``weights`` may be a mapping of checkpoint tensors: the plan
            then makes its own of them.
        touched: bytes really moved of an operand that is a pool (a cache, a state pool, weights), by name;
            every other operand counts whole.
    """

    operator: str
    spec: Spec
    limits: Limits
    operands: Mapping[str, Any]
    touched: Mapping[str, int] = field(default_factory=dict)

    def bytes(self, results: tuple[Any, ...]) -> int:
        """Return the useful bytes of one call: each operand read once, each result written once."""
        total = sum(self.touched.get(name, size(value)) for name, value in self.operands.items())
        return total + sum(size(result) for result in results)


def size(value: Any) -> int:
    """Return the bytes of a tensor, of several, or 0 for a scalar."""
    if isinstance(value, Mapping):
        return sum(size(v) for v in value.values())
    if isinstance(value, list | tuple):
        return sum(size(v) for v in value)
    return int(value.nbytes) if hasattr(value, "nbytes") else 0
