"""The builders of every mutant, by name: ``build_<id>``, ``weights_<id>``, ``sizes_<id>``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kimi_hal_conformance.mutants.catalogue import load
from kimi_hal_conformance.mutants.clone import OPERATOR_PARTS, Clone

#: What a name begins with -> the module of the reference that has that function.
WHERE = {"build": "reference.backend", "weights": "reference.weights", "sizes": "reference.sizes"}


def clone(mutant_id: str) -> Clone:
    """Return the copy of the reference in which a mutant's line is changed."""
    return Clone(f"kimi_hal_mutant_{mutant_id}", OPERATOR_PARTS, load()[mutant_id])


def __getattr__(name: str) -> Callable[..., Any]:
    kind, _, mutant_id = name.partition("_")
    if kind not in WHERE or mutant_id not in load():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    fn: Callable[..., Any] = getattr(clone(mutant_id).module(WHERE[kind]), kind)
    return fn
