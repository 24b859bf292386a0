"""Whole numbers as callers give them: Python's, numpy's, those of one-element tensors; no float, and no bool."""

from __future__ import annotations

import operator
from typing import Any

from kimi_hal.errors import CacheError


def whole(name: str, value: Any, least: int | None = None) -> int:
    """Return a number as an int, so that nothing is computed in float or in the 32 bits of a tensor.

    Raises:
        CacheError: it is not a whole number, or less than ``least``; ``name`` begins the sentence.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise CacheError(f"{name} must be a whole number, got {type(value).__name__} {value!r}") from None
    if least is not None and number < least:
        raise CacheError(f"{name}={number} must be at least {least}")
    return number
