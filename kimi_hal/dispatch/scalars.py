"""A Spec as the scalar arguments of a torch operator, and back.

torch takes no dataclass, so each field is an argument of its own: int, float, bool or str as they are, an
optional one with a ``?``; DCP flattened (``dcp_world``); any other nested Spec as its canonical JSON;
``tuple[str, …]`` joined by commas. A field that has the name of an operand is ``spec_<name>``.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from kimi_hal.ops.operator import Operator
from kimi_hal.ops.spec import DCP, Record, Spec

PLAIN = {int: "int", float: "float", bool: "bool", str: "str"}
MISSING = dataclasses.MISSING


@dataclass(frozen=True)
class Scalar:
    """One scalar argument.

    Args:
        name: the argument.
        type: its schema type, ``"int"``, ``"float?"``, …
        path: the Spec field, or the field of its DCP.
        default: the encoded default, ``dataclasses.MISSING`` where the Spec asks for a value.
    """

    name: str
    type: str
    path: tuple[str, ...]
    default: Any = MISSING


def field_argument(op: Operator, field: str) -> str:
    """Return the argument that stands for a Spec field: its own name unless an operand has it."""
    return f"spec_{field}" if field in op.signature.parameters else field


@cache
def scalars(op: Operator) -> tuple[Scalar, ...]:
    """Return the scalar arguments of an operator's Spec, in declared order."""
    return tuple(_scalars(op))


def _scalars(op: Operator) -> Iterator[Scalar]:
    hints = typing.get_type_hints(op.spec_type)
    for field in dataclasses.fields(op.spec_type):
        name, hint = field_argument(op, field.name), hints[field.name]
        if hint is DCP:
            yield from _dcp(name, field)
        else:
            default = MISSING if field.default is MISSING else encode(field.default)
            yield Scalar(name, schema_type(hint), (field.name,), default)


def _dcp(name: str, field: dataclasses.Field[Any]) -> Iterator[Scalar]:
    for inner, hint in typing.get_type_hints(DCP).items():
        if inner in {f.name for f in dataclasses.fields(DCP)}:
            default = MISSING if field.default is MISSING else getattr(field.default, inner)
            yield Scalar(f"{name}_{inner}", PLAIN[hint], (field.name, inner), default)


def schema_type(hint: Any) -> str:
    """Return the schema type of a field's annotation.

    Raises:
        TypeError: an annotation that no torch argument can carry; a family's own fault.
    """
    if hint in PLAIN:
        return PLAIN[hint]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        arms = [arm for arm in typing.get_args(hint) if arm is not type(None)]
        if len(arms) == 1:
            return schema_type(arms[0]) + "?"
    if isinstance(hint, type) and issubclass(hint, Record):
        return "str"
    if typing.get_origin(hint) is tuple and typing.get_args(hint)[0] is str:
        return "str"
    raise TypeError(f"a Spec field of type {hint} cannot be a torch argument")


def encode(value: Any) -> Any:
    """Return a field's value as a torch scalar."""
    if isinstance(value, Record):
        return value.key()
    return ",".join(value) if isinstance(value, tuple) else value


def flatten(op: Operator, spec: Spec) -> dict[str, Any]:
    """Return argument -> value for the fields that differ from their default, and those without one."""
    found = {}
    for scalar in scalars(op):
        value: Any = spec
        for name in scalar.path:
            value = getattr(value, name)
        value = encode(value)
        if scalar.default is MISSING or value != scalar.default:
            found[scalar.name] = value
    return found


def spec_of(op: Operator, arguments: Mapping[str, Any]) -> Spec:
    """Rebuild the Spec from scalar arguments; those left out take their defaults.

    Raises:
        SpecError: a value outside of the contract.
    """
    return _spec_of(op, tuple(arguments.get(s.name, s.default) for s in scalars(op)))


@cache
def _spec_of(op: Operator, values: tuple[Any, ...]) -> Spec:
    hints = typing.get_type_hints(op.spec_type)
    fields: dict[str, Any] = {}
    for scalar, value in zip(scalars(op), values, strict=True):
        name, *inner = scalar.path
        if inner:
            fields.setdefault(name, {})[inner[0]] = value
        elif value is not MISSING:
            fields[name] = _decode(hints[name], value)
    spec_type: Any = op.spec_type
    made: Spec = spec_type(**{n: DCP(**v) if isinstance(v, dict) else v for n, v in fields.items()})
    return made


def _decode(hint: Any, value: Any) -> Any:
    if value is None:
        return None
    arms = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    for arm in arms:
        if isinstance(arm, type) and issubclass(arm, Record):
            return arm.from_json(value)
        if typing.get_origin(arm) is tuple:
            return tuple(filter(None, value.split(",")))
    return value
