"""A case that is made of a claim: what it is, in words that a process can be told, and the case itself."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgspec

from kimi_hal import ops
from kimi_hal.dispatch import fields
from kimi_hal.ops.spec import Limits
from kimi_hal_conformance.case import Case
from kimi_hal_conformance.claims import layout
from kimi_hal_conformance.operands import RECIPES

#: What stands in the id of a case that is made of a claim.
MARK = "claims"


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """One combination of what an implementation claims.

    Args:
        operator: the abstract operator.
        spec: ``Spec.key()``.
        limits: ``Limits.key()``.
        rows: rows, or sequences, of the call.
        dtypes: of operands that may have several, by name.
        shifts: bytes by which operands begin past an aligned address, by name: the least that is declared.
        gaps: bytes between the rows of operands, by name.
        aligned: what is demanded of operands' strides (``layout.demanded``).
        differs: the fields that differ from their defaults, for a reader.
    """

    operator: str
    spec: str
    limits: str
    rows: int
    dtypes: dict[str, str] = {}
    shifts: dict[str, int] = {}
    gaps: dict[str, int] = {}
    aligned: dict[str, int] = {}
    differs: str = ""

    @property
    def id(self) -> str:
        """Return the case's id: the same for the same combination, whoever claims it."""
        form = [sorted(given.items()) for given in (self.dtypes, self.shifts, self.gaps, self.aligned)]
        known = (self.spec, self.limits, self.rows, form)
        digest = hashlib.sha256(msgspec.json.encode(known)).hexdigest()
        return f"{self.operator}/{MARK}/{digest[:8]}"


def case(made: Made) -> Case:
    """Return the case that tries a combination."""
    recipe, op = RECIPES[made.operator], ops.get(made.operator)
    spec = op.spec_type.from_json(made.spec)
    draw = recipe.make(spec, made.rows)
    return Case(
        id=made.id,
        operator=made.operator,
        spec=spec,
        limits=Limits.from_json(made.limits),
        make=layout.formed(draw, layout.Form(made.dtypes, made.shifts, made.gaps, made.aligned)),
        ranks=recipe.ranks(spec),
        why=f"What an implementation claims is tried: {made.differs or 'every default'}.",
    )


def differing(spec: object, others: Mapping[str, object]) -> str:
    """Return the fields of a Spec that differ from their defaults, and what else is chosen, as text."""
    known = fields.leaves(type(spec))  # type: ignore[arg-type]
    found = {
        name: value
        for name, value in fields.values(spec).items()  # type: ignore[arg-type]
        if known[name].record is None and value != known[name].default
    }
    return ", ".join(f"{name}={value!r}" for name, value in {**found, **others}.items())


def is_made(case_id: str) -> bool:
    """Tell whether an id is of a case that is made of a claim."""
    return case_id.split("/")[1:2] == [MARK]
