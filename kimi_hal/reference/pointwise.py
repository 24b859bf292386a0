"""Functions whose bits at an element depend on that element alone, not on where it stands in a tensor.

torch computes ``sigmoid``, ``silu`` and ``softplus`` with one formula inside a vector register and another at
a tensor's tail, and sums in an order that depends on layout and device. A recurrence that must give the same
bits for one call, for chunks and for steps is therefore made of the functions below, of ``exp``, ``log1p``
and of single arithmetic operations, which have one result each.
"""

from __future__ import annotations

import torch
from torch import Tensor


def tree_sum(x: Tensor, dim: int) -> Tensor:
    """Sum over ``dim`` by adding its first half to its last until one element is left; ``dim`` is removed."""
    while (size := x.shape[dim]) > 1:
        half = size // 2
        total = x.narrow(dim, 0, half) + x.narrow(dim, size - half, half)
        x = torch.cat([total, x.narrow(dim, half, 1)], dim) if size % 2 else total
    return x.squeeze(dim)


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(−x)); exp overflows to inf for large negative x, which gives 0."""
    return 1.0 / (1.0 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    """Return x · sigmoid(x)."""
    return x / (1.0 + torch.exp(-x))


def softplus(x: Tensor, threshold: float = 20.0) -> Tensor:
    """Return ln(1 + exp(x)), and x itself above the threshold."""
    return torch.where(x > threshold, x, torch.log1p(torch.exp(x.clamp(max=threshold))))


def log_softplus(x: Tensor) -> Tensor:
    """Return ln ln(1 + exp(x)), which is x itself where exp(x) is nothing beside 1."""
    return torch.where(x < -40.0, x, torch.log(softplus(x)))


def times_exp(x: Tensor, y: Tensor, log_x: Tensor) -> Tensor:
    """Return x · exp(y) for x ≥ 0: through logarithms where a factor is beyond the normal numbers, else directly."""
    factor, limits = torch.exp(y), torch.finfo(x.dtype)
    direct = (x >= limits.tiny) & (factor >= limits.tiny) & (factor <= limits.max)
    return torch.where(direct, x * factor, torch.exp(y + log_x))


def l2_normalized(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Divide by the root of the sum of squares over the last dimension, eps added to that sum."""
    return x * torch.rsqrt(tree_sum(x * x, -1) + eps)[..., None]
