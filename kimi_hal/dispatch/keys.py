"""The key of a plan: the same text for the same meaning, sizes, implementation and source, in every process.

A compiled graph holds it and looks its plan up by it. Ranks compare another text, in which what must differ
from rank to rank (the rank itself, its first expert) is left out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from kimi_hal.ops.spec import Limits, Spec

#: Fields that differ between the ranks of a group by nature.
OWN = ("rank", "expert_offset")


def key(
    operator: str,
    spec: Spec,
    limits: Limits,
    implementation: str,
    source_hash: str,
    rank: tuple[int, int] | None = None,
    configuration: Mapping[str, int] | None = None,
) -> str:
    """Return 64 hexadecimal digits.

    Args:
        operator: its name.
        spec: its Spec.
        limits: its Limits.
        implementation: full name.
        source_hash: ``sources.source_hash`` of that implementation.
        rank: (rank, world) of the group that the plan has, ``None`` without one.
        configuration: what its builder was told.
    """
    parts = [operator, spec.to_dict(), limits.to_dict(), implementation, source_hash, rank]
    parts += [dict(configuration)] if configuration else []
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def shared(operator: str, spec: Spec, limits: Limits, implementation: str, source_hash: str) -> str:
    """Return what every rank of a group must have decided alike, readable."""
    fields = json.dumps(_without_own(spec.to_dict()), sort_keys=True)
    sizes = json.dumps(limits.to_dict(), sort_keys=True)
    return f"{implementation} for {operator}, source {source_hash[:12]}, {fields}, {sizes}"


def _without_own(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_own(inner) for name, inner in value.items() if name not in OWN}
    return value
