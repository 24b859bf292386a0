"""The builders of every mutant, by name: ``build_<id>``, ``prepare_<id>``, ``weights_<id>``, ``sizes_<id>``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from kimi_hal.dispatch.contract import BuildContext, Sizes
from kimi_hal_conformance.mutants.catalogue import load
from kimi_hal_conformance.mutants.clone import OPERATOR_PARTS, Clone

#: What a name begins with -> the module of the reference that has that function.
WHERE = {"build": "reference.backend", "weights": "reference.weights"}


def sized(mutant_id: str) -> Callable[..., Sizes]:
    """Return the function of a mutant's sizes: what its copy of the reference needs, and what it asks for itself."""
    mutant, own = load()[mutant_id], clone(mutant_id).module("reference.sizes").sizes

    def sizes(spec: Any, limits: Any, arch: str) -> Sizes:
        found: Sizes = own(spec, limits, arch)
        return dataclasses.replace(found, workspace=mutant.workspace, step=mutant.step * limits.max_rows)

    return sizes


def prepared(mutant_id: str) -> Callable[..., Any]:
    """Return the builder of what fills a mutant's step, which its run function carries."""

    def prepare(ctx: BuildContext) -> Any:
        return clone(mutant_id).module("reference.backend").build(ctx).prepare

    return prepare


#: What a name begins with -> what makes that function otherwise.
MADE: dict[str, Callable[[str], Callable[..., Any]]] = {"prepare": prepared, "sizes": sized}


def clone(mutant_id: str) -> Clone:
    """Return the copy of the reference in which a mutant's line is changed."""
    return Clone(f"kimi_hal_mutant_{mutant_id}", OPERATOR_PARTS, load()[mutant_id])


def __getattr__(name: str) -> Callable[..., Any]:
    kind, _, mutant_id = name.partition("_")
    if kind not in {*WHERE, *MADE} or mutant_id not in load():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if kind in MADE:
        return MADE[kind](mutant_id)
    fn: Callable[..., Any] = getattr(clone(mutant_id).module(WHERE[kind]), kind)
    return fn
