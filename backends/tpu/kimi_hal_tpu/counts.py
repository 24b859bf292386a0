"""Numbers of things: whole, and 1 or more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def not_counts(given: Mapping[str, Any]) -> list[str]:
    """Return ``name=value`` of each value that is no integer of 1 or more; a bool is none."""
    return [
        f"{name}={value!r}"
        for name, value in given.items()
        if isinstance(value, bool) or not isinstance(value, int) or value < 1
    ]
