"""How wrong an answer may be: in units of the errors that nobody can avoid.

They are measured on the very operands of the case, against the float64 oracle x:

* rounding ``r``: the correctly rounded result, x rounded once to the output's dtype;
* accumulation ``a``: the float32 reference before that rounding, and no less than one rounding to float32 of
  every entry but 0, whether float32 can hold it or not: what is computed on the way need not be what it holds. Where
  kernels compute otherwise than the reference by nature (a prefill by chunks), the other way in float32 counts too;
* inner ``i``: x with the roundings that the operator's contract admits inside it made once each
  (``roundings.py``); 0 where it admits none;
* class ``c``: x with the roundings of a numerics class that the implementation declares made once each
  (``classes``), for each class by itself.

A rounding counts as no less than what it is expected to cost: ``ulp / √12`` in root mean square at each entry that
the dtype cannot hold, √3 times as much at the worst. The few entries of a small tensor may by luck be close to what
they are rounded to. Entries that a dtype can hold cost nothing.

The budget allows ``√((1.5·r)² + (10·a)² + (1.5·i)² + Σ(1.5·c)²)`` for the root mean square error and
``2.5·r + 20·a + 2.5·i + Σ2.5·c`` for the largest. What one of n entries may err by for its sum, their root mean square
allows too: ``10·a`` is no less than ``20·a/√n`` of the largest. That counts where n is some ten, of which the reference
may err little by luck (right LSEs of four heads were off by 12 a), or where one entry holds more than a quarter of the
squares of its errors; and from three entries on it is at most twice ``10·a``. A kernel that rounds its probabilities to
bfloat16 measures 1.01–1.24 r and 1.16–1.18 r; the cheapest real fault measured 1.7 r and 3.5 r (with bfloat16 outputs).
The reference sums pairwise or in blocks; a kernel that sums 2,048 terms one after another errs by 7 a (measured in
``tests/conformance/test_budget.py``), and no order is worse. No tolerance is written by hand for an operator.

NaN and infinities must stand where the oracle, rounded, has them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_hal_conformance.verdict import Measure

ROUNDING_NORM, ROUNDING_MAX = 1.5, 2.5
ACCUMULATION_NORM, ACCUMULATION_MAX = 10.0, 20.0
INNER_NORM, INNER_MAX = 1.5, 2.5

#: Numerics class -> the tensor with its roundings made, in each way that there is.
Classes = Mapping[str, Sequence[Tensor]]
NO_CLASSES: Classes = {}


@dataclass(frozen=True)
class Unit:
    """An unavoidable error of one tensor: root mean square and largest."""

    norm: float
    maximum: float

    def no_less_than(self, other: Unit) -> Unit:
        """Return the larger of two units, each way of measuring by itself."""
        return Unit(max(self.norm, other.norm), max(self.maximum, other.maximum))


NONE = Unit(0.0, 0.0)


def unit(approximate: Tensor, exact: Tensor, finite: Tensor) -> Unit:
    """Measure an approximation against the oracle over the finite entries."""
    error = approximate.double() - exact
    if not bool(finite.all()):
        error = error[finite]
    if not error.numel():
        return NONE
    return Unit(float(error.square().mean().sqrt()), float(error.abs().max()))


def rounding(exact: Tensor, dtype: torch.dtype, finite: Tensor, representable: bool = True) -> Unit:
    """Return what one rounding of the finite entries to a dtype is expected to cost.

    Entries that the dtype can hold cost nothing; where not ``representable`` is asked for, 0 alone does.
    """
    if not finite.any():
        return NONE
    info = torch.finfo(dtype)
    values = torch.where(finite, exact, 0.0)
    ulp = torch.ldexp(torch.full_like(values, info.eps / 2), values.frexp().exponent)
    ulp = ulp.clamp(min=info.smallest_normal * info.eps)
    free = values.to(dtype).double() == values if representable else values == 0
    ulp = torch.where(free, 0.0, ulp)
    norm = float((ulp.square().sum() / finite.sum() / 12).sqrt())
    return Unit(norm, math.sqrt(3) * norm)


def compare(
    name: str,
    got: Tensor,
    exact: Tensor,
    reference: Tensor,
    inner: Tensor | None = None,
    classes: Classes = NO_CLASSES,
    others: Sequence[Tensor] = (),
) -> Measure:
    """Judge one floating-point tensor.

    Args:
        name: what the report calls it.
        got: the implementation's result.
        exact: the oracle's, float64.
        reference: the float32 reference's, before rounding to ``got``'s dtype.
        inner: the oracle's with the roundings made that the contract admits inside; ``None``: none.
        classes: by numerics class, the oracle's with its roundings made, in each way that there is.
        others: the result by other float32 formulas of the same function, where kernels use them.
    """
    if got.shape != exact.shape:
        return wrong(name, f"shape {list(got.shape)}, expected {list(exact.shape)}")
    rounded = exact.to(got.dtype)
    if problem := _non_finite(got, rounded):
        return wrong(name, problem)
    finite = torch.isfinite(rounded)
    error = unit(got, exact, finite)
    r = unit(rounded, exact, finite).no_less_than(rounding(exact, got.dtype, finite))
    a = _costliest((reference, *others), exact, finite)
    a = a.no_less_than(rounding(exact, torch.float32, finite, representable=False))
    i = NONE if inner is None else unit(inner, exact, finite)
    by_class = {c: _costliest(ways, exact, finite) for c, ways in classes.items() if ways}
    limit = allowed(r, a, i, *by_class.values(), entries=int(finite.sum()))
    norm, maximum = _fraction(error.norm, limit.norm), _fraction(error.maximum, limit.maximum)
    over = norm > 1 or maximum > 1
    return Measure(
        tensor=name,
        exact=False,
        norm=_finite(norm),
        maximum=_finite(maximum),
        rounding=r.norm,
        accumulation=a.norm,
        inner=i.norm,
        classes={c: cost.norm for c, cost in by_class.items()},
        problem=_beyond(error, limit, {"rounding": r, "accumulation": a, "inner": i} | by_class)
        if over
        else "",
    )


def _costliest(ways: Sequence[Tensor], exact: Tensor, finite: Tensor) -> Unit:
    """Return the cost of what can be computed in several ways: of these the costliest, by each measure."""
    cost = NONE
    for way in ways:
        cost = cost.no_less_than(unit(way, exact, finite))
    return cost


def _beyond(error: Unit, limit: Unit, units: Mapping[str, Unit]) -> str:
    """Say by how much an error is beyond its budget, and of what the budget was made."""
    sizes = f"error {error.norm:.3g} rms and {error.maximum:.3g} at most"
    if not limit.norm:
        return f"{sizes}, where nothing has to be rounded"
    times = f"{error.norm / limit.norm:.3g} and {error.maximum / limit.maximum:.3g} times its budget"
    made = ", ".join(f"{n} {u.norm:.3g}" for n, u in units.items() if u.norm)
    return f"{sizes} is {times} ({made})"


def allowed(r: Unit, a: Unit, *inner: Unit, entries: int) -> Unit:
    """Return the budget of so many entries that follows from the unavoidable errors."""
    sums = max(ACCUMULATION_NORM * a.norm, ACCUMULATION_MAX * a.maximum / math.sqrt(max(1, entries)))
    return Unit(
        math.hypot(ROUNDING_NORM * r.norm, sums, *(INNER_NORM * i.norm for i in inner)),
        ROUNDING_MAX * r.maximum + ACCUMULATION_MAX * a.maximum + sum(INNER_MAX * i.maximum for i in inner),
    )


def compare_exact(name: str, got: Tensor, expected: Tensor) -> Measure:
    """Judge a discrete tensor: equal in every entry (any NaN equals any NaN, −0 equals +0)."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        dtype, wanted = (str(t.dtype).removeprefix("torch.") for t in (got, expected))
        return wrong(name, f"{dtype} {list(got.shape)}, expected {wanted} {list(expected.shape)}", exact=True)
    same = got == expected
    if got.is_floating_point():
        same |= got.isnan() & expected.isnan()
    if bool(same.all()):
        return Measure(tensor=name, exact=True)
    differ = (~same).nonzero()
    where = tuple(differ[0].tolist())
    problem = (
        f"{differ.shape[0]} of {same.numel()} entries differ; first at {list(where)}: "
        f"got {got[where].item()}, expected {expected[where].item()}"
    )
    return wrong(name, problem, exact=True)


def wrong(name: str, problem: str, exact: bool = False) -> Measure:
    """Return the measure of a tensor of which no finite fraction of a budget can be said."""
    return Measure(tensor=name, exact=exact, norm=None, maximum=None, problem=problem)


def _fraction(error: float, limit: float) -> float:
    if error == 0.0:
        return 0.0
    return error / limit if limit else math.inf


def _finite(fraction: float) -> float | None:
    return fraction if math.isfinite(fraction) else None


def _non_finite(got: Tensor, expected: Tensor) -> str:
    for label, test in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("−inf", torch.isneginf)):
        mine, theirs = test(got), test(expected)
        if bool((mine != theirs).any()):
            at = (mine != theirs).nonzero()[0].tolist()
            return f"{label} at {int(mine.sum())} entries, expected at {int(theirs.sum())}; first difference at {at}"
    return ""
