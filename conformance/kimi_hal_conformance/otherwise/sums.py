"""Sums in float32 that are as good as the reference's and round otherwise."""

from __future__ import annotations

import torch
from torch import Tensor


def fused(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return ``total + a·b`` rounded once, as a contracted multiply-add is (within the double rounding of float64)."""
    return (total.double() + a.double() * b.double()).to(total.dtype)


def dot(a: Tensor, b: Tensor, step: int = 16) -> Tensor:
    """Return ``a @ b.T`` of ``[m, k]`` and ``[n, k]`` in float32: slices of k one by one, from the last."""
    total = a.new_zeros(a.shape[0], b.shape[0])
    for end in range(a.shape[1], 0, -step):
        part = slice(max(0, end - step), end)
        total = total + a[:, part] @ b[:, part].T
    return total


def one_by_one(terms: Tensor, dim: int) -> Tensor:
    """Add along a dimension from the last term to the first."""
    total = torch.zeros_like(terms.select(dim, 0)) if terms.shape[dim] else terms.sum(dim)
    for i in range(terms.shape[dim] - 1, -1, -1):
        total = total + terms.select(dim, i)
    return total


def sigmoid(x: Tensor) -> Tensor:
    """Return the logistic function by torch's own formula."""
    return torch.sigmoid(x)


def silu(x: Tensor) -> Tensor:
    """Return x · sigmoid(x)."""
    return x * torch.sigmoid(x)


def softplus(x: Tensor, threshold: float = 20.0) -> Tensor:
    """Return ln(1 + exp(x)) as max(x, 0) + log1p(exp(−|x|))."""
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))


def l2_normalized(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Divide by the root of the sum of squares."""
    return x / torch.sqrt(x.square().sum(-1, keepdim=True) + eps)


def exp(x: Tensor) -> Tensor:
    """Return the exponential by base 2, as kernels compute it."""
    return torch.exp2(x * 1.4426950408889634)
