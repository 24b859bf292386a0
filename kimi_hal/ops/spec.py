"""Spec: everything an engine knows about an operator when it loads the model. Limits: how much of it.

A Spec is meaning: a frozen dataclass of plain scalars whose fields each have a declared domain. Two Specs
with equal fields are the same Spec in every process (``key()`` is canonical JSON), so a Spec can be hashed
into a compile cache, sent to another rank and compared.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Self

from kimi_hal.dispatch.contract import NUMERICS
from kimi_hal.domain import Domain, OneOf, Range
from kimi_hal.errors import SpecError, nearest

FLOAT_DTYPES = ("float32", "bfloat16")
ANY_FLOAT = Range(-float("inf"), float("inf"))


_hints: dict[type, dict[str, Any]] = {}


def _field_types(cls: type) -> dict[str, Any]:
    if cls not in _hints:
        _hints[cls] = typing.get_type_hints(cls)
    return _hints[cls]


def _matches(value: object, hint: Any) -> bool:
    """Tell whether a value has the annotated type; a bool is not an int, an int may stand for a float."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_matches(value, arm) for arm in typing.get_args(hint))
    if origin is tuple:
        inner = typing.get_args(hint)[0]
        return isinstance(value, tuple) and all(_matches(v, inner) for v in value)
    if hint is type(None):
        return value is None
    if hint is float:
        return isinstance(value, float | int) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _settled(value: Any, hint: Any) -> Any:
    """Return a value as the plain int, float, str or tuple that it stands for; another as it is.

    ``-5`` and ``-5.0`` are equal and so are 0.0 and -0.0, an enum's member or numpy's float equals its value:
    each would else be the same Spec with another key.
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float) and float in (hint, *typing.get_args(hint)):
        return _as_float(value)
    if isinstance(value, int) and type(value) is not int:
        return int(value)
    if isinstance(value, str) and type(value) is not str:
        return str.__str__(value)  # str() of an enum's member is its name
    if isinstance(value, tuple):
        inner = (typing.get_args(hint) or (None,))[0]
        return tuple(_settled(v, inner) for v in value)
    return value


def _as_float(value: float) -> float:
    """Return a number as a float, zero without a sign; one too large for a float as it is."""
    try:
        return float(value) + 0.0
    except OverflowError:
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Base of Spec, DCP and Limits: field types and domains checked at construction, JSON both ways."""

    #: Legal values by field. A field without an entry is constrained by its type alone.
    DOMAIN: ClassVar[Mapping[str, Domain]] = {}

    def __post_init__(self) -> None:
        self._settle()
        problems = [*self._type_problems(), *self._domain_problems()] or list(self.problems())
        if problems:
            raise SpecError(f"{type(self).__name__}: " + "; ".join(problems))

    def _settle(self) -> None:
        """Hold every value in its plainest form, so that equal Specs have one key and a repr is source."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            plain = _settled(value, _field_types(type(self))[field.name])
            if plain is not value:
                object.__setattr__(self, field.name, plain)

    def _type_problems(self) -> Iterator[str]:
        for name, hint in _field_types(type(self)).items():
            if name.isupper() or name.startswith("_"):
                continue
            value = getattr(self, name)
            if not _matches(value, hint):
                wanted = str(hint) if typing.get_origin(hint) else getattr(hint, "__name__", str(hint))
                yield f"{name} must be {wanted}, got {type(value).__name__} {value!r}"

    def _domain_problems(self) -> Iterator[str]:
        for name, domain in self.DOMAIN.items():
            value = getattr(self, name)
            if value is None or value in domain or (isinstance(value, Record)):
                continue
            hint = ""
            if isinstance(domain, OneOf) and isinstance(value, str):
                hint = nearest(value, [v for v in domain.values if isinstance(v, str)])
            yield f"{name}={value!r} is not {domain}{hint}"

    def problems(self) -> Iterator[str]:
        """Yield what is wrong between fields that are each legal alone. Overridden by the families."""
        return iter(())

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-ready values; nested records become nested dicts."""
        return {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}

    def key(self) -> str:
        """Return canonical JSON: the same text for equal Specs, in every process."""
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Rebuild from ``key()``.

        Raises:
            SpecError: no JSON, or not the fields of this class.
        """
        try:
            data = json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise SpecError(f"{cls.__name__}: no JSON text: {error}") from error
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Rebuild from ``to_dict()``; fields that are left out take their defaults.

        Raises:
            SpecError: an unknown field, which names the nearest one; one without a default that is left out;
                what the class itself refuses.
        """
        if not isinstance(data, Mapping):
            raise SpecError(
                f"{cls.__name__} is made of an object of fields, got {type(data).__name__} {data!r}"
            )
        hints = _field_types(cls)
        names = [f.name for f in dataclasses.fields(cls)]
        for name in data:
            if name not in names:
                raise SpecError(f"{cls.__name__} has no field {name!r}{nearest(str(name), names)}")
        required = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]
        missing = [name for name in required if name not in data]
        if missing:
            raise SpecError(f"{cls.__name__} needs {', '.join(missing)}: no default")
        return cls(**{name: _rebuild(value, hints[name]) for name, value in data.items()})


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return value.to_dict()
    return list(value) if isinstance(value, tuple) else value


def _rebuild(value: Any, hint: Any) -> Any:
    if isinstance(value, Mapping):
        arms = typing.get_args(hint) or (hint,)
        records = [arm for arm in arms if isinstance(arm, type) and issubclass(arm, Record)]
        return records[0].from_dict(value) if records else value  # what is no record is refused by its type
    return tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class DCP(Record):
    """Decode context parallelism: which positions of a sequence this rank owns.

    ``owner(p) = (p // interleave) % world``; ``local(p) = (p // (world * interleave)) * interleave
    + p % interleave`` (``docs/contract.md``; vLLM's ``get_dcp_local_seq_lens``). ``index="replicated"``
    says that every rank holds all index keys, as SGLang 0.5.23 does: then a selection is global already and
    nothing is merged.
    """

    world: int = 1
    rank: int = 0
    interleave: int = 1
    index: str = "sharded"

    DOMAIN: ClassVar[Mapping[str, Domain]] = {
        "world": Range(1, 64),
        "rank": Range(0, 63),
        "interleave": Range(1, 1 << 20),
        "index": OneOf(("sharded", "replicated")),
    }

    def problems(self) -> Iterator[str]:
        """Yield a rank outside the world."""
        if self.rank >= self.world:
            yield f"rank={self.rank} is outside world={self.world}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits(Record):
    """The sizes that a plan must serve; from them it knows its workspace before a device exists.

    Args:
        max_rows: query rows T of one call, at most.
        max_reqs: requests R or sequences N of one call, at most.
        max_context: tokens of one request, in global positions.
        rows_per_req: rows of one request in one call (speculative verification: 1 + drafts).
        uniform: every request has exactly ``rows_per_req`` rows, request-major.
        row_buckets: the values of T that a static-shape device is compiled for; ``()`` = any T.
        block_table_width: columns of a block table; ``None`` = ``ceil(max_context / (page * world))``.
        num_pages: pages of a cache, where a device needs it static.
        num_slots: state slots, where a device needs it static.
        logits_align: bytes that a row of logits is padded to.
    """

    max_rows: int
    max_reqs: int
    max_context: int = 1 << 20
    rows_per_req: int = 1
    uniform: bool = True
    row_buckets: tuple[int, ...] = ()
    block_table_width: int | None = None
    num_pages: int | None = None
    num_slots: int | None = None
    logits_align: int = 1024

    DOMAIN: ClassVar[Mapping[str, Domain]] = {
        "max_rows": Range(0, 1 << 31),
        "max_reqs": Range(0, 1 << 31),
        "max_context": Range(0, 1 << 31),
        "rows_per_req": Range(1, 1 << 20),
        "block_table_width": Range(0, 1 << 31),
        "num_pages": Range(0, 1 << 40),
        "num_slots": Range(0, 1 << 31),
        "logits_align": Range(4, 1 << 20, multiple=4),
    }

    def problems(self) -> Iterator[str]:
        """Yield buckets that no call can fill, or that do not ascend."""
        rising = all(low < high for low, high in pairwise(self.row_buckets))
        outside = [n for n in self.row_buckets if not 0 <= n <= self.max_rows]
        if outside:
            yield f"row_buckets holds {outside[0]}, outside 0 to max_rows={self.max_rows}"
        if not rising:
            yield f"row_buckets must ascend, got {list(self.row_buckets)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec(Record):
    """Base of the operators' Specs. ``numerics`` admits classes of rounding beyond the contract."""

    numerics: tuple[str, ...] = ()

    def _domain_problems(self) -> Iterator[str]:
        yield from Record._domain_problems(self)
        for name in self.numerics if isinstance(self.numerics, tuple) else ():
            if isinstance(name, str) and name not in NUMERICS:
                known = ", ".join(NUMERICS)
                yield f"numerics: unknown class {name!r}{nearest(name, NUMERICS) or '.'} Known: {known}"

    def dims(self) -> dict[str, int]:
        """Return the dimension letters of the operator's shapes that this Spec fixes."""
        return {}

    def meets(self) -> int | None:
        """Return how many ranks meet at a call of a grouped operator; ``None``: all that the Spec names."""
        return None
