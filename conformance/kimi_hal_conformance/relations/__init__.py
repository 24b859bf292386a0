"""Relations between calls: what must hold of other data, orders, cuts and histories if it holds of one call.

None knows the operator's formula. Each is tried on any case of an operator that has what the relation is about;
what the calls give is compared in bits where the implementation declares that, and else held to the oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kimi_hal_conformance.relations.concurrent import concurrent
from kimi_hal_conformance.relations.ground import Ground, invariant
from kimi_hal_conformance.relations.histories import chunks, continues, reuse, starts_anew, steps
from kimi_hal_conformance.relations.in_place import in_place, sharing
from kimi_hal_conformance.relations.padding import padding, pads
from kimi_hal_conformance.relations.purity import purity
from kimi_hal_conformance.relations.rows import permutation, rearranges, split


@dataclass(frozen=True)
class Relation:
    """One relation.

    Args:
        name: of it, as the report says it.
        applies: tells whether a case has what it is about.
        problems: tries it.
        bits: it compares the bits of rows where those are declared, and is then named ``<name>_bits``.
    """

    name: str
    applies: Callable[[Ground], bool]
    problems: Callable[[Ground], Iterator[str]]
    bits: bool = False

    def called(self, ground: Ground) -> str:
        """Return its name for a case."""
        return f"{self.name}_bits" if self.bits and invariant(ground) else self.name


RELATIONS = (
    Relation("purity", lambda ground: True, purity),
    Relation("padding", pads, padding),
    Relation("permutation", rearranges, permutation, bits=True),
    Relation("split", rearranges, split, bits=True),
    Relation("chunks", continues, chunks),
    Relation("steps", lambda ground: ground.case.operator == "kda_decode", steps),
    Relation("reuse", starts_anew, reuse),
    Relation("in_place", lambda ground: bool(sharing(ground)), in_place),
    Relation("concurrent", lambda ground: ground.promised.concurrent, concurrent),
)
