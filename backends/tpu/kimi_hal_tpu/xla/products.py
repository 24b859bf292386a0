"""Matrix products in float32 whose operands are exact in bfloat16, or are split into numbers that are.

A TPU's MXU multiplies bfloat16 numbers; XLA's default for float32 matrices rounds them to that first.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: bfloat16 terms that hold a float32 number.
WHOLE = 3


def terms(x: Tensor, count: int) -> list[Tensor]:
    """Split float32 numbers into ``count`` bfloat16 numbers, held as float32, whose sum they are."""
    found = []
    for _ in range(count):
        part = x.bfloat16().float()
        found.append(part)
        # An infinite number is its own first term: ∞ − ∞ would be no number.
        x = torch.where(part.abs() == torch.inf, 0.0, x - part)
    return found


def product(a: Tensor, b: Tensor, a_terms: int = 1, b_terms: int = 1) -> Tensor:
    """Return ``a @ b`` in float32; an operand of one term must be exact in bfloat16."""
    total = None
    for i, left in enumerate(terms(a, a_terms) if a_terms > 1 else [a]):
        for j, right in enumerate(terms(b, b_terms) if b_terms > 1 else [b]):
            if i + j < WHOLE:
                part = torch.matmul(left, right)
                total = part if total is None else total + part
    assert total is not None
    return total
