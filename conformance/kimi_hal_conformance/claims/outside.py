"""Specs one step outside of what is declared: what passes there could be claimed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from kimi_hal import ops
from kimi_hal.dispatch import fields
from kimi_hal.dispatch.contract import Capability, Implementation
from kimi_hal.dispatch.matching import Target
from kimi_hal.domain import Domain, OneOf, Range
from kimi_hal.reference.capabilities import domains
from kimi_hal_conformance.claims.made import Made
from kimi_hal_conformance.claims.walk import ROOM, Space, joined


def outside(implementation: Implementation, target: Target, profile: str) -> Iterator[Made]:
    """Yield a combination for each value next to a declared domain, all else small and declared."""
    op = ops.get(implementation.operator)
    spaces = [(g, Space(op, tuple(g), target, ROOM[profile])) for g in joined(implementation.capabilities)]
    here = [(group, declared) for group, declared in spaces if not declared.elsewhere()]
    for group, declared in here:
        base = {name: options[0] for name, options in declared.values.items()}
        for name, value in _steps(op.spec_type, group):
            wider = Space(op, tuple(_admitting(c, name, value) for c in group), target, ROOM[profile])
            beside = base | {name: value}
            row = wider.settled(beside, {name: value})
            claimed = any(other.settled(beside, {name: value}) is not None for _, other in here)
            if isinstance(row, dict) and not claimed:
                yield wider.made(row)


def _admitting(capability: Capability, name: str, value: Any) -> Capability:
    return dataclasses.replace(capability, spec={**capability.spec, name: OneOf((value,))})


def _steps(spec_type: Any, group: list[Capability]) -> Iterator[tuple[str, Any]]:
    """Yield fields and values that the Spec has and no capability of the group covers."""
    for name, leaf in fields.leaves(spec_type).items():
        if leaf.record is not None:
            continue
        declared = [c.spec[name] for c in group if name in c.spec]
        for domain in domains(leaf):
            for value in _beside(domain, declared):
                if value != leaf.default and not any(value in d for d in declared):
                    yield name, value


def _beside(legal: Domain, declared: list[Domain]) -> Iterator[Any]:
    """Yield what a Spec admits next to what is declared: every other value of a list, a step past each end."""
    if isinstance(legal, OneOf):
        yield from legal.values
        return
    for domain in declared:
        if isinstance(domain, Range) and isinstance(domain.low, int) and isinstance(domain.high, int):
            past = (domain.low - domain.multiple, domain.high + domain.multiple)
            within = (domain.low + 1,) if domain.multiple > 1 else ()
            yield from (value for value in (*past, *within) if value in legal)
