"""How wrong an answer may be: in units of the error that nobody can avoid.

Two unavoidable errors are measured on the very operands of the case, against the float64 oracle x:

* rounding ``r``: the correctly rounded result, x rounded once to the output's dtype;
* accumulation ``a``: the float32 reference before that rounding.

The budget allows ``√((1.5·r)² + (10·a)²)`` for the root mean square error, ``2.5·r + 20·a`` for the largest.
A kernel that rounds its probabilities to bfloat16 measures 1.01–1.24 r and 1.16–1.18 r; the cheapest real fault
measured 1.7 r and 3.5 r (both with bfloat16 outputs). The reference sums pairwise or in blocks; a kernel that
sums 2,048 terms one after another errs by 7 a (measured in ``tests/conformance/test_budget.py``), and no order is
worse. No tolerance is written by hand for an operator.

NaN and infinities must stand where the oracle, rounded, has them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_hal_conformance.verdict import Measure

ROUNDING_NORM, ROUNDING_MAX = 1.5, 2.5
ACCUMULATION_NORM, ACCUMULATION_MAX = 10.0, 20.0


@dataclass(frozen=True)
class Unit:
    """The unavoidable error of one tensor: root mean square and largest."""

    norm: float
    maximum: float


def unit(approximate: Tensor, exact: Tensor, finite: Tensor) -> Unit:
    """Measure an approximation against the oracle over the finite entries."""
    error = (approximate.double() - exact)[finite]
    if not error.numel():
        return Unit(0.0, 0.0)
    return Unit(float(error.square().mean().sqrt()), float(error.abs().max()))


def compare(name: str, got: Tensor, exact: Tensor, reference: Tensor) -> Measure:
    """Judge one floating-point tensor.

    Args:
        name: what the report calls it.
        got: the implementation's result.
        exact: the oracle's, float64.
        reference: the float32 reference's, before rounding to ``got``'s dtype.
    """
    if got.shape != exact.shape:
        return Measure(
            tensor=name, exact=False, problem=f"shape {list(got.shape)}, expected {list(exact.shape)}"
        )
    rounded = exact.to(got.dtype)
    if problem := _non_finite(got, rounded):
        return Measure(tensor=name, exact=False, norm=float("inf"), maximum=float("inf"), problem=problem)
    finite = torch.isfinite(rounded)
    error = unit(got, exact, finite)
    r, a = unit(rounded, exact, finite), unit(reference, exact, finite)
    allowed = Unit(
        ((ROUNDING_NORM * r.norm) ** 2 + (ACCUMULATION_NORM * a.norm) ** 2) ** 0.5,
        ROUNDING_MAX * r.maximum + ACCUMULATION_MAX * a.maximum,
    )
    norm, maximum = _fraction(error.norm, allowed.norm), _fraction(error.maximum, allowed.maximum)
    problem = ""
    if norm > 1 or maximum > 1:
        problem = (
            f"error {error.norm:.3g} rms and {error.maximum:.3g} at most is {norm:.3g} and {maximum:.3g} times "
            f"its budget (rounding {r.norm:.3g}, accumulation {a.norm:.3g})"
        )
    return Measure(
        tensor=name,
        exact=False,
        norm=norm,
        maximum=maximum,
        rounding=r.norm,
        accumulation=a.norm,
        problem=problem,
    )


def compare_exact(name: str, got: Tensor, expected: Tensor) -> Measure:
    """Judge a discrete tensor: equal in every entry (floating point: bits, any NaN equals any NaN)."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        problem = f"{got.dtype} {list(got.shape)}, expected {expected.dtype} {list(expected.shape)}"
        return Measure(tensor=name, exact=True, problem=problem)
    same = got == expected
    if got.is_floating_point():
        same |= got.isnan() & expected.isnan()
    if bool(same.all()):
        return Measure(tensor=name, exact=True)
    wrong = (~same).nonzero()
    where = tuple(wrong[0].tolist())
    problem = (
        f"{wrong.shape[0]} of {same.numel()} entries differ; first at {list(where)}: "
        f"got {got[where].item()}, expected {expected[where].item()}"
    )
    return Measure(tensor=name, exact=True, norm=float("inf"), maximum=float("inf"), problem=problem)


def _fraction(error: float, allowed: float) -> float:
    if error == 0.0:
        return 0.0
    return error / allowed if allowed else float("inf")


def _non_finite(got: Tensor, expected: Tensor) -> str:
    for label, test in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("−inf", torch.isneginf)):
        mine, theirs = test(got), test(expected)
        if bool((mine != theirs).any()):
            at = (mine != theirs).nonzero()[0].tolist()
            return f"{label} at {int(mine.sum())} entries, expected at {int(theirs.sum())}; first difference at {at}"
    return ""
