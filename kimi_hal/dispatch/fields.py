"""A Spec as flat, dotted fields: what a Capability and a Preference name.

``SparseMLASpec.dcp.world`` is ``"dcp.world"``. An optional record (``DSASpec.merge``) is itself a field,
which is ``None`` where there is none, and its fields are below it where there is one.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from kimi_hal.domain import Domain
from kimi_hal.ops.spec import Record

#: Not a field that a capability covers: a Spec admits classes of rounding, an implementation declares them.
APART = "numerics"


class Required:
    """The default of a field that has none."""

    def __repr__(self) -> str:
        return "<required>"


REQUIRED = Required()


@dataclass(frozen=True)
class Leaf:
    """One dotted field of a Spec class.

    Args:
        name: ``"dcp.world"``.
        hint: its annotation.
        default: its default, ``REQUIRED`` if it has none.
        legal: the domain that the Spec class declares, or ``None``: its type alone constrains it.
        record: the class of an optional record; the leaf then stands for its presence.
    """

    name: str
    hint: Any
    default: Any
    legal: Domain | None
    record: type[Record] | None = None

    @property
    def optional(self) -> bool:
        """Tell whether ``None`` is a value of this field."""
        return type(None) in typing.get_args(self.hint)


def leaves(spec_type: type[Record]) -> Mapping[str, Leaf]:
    """Return every dotted field of a Spec class, in declared order."""
    return _leaves(spec_type)  # type: ignore[arg-type]  # a class is hashable whatever its instances are


@cache
def _leaves(spec_type: type[Record]) -> Mapping[str, Leaf]:
    return {leaf.name: leaf for leaf in _walk(spec_type, "", REQUIRED)}


def values(spec: Record) -> dict[str, Any]:
    """Return dotted field -> value of one Spec. A record that is ``None`` has no fields below it."""
    return dict(_values(spec, ""))


def _walk(cls: type[Record], prefix: str, inherited: Any) -> Iterator[Leaf]:
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if field.name == APART:
            continue
        hint, name = hints[field.name], prefix + field.name
        default = _default(field, inherited)
        record = _record(hint)
        if record is None:
            yield Leaf(name, hint, default, cls.DOMAIN.get(field.name))
            continue
        if type(None) in typing.get_args(hint):
            yield Leaf(name, hint, default, None, record)
        yield from _walk(record, f"{name}.", default)


def _default(field: dataclasses.Field[Any], inherited: Any) -> Any:
    if isinstance(inherited, Record):
        return getattr(inherited, field.name)
    return REQUIRED if field.default is dataclasses.MISSING else field.default


def _record(hint: Any) -> type[Record] | None:
    arms = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    found = [arm for arm in arms if isinstance(arm, type) and issubclass(arm, Record)]
    return found[0] if found else None


def _values(spec: Record, prefix: str) -> Iterator[tuple[str, Any]]:
    optional = {name for name, leaf in leaves(type(spec)).items() if leaf.record is not None}
    for field in dataclasses.fields(spec):
        if field.name == APART:
            continue
        value, name = getattr(spec, field.name), prefix + field.name
        if field.name in optional:
            yield name, value
        if isinstance(value, Record):
            yield from _values(value, f"{name}.")
        elif field.name not in optional:
            yield name, value
