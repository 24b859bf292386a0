"""Every field of every Spec is tried at two values at least, numbers at one that is no power of two."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from kimi_hal import formats, ops
from kimi_hal.domain import OneOf, Range
from kimi_hal.errors import SpecError
from kimi_hal.ops.spec import Record
from kimi_hal_conformance import case as cases
from kimi_hal_conformance.case import QUICK
from kimi_hal_conformance.cases import load
from kimi_hal_conformance.cases.composites import dsa_spec, moe_spec
from kimi_hal_conformance.ranks import at_rank

load()
#: Classes of rounding that are admitted: they change who is chosen, and no result of who is tried by name.
ADMITTED = "numerics"
#: Fields whose other values the Spec around them refuses.
REFUSED: Mapping[str, tuple[tuple[Any, str, Any], ...]] = {
    "dsa_decode": ((dsa_spec(1), "indexer.emit", "slot"), (dsa_spec(2), "merge.dcp.index", "replicated")),
    "moe_layer": ((moe_spec(), "experts.has_expert_map", True),),
}


def leaves(record: Record, path: str = "") -> Iterator[tuple[str, Record, object]]:
    """Yield the path of every field, the record that has it, and its value; a record's is whether it is there."""
    for field in dataclasses.fields(record):
        value, name = getattr(record, field.name), path + field.name
        yield name, record, type(value) if isinstance(value, Record) else value
        if isinstance(value, Record):
            yield from leaves(value, name + ".")


def specs(case: cases.Case) -> Iterator[Record]:
    yield from case.rank_specs or [at_rank(case.spec, rank) for rank in range(case.ranks)] or [case.spec]


def one_legal(record: Record, name: str, value: object) -> bool:
    """Tell whether a field has no second value: by its domain, its type, or the formats that there are."""
    domain, default = record.DOMAIN.get(name), record.__dataclass_fields__[name].default
    if isinstance(value, type):
        return default is not None  # a record that is always there: its fields are tried
    return (
        name == ADMITTED
        or (name == "weights" and len(formats.names("experts")) == 1)
        or (isinstance(domain, OneOf) and len(domain.values) == 1)
    )


def changed(record: Any, path: str, value: object) -> Any:
    name, _, rest = path.partition(".")
    return dataclasses.replace(
        record, **{name: changed(getattr(record, name), rest, value) if rest else value}
    )


def quick(operator: str) -> Iterator[tuple[str, Record, object]]:
    mine = [c for c in cases.CASES.values() if c.operator == operator and c.runs_in(QUICK)]
    yield from (leaf for case in mine for spec in specs(case) for leaf in leaves(spec))


@pytest.mark.parametrize("operator", sorted(ops.OPERATORS))
def test_every_field_of_a_spec_is_tried_at_two_values(operator: str) -> None:
    seen: dict[str, set[object]] = defaultdict(set)
    exempt = {path for _, path, _ in REFUSED.get(operator, ())}
    for path, record, value in quick(operator):
        seen[path].add(value)
        if one_legal(record, path.rpartition(".")[2], value):
            exempt.add(path)
    assert [path for path, values in seen.items() if len(values) == 1 and path not in exempt] == []


@pytest.mark.parametrize("operator", sorted(ops.OPERATORS))
def test_every_number_of_a_spec_is_tried_where_it_is_no_power_of_two(operator: str) -> None:
    seen: dict[str, set[int]] = defaultdict(set)
    for path, record, value in quick(operator):
        name = path.rpartition(".")[2]
        if type(value) is int and isinstance(record.DOMAIN.get(name), Range) and name != "rank":
            seen[path].add(value)
    assert [path for path, values in seen.items() if not any(n > 0 and n & (n - 1) for n in values)] == []


@pytest.mark.parametrize(
    ("spec", "path", "value"),
    [row for rows in REFUSED.values() for row in rows],
    ids=lambda value: str(value)[:24],
)
def test_a_field_that_is_not_tried_has_no_other_legal_value(spec: Any, path: str, value: object) -> None:
    with pytest.raises(SpecError, match=path.rpartition(".")[2]):
        changed(spec, path, value)
