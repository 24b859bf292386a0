"""How far a result may be from the reference's in a shadow check, and one sentence where it is farther.

A shadow check finds a broken kernel in a running engine; what is right to the last unit is the conformance
suite's to say. So the budgets are round: for each row (first dimension) the norm of the difference over the
norm of the row. NaN and infinities must stand where the reference's do; integers and bytes must be equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

#: Relative error of a row by the dtype it is rounded to: four units of bfloat16, half a step of FP8.
ROUNDED = {
    "float32": 2.0**-10,
    "bfloat16": 2.0**-6,
    "float8_e4m3fn": 2.0**-3,
    "float8_e4m3fnuz": 2.0**-3,
}

#: What a class of rounding beyond the contract adds: the largest of its factors counts.
FACTORS = {"bf16": 8, "fp8": 64, "mxfp8": 64, "fp8_block": 64, "fp8_tensor": 64}

#: A row much smaller than the largest is measured against this share of the largest.
FLOOR = 2.0**-7


def allowed(dtype: str, numerics: Iterable[str]) -> float:
    """Return the budget of a float result under the classes that an implementation declares."""
    factor = max((FACTORS.get(n.rpartition("=")[2], 64) for n in numerics), default=1)
    return min(0.5, ROUNDED[dtype] * factor)


def floats(label: str, actual: Any, expected: Any, numerics: Iterable[str]) -> Iterator[str]:
    """Yield why two float tensors of one shape differ by more than the budget of their dtype."""
    import torch

    dtype = str(actual.dtype).removeprefix("torch.")
    a, b = (
        t.float().reshape(t.shape[0], -1) if t.dim() > 1 else t.float().reshape(-1, 1)
        for t in (actual, expected)
    )
    if not a.numel():
        return
    odd = ~torch.isfinite(a) | ~torch.isfinite(b)
    wrong = odd & ~((a == b) | (a.isnan() & b.isnan()))
    if wrong.any():
        row, column = wrong.nonzero()[0].tolist()
        yield (
            f"{label} is {float(a[row, column])} in row {row}, the reference has {float(b[row, column])} "
            f"({int(wrong.sum())} such elements)"
        )
        return
    a, b = a.masked_fill(odd, 0), b.masked_fill(odd, 0)
    scale = b.norm(dim=1)
    scale = scale.clamp(min=max(float(scale.max()) * FLOOR, 1e-20))
    error = (a - b).norm(dim=1) / scale
    worst, budget = int(error.argmax()), allowed(dtype, numerics)
    if float(error[worst]) > budget:
        yield (
            f"{label} is off by up to {float((a - b).abs().max()):.4g}; the error of row {worst} is "
            f"{float(error[worst]):.3g} of its norm, the budget is {budget:.3g}"
        )


def exact(label: str, actual: Any, expected: Any) -> Iterator[str]:
    """Yield where two tensors of integers or bytes differ."""
    differ = actual != expected
    if differ.any():
        place = differ.nonzero()[0].tolist()
        yield (
            f"{label} differs in {int(differ.sum())} of {differ.numel()} elements, first at {place}: "
            f"{actual[tuple(place)].item()}, the reference has {expected[tuple(place)].item()}"
        )


def buffers(label: str, actual: Any, expected: Any, numerics: Iterable[str]) -> Iterator[str]:
    """Compare by dtype: floats by budget, everything else exactly."""
    if actual.is_floating_point():
        yield from floats(label, actual, expected, numerics)
    else:
        yield from exact(label, actual, expected)
