"""Operands drawn from a seeded generator, in the shapes and layouts that caches and engines have."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kimi_hal import formats

#: A byte that is NaN in e4m3fn, in a float32 scale of such bytes, and in bf16: what unowned memory holds.
STALE = 0xFF


def normal(
    g: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32, spread: float = 1.0
) -> Tensor:
    """Return normal values of a standard deviation."""
    return (torch.randn(*shape, generator=g) * spread).to(dtype)


def integers(
    g: torch.Generator, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32
) -> Tensor:
    """Return integers in ``[low, high)``."""
    return torch.randint(low, high, shape, generator=g, dtype=dtype)


def ints(values: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
    """Return given integers."""
    return torch.tensor(list(values), dtype=dtype)


def strided(tensor: Tensor, pad: int = 8) -> Tensor:
    """Return the same values as a view of wider rows, as a slice of a fused projection is."""
    wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] + pad), float("nan")).to(tensor.dtype)
    wide[..., : tensor.shape[-1]] = tensor
    return wide[..., : tensor.shape[-1]]


def stale_pages(pages: int, page_bytes: int, stride_pad: int = 0) -> Tensor:
    """Return cache pages that hold stale NaN bytes, with gaps between them as a packed block row has."""
    return torch.full((pages, page_bytes + stride_pad), STALE, dtype=torch.uint8)[:, :page_bytes]


def latent_cache(
    g: torch.Generator, name: str, page: int, pages: int, live: Tensor, scale: Tensor | None
) -> Tensor:
    """Return a latent cache whose ``live`` slots hold normalised latents and all others stale NaN."""
    fmt = formats.latent(name)
    cache = stale_pages(pages, page * fmt.row_bytes, stride_pad=64)
    latent, shared = normal(g, live.numel(), 512), normal(g, live.numel(), 64, spread=2.0)
    fmt.write(cache, page, live, latent, shared, scale)
    return cache


def index_cache(g: torch.Generator, name: str, pages: int, live: Tensor) -> Tensor:
    """Return an index-key cache whose ``live`` slots hold keys and all others stale NaN."""
    fmt = formats.index(name)
    cache = stale_pages(pages, fmt.page_bytes, stride_pad=128)
    fmt.write(cache, live, normal(g, live.numel(), fmt.head_dim))
    return cache


def near_ties(y: Tensor, slack: Tensor) -> Tensor:
    """Tell which float64 values may round to either of two bfloat16 numbers, if they are wrong by ``slack``.

    Where a bfloat16 result is an operand of what follows, such a value would turn a last bit of float32 into
    a last bit of bfloat16. A case that has one proves nothing, so it draws again.
    """
    step = torch.ldexp(torch.ones_like(y), y.frexp().exponent - 8)
    place = y / step
    return (y != 0) & ((place - place.floor() - 0.5).abs() * step <= slack)


def close_cut(scores: Tensor, k: int, slack: float = 1e-4) -> Tensor:
    """Tell which rows of float64 scores have a best key behind the cut that is close to the last before it."""
    if scores.shape[1] <= k:
        return torch.zeros(scores.shape[0], dtype=torch.bool)
    best = scores.sort(dim=1, descending=True).values
    gap = best[:, k - 1] - best[:, k]
    scale = scores.masked_fill(scores.isinf(), 0.0).abs().amax(dim=1)
    return best[:, k].isfinite() & (gap <= slack * scale)


def block_tables(g: torch.Generator, lengths: Sequence[int], page: int, pages: int, columns: int) -> Tensor:
    """Return block tables of shuffled, distinct pages; columns past a request's last page hold −1."""
    table = torch.full((len(lengths), columns), -1, dtype=torch.int32)
    order = torch.randperm(pages, generator=g).tolist()
    for request, length in enumerate(lengths):
        for column in range(-(-length // page)):
            table[request, column] = order.pop()
    return table


def owned_slots(table: Tensor, lengths: Sequence[int], page: int) -> Tensor:
    """Return the slots that the requests' tokens occupy, in order."""
    slots = [
        int(table[request, position // page]) * page + position % page
        for request, length in enumerate(lengths)
        for position in range(length)
    ]
    return torch.tensor(slots, dtype=torch.int64)
