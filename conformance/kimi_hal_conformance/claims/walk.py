"""The walk over what an implementation claims: which combinations a profile tries, and what it leaves out."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kimi_hal import ops
from kimi_hal.dispatch import fields, matching
from kimi_hal.dispatch.contract import Capability, Implementation
from kimi_hal.dispatch.matching import Target
from kimi_hal.domain import Domain, Range
from kimi_hal.errors import SpecError
from kimi_hal.ops.operator import Operator
from kimi_hal.ops.spec import Limits, Spec
from kimi_hal_conformance.claims import layout, values
from kimi_hal_conformance.claims.cover import Row, covering, same
from kimi_hal_conformance.claims.made import Made, differing
from kimi_hal_conformance.operands import RECIPES
from kimi_hal_conformance.operands.recipe import Recipe

MIB = 1 << 20
#: What the operands of a combination, and the oracle beside them, may hold at once, by profile.
ROOM = {"interp": 4 * MIB, "quick": 16 * MIB, "standard": 64 * MIB, "full": 256 * MIB}
#: Of how many values every combination is tried: each value once, or each pair; 0: all.
STRENGTH = {"interp": 1, "quick": 1, "standard": 2, "full": 0}
#: Combinations that hold as many pairs as so many can, beside each value once: what an interpreter has time for.
SAMPLE = {"interp": 4}
#: Combinations of one capability that the full profile tries, at most; so many hold every pair as well.
ALL = 2000
#: Dimensions of a walk that are no Spec fields.
LIMITS, DTYPE, PLACE = "limits.", "dtype of ", "placement"
DRAWN, TIGHT = "as drawn", "tight"


@dataclass(frozen=True)
class Walk:
    """What is tried of an implementation, and a sentence for each thing that is left out."""

    made: tuple[Made, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()
    failed: tuple[tuple[str, str], ...] = ()


NO_CLAIMS = Walk()


def walk(implementation: Implementation, target: Target, profile: str, pairs: bool = False) -> Walk:
    """Choose the combinations of everything that an implementation declares.

    Args:
        implementation: whose claims are tried.
        target: where it runs; what is declared for another architecture is left out, with the reason.
        profile: one of ``ROOM``.
        pairs: try each pair of values where the profile tries each value once, but for what is fixed in ``SAMPLE``.
    """
    strength = 2 if pairs and STRENGTH[profile] == 1 and profile not in SAMPLE else STRENGTH[profile]
    made: dict[str, Made] = {}
    left_out: dict[str, str] = {}
    failed: dict[str, str] = {}
    spaces = joined(implementation.capabilities)
    for number, space in enumerate(spaces, 1):
        label = f"capability {number}: " if len(spaces) > 1 else ""
        found = Space(ops.get(implementation.operator), tuple(space), target, ROOM[profile])
        if reasons := found.elsewhere():
            left_out[label or "everything"] = f"not tried here: {reasons}"
            continue
        rows, said = chosen(found, strength, SAMPLE.get(profile, 0))
        if not rows and not said:
            failed[label] = (
                "it claims no Spec that can be made: a required field is not named, or no value fits"
            )
        for what, why in said.items():
            left_out.setdefault(f"{label}{what}", why)
        for row in rows:
            one = found.made(row)
            made.setdefault(one.id, one)
    return Walk(tuple(made.values()), tuple(left_out.items()), tuple(failed.items()))


def chosen(space: Space, strength: int, sample: int = 0) -> tuple[list[Row], dict[str, str]]:
    """Return the rows of one capability, and what is left out of it; none where a field has no value that fits.

    So many rows of a ``sample`` hold pairs of values besides.
    """
    if not all(space.values.values()):
        return [], dict(space.cut)
    found = covering(space.values, strength or 2, space.settled, space.leading)
    said = dict(space.cut)
    if found.left_out:
        first = ", ".join(f"{n}={space.values[n][i]!r}" for n, i in next(iter(found.left_out)))
        kind = "values" if strength == 1 else "pairs of values"
        said["together"] = (
            f"{len(found.left_out)} of {found.wanted} {kind} are too large here, the first: {first}, "
            f"{next(iter(found.left_out.values()))}"
        )
    if sample and len(space.values) > 1:
        more = covering(space.values, 2, space.settled, space.leading, most=sample)
        if more.untried:
            said["pairs"] = (
                f"{len(more.rows)} combinations are tried that hold pairs of values; {more.untried} pairs, those that "
                "no Spec admits included, are left to the quick profile"
            )
        return [*found.rows, *more.rows], said
    if strength:
        return found.rows, said
    rows, tried = every(space, found.rows)
    total = math.prod(len(options) for options in space.values.values())
    if tried < total:
        said["all"] = (
            f"of {total} combinations of the values tried, those that no Spec admits included, "
            f"{len(rows)} are tried: no more than {ALL} of a capability, every pair among them"
        )
    return rows, said


def every(space: Space, first: Sequence[Row]) -> tuple[list[Row], int]:
    """Return rows of all combinations, ``first`` before them, up to ``ALL``; and how many were looked at."""
    rows = {repr(sorted(row.items(), key=str)): row for row in first}
    looked = 0
    for combination in itertools.islice(itertools.product(*space.values.values()), 20 * ALL):
        if len(rows) >= ALL:
            break
        looked += 1
        settled = space.settled(dict(zip(space.values, combination, strict=True)))
        if isinstance(settled, dict):
            rows.setdefault(repr(sorted(settled.items(), key=str)), settled)
    return list(rows.values()), looked


def joined(capabilities: Sequence[Capability]) -> list[list[Capability]]:
    """Group capabilities that differ in one Spec field alone: they are one space, in which any may cover."""
    groups: list[list[Capability]] = []
    for capability in capabilities:
        for group in groups:
            if all(_differ_in_one(capability, other) for other in group):
                group.append(capability)
                break
        else:
            groups.append([capability])
    return groups


def _differ_in_one(a: Capability, b: Capability) -> bool:
    rest = (dataclasses.replace(c, spec={}) for c in (a, b))
    names = {n for n in {*a.spec, *b.spec} if a.spec.get(n) != b.spec.get(n)}
    return next(rest) == next(rest) and len(names) == 1


NOTHING: Row = {}


class Absent:
    """Stands for a field of an optional record that a row does not have."""

    def __repr__(self) -> str:
        return "<absent>"


ABSENT = Absent()


@dataclass(frozen=True)
class Space:
    """The declared values of one capability, or of several that are one, and which combinations are legal.

    Args:
        op: the operator.
        capabilities: any of which may cover a combination.
        target: where it runs.
        room: bytes that a combination may need.
    """

    op: Operator
    capabilities: tuple[Capability, ...]
    target: Target
    room: int

    @cached_property
    def recipe(self) -> Recipe:
        """Return how operands are made."""
        return RECIPES[self.op.name]

    @cached_property
    def _records(self) -> list[str]:
        """Return the optional records of the Spec."""
        return [n for n, leaf in fields.leaves(self.op.spec_type).items() if leaf.record is not None]

    def _first(self, name: str) -> Any:
        return self.values[name][0] if name in self.values else None

    @cached_property
    def _chosen(self) -> tuple[dict[str, list[Any]], dict[str, str], dict[str, list[Any]]]:
        return _values(self)

    @property
    def values(self) -> Mapping[str, list[Any]]:
        """Return the values tried of every dimension, the one to begin from first."""
        return self._chosen[0]

    @property
    def cut(self) -> Mapping[str, str]:
        """Return, by what they are, the ends of ranges that are too large to be tried, and why."""
        return self._chosen[1]

    @property
    def leading(self) -> Mapping[str, list[Any]]:
        """Return the values of fields on which others depend, those too that are too large here.

        What is legal only beside such a value is then left out with that reason, and not taken for no claim.
        """
        found = self._chosen[2]
        return {n: [*self.values[n][1:], *found.get(n, [])] for n in self.recipe.leading if n in self.values}

    def elsewhere(self) -> str:
        """Say why nothing of it can be tried here: another architecture, a library that is missing."""
        capability = self.capabilities[0]
        bare = dataclasses.replace(capability, spec={}, limits={}, tensors={}, properties=OPEN)
        spec = _any_spec(self.op)
        found = matching.refusals(self.op, spec, None, bare, self.target)
        return "; ".join(r for r in found if " is not covered" not in r and "is given" not in r)

    def settled(self, row: Row, kept: Row = NOTHING) -> Row | str | None:
        """Return a row as the Spec ties it, why it is too large, or ``None`` where it is no claim.

        It is none either where the Spec ties one of the fields that are to be ``kept`` to another value.
        """
        tied = {n: self._first(n) if value is ABSENT else value for n, value in row.items()}
        self.recipe.bind(tied)
        for name in tied:
            if any(name.startswith(f"{record}.") for record in self._records if tied.get(record, 0) is None):
                tied[name] = ABSENT
        if any(not same(tied.get(name), value) for name, value in kept.items()):
            return None
        spec, limits = self._planned(tied)
        if spec is None or limits is None:
            return None
        if all(any(matching.refusals(self.op, spec, limits, c, self.target)) for c in self.capabilities):
            return None
        rows = self._rows(limits)
        if rows is None:
            return None
        size = self.recipe.nbytes(spec, rows)
        if size > self.room:
            return f"about {-(-size // MIB)} MiB, {self.room // MIB} at most here"
        return tied

    def _planned(self, row: Row) -> tuple[Spec | None, Limits | None]:
        sizes = {n.removeprefix(LIMITS): v for n, v in row.items() if n.startswith(LIMITS)}
        try:
            return self.op.spec_type.from_dict(_nested(self.op, row)), self._limits(sizes)
        except SpecError:
            return None, None

    def _limits(self, sizes: Row) -> Limits:
        recipe = self.recipe
        base = Limits(
            max_rows=64,
            max_reqs=16,
            max_context=recipe.max_context,
            rows_per_req=recipe.rows_per_req,
            uniform=False,
        )
        found = dataclasses.replace(base, **sizes)
        if any(c.properties.static_rows for c in self.capabilities):
            total = recipe.total(self._rows(found) or 0)
            found = dataclasses.replace(found, row_buckets=(total,))
        return found

    def _rows(self, limits: Limits) -> int | None:
        """Return the most rows, or sequences, that these Limits let a call have; ``None``: not even one."""
        recipe = self.recipe
        fits = (
            n
            for n in range(recipe.rows, 0, -1)
            if recipe.total(n) <= limits.max_rows
            and n <= max(limits.max_reqs, 1)
            and recipe.rows_per_req <= limits.rows_per_req
            and recipe.max_context <= limits.max_context
        )
        return next(fits, None)

    def made(self, row: Row) -> Made:
        """Return a settled row as what a process is told."""
        spec, limits = self._planned(row)
        assert spec is not None
        assert limits is not None
        rows = self._rows(limits)
        assert rows is not None
        capability = self.capabilities[0]
        dtypes = {n.removeprefix(DTYPE): v for n, v in row.items() if n.startswith(DTYPE)}
        tight = row.get(PLACE) == TIGHT
        aligned = layout.alignments(self.op, capability) if tight else {}
        others = {n: v for n, v in row.items() if n.startswith((LIMITS, DTYPE)) or (n == PLACE and tight)}
        return Made(
            operator=self.op.name,
            spec=spec.key(),
            limits=limits.key(),
            rows=rows,
            dtypes=dtypes,
            shifts=aligned,
            gaps={n: aligned[n] for n in layout.may_be_spaced(self.op, capability) if n in aligned},
            aligned=layout.demanded(self.op, capability),
            differs=differing(spec, others),
        )


OPEN = Capability(("*",), {}).properties


def _any_spec(op: Operator) -> Spec:
    return next(iter(_model_specs(op)))


def _model_specs(op: Operator) -> Iterator[Spec]:
    from kimi_hal.presets import Deployment

    yield Deployment().specs()[op.name]


def _nested(op: Operator, row: Row) -> dict[str, Any]:
    """Return Spec fields as nested dicts; an optional record that is ``None`` has no fields."""
    known = fields.leaves(op.spec_type)
    found: dict[str, Any] = {}
    for name, value in row.items():
        if name not in known or known[name].record is not None:
            continue
        if value is ABSENT:
            continue
        *outer, last = name.split(".")
        place = found
        for part in outer:
            place = place.setdefault(part, {})
        place[last] = value
    return found


def _values(space: Space) -> tuple[dict[str, list[Any]], dict[str, str], dict[str, list[Any]]]:
    """Return the values of every dimension: Spec fields, Limits, dtypes, placement; what is cut, and why."""
    recipe, op = space.recipe, space.op
    model, known = values.of_model(op.name), fields.leaves(op.spec_type)
    domains: dict[str, list[Domain]] = {}
    for capability in space.capabilities:
        for name, domain in capability.spec.items():
            if name in known and known[name].record is None and name not in recipe.tied:
                domains.setdefault(name, [])
                domains[name] += [domain] if domain not in domains[name] else []
    found: dict[str, list[Any]] = {}
    for name, several in domains.items():
        leaf = known[name]
        first = recipe.small.get(name, leaf.default)
        options: list[Any] = []
        for domain in several:
            options += [v for v in values.tried(domain, first, model.get(name)) if v not in options]
        options += [v for v in values.legal(leaf) if v not in options]
        if first is None and None in options:
            options.remove(None)
            options.insert(0, None)
        found[name] = options
    for name, size in _sizes(space):
        found[LIMITS + name] = size
    for name, names in layout.dtypes(op, space.capabilities[0]).items():
        found[DTYPE + name] = list(names)
    found[PLACE] = [DRAWN, TIGHT]
    return _affordable(space, found, domains)


def _sizes(space: Space) -> Iterator[tuple[str, list[Any]]]:
    for name, domain in space.capabilities[0].limits.items():
        default = {"max_rows": 64, "max_reqs": 16, "max_context": space.recipe.max_context}.get(name)
        yield name, values.tried(domain, default, None)


def _affordable(
    space: Space, found: dict[str, list[Any]], domains: Mapping[str, Sequence[Domain]]
) -> tuple[dict[str, list[Any]], dict[str, str], dict[str, list[Any]]]:
    """Take smaller values for ends of ranges that are too large even where all else is small; say so."""
    base = {name: options[0] for name, options in found.items()}
    cut: dict[str, str] = {}
    taken: dict[str, list[Any]] = {}
    for name, several in domains.items():
        ranges = [d for d in several if isinstance(d, Range)]
        for value in [v for v in found[name] if ranges and isinstance(v, int) and not isinstance(v, bool)]:
            why = space.settled(base | {name: value})
            if not isinstance(why, str):
                continue
            least = value
            while isinstance(why, str):
                smaller = values.smaller(least, ranges[0], than=0)
                if smaller is None:
                    break
                least = smaller
                why = space.settled(base | {name: least})
            place = found[name].index(value)
            keep = isinstance(why, dict) and least not in found[name]
            found[name][place : place + 1] = [least] if keep else []
            taken.setdefault(name, []).append(value)
            cut[f"{name}={value}"] = f"too large: {space.settled(base | {name: value})}" + (
                f"; {name}={least} is" if isinstance(why, dict) else ""
            )
    return found, cut, taken
