"""The queries, keys and values of one encoder layer, in integers.

Hidden states, weights and biases are stored as integers times a power of two, and every product and sum here
stays below 2⁵³: float64 arithmetic on them is exact, whatever the order of a sum, so all machines agree bit
for bit. Units: hidden states 2⁻¹⁶, weights 2⁻¹³, queries, keys and values 2⁻¹².
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

HIDDEN_BITS = 16
WEIGHT_BITS = 13
VALUE_BITS = 12
WIDTH = 384
HEADS = 12
HEAD_DIM = 32
#: Heads that are joined to one of 128 dimensions.
JOINED = 4


@dataclass(frozen=True)
class Projection:
    """One of the layer's projections: ``weight [384, 384]`` int16, ``bias [384]`` int32 in units of 2⁻¹²."""

    weight: Tensor
    bias: Tensor

    def __call__(self, hidden: Tensor) -> Tensor:
        """Project ``hidden [T, 384]``, float64 integers, to the heads side by side, float64 integers.

        The product is rounded to the unit of values, to nearest even, before the bias is added.
        """
        exact = hidden @ self.weight.double().T
        projected: Tensor = (exact * 2.0 ** (VALUE_BITS - HIDDEN_BITS - WEIGHT_BITS)).round() + self.bias
        return projected

    def joined(self, heads: Sequence[int]) -> Projection:
        """Return the part that makes the named heads side by side; four of them are 128 wide."""
        rows = (torch.tensor(heads)[:, None] * HEAD_DIM + torch.arange(HEAD_DIM)).flatten()
        return Projection(self.weight[rows], self.bias[rows])

    def absorb(self, query: Tensor) -> Tensor:
        """Return what each head's query asks of a hidden state, ``[T, 12, 384]`` float64 real numbers.

        ``query [T, 384]`` is what the layer's query projection gave; this is the key projection.
        ``absorb(q)[t, h] · hidden = q[t, h] · (weight_h hidden)``, the absorbed query of latent attention.
        The key's bias is left out: it shifts all scores of a row alike.
        """
        heads = query.view(-1, HEADS, HEAD_DIM)
        weight = self.weight.double().view(HEADS, HEAD_DIM, WIDTH)
        return torch.einsum("thd,hdc->thc", heads, weight) * 2.0 ** -(VALUE_BITS + WEIGHT_BITS)


def pairs(heads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what each of 96 heads is made of: two encoder heads and their shares, ``[H]`` each.

    Head ``12·v + i`` is encoder head i alone (v = 0), its sum with head i + v (v ≤ 5), or its difference
    from head i + v − 5 (v = 6, 7), sums and differences over √2 and heads counted modulo 12.
    """
    first, variant = heads % HEADS, heads // HEADS
    step = torch.where(variant > 5, variant - 5, variant)
    half = 0.5**0.5
    share = torch.where(variant == 0, 1.0, half).double()
    other = torch.where(variant == 0, 0.0, half).double() * torch.where(variant > 5, -1.0, 1.0).double()
    return first, (first + step) % HEADS, share, other
