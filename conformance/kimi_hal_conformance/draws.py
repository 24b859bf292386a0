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


def column(values: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
    """Return given integers as a column of a wider table, whose other columns would be read by a wrong stride."""
    table = torch.full((len(values), 3), 1, dtype=dtype)
    table[:, 0] = ints(values, dtype)
    return table[:, 0]


def hard_values(g: torch.Generator, rows: int, width: int) -> Tensor:
    """Return float32 rows that a quantiser gets wrong, one kind a row, again from the first where rows are more.

    Zeros of both signs; a tiny block beside an ordinary one; all below any floor; the largest numbers; subnormals of
    bfloat16 and of float32; halves of two codes; powers of two; one large element among small ones.
    """
    x = normal(g, rows, width)
    step, half = torch.arange(width), width // 2
    for row in range(rows):
        kind = row % 10
        if kind == 0:
            x[row] = torch.where(step % 2 == 0, 0.0, -0.0)
        elif kind == 1:
            x[row, :half] = 1e-6
        elif kind == 2:
            x[row] *= 1e-9
        elif kind == 3:
            x[row] = x[row].sign() * 3e38
        elif kind == 4:
            x[row] = x[row] * 2.0**-130
        elif kind == 5:
            x[row] = x[row].sign() * 2.0**-149
        elif kind == 6:
            x[row] = (step % 33).float() / 16 + 1.0625
        elif kind == 7:
            x[row] = torch.ldexp(x[row].sign(), step % 24 - 12)
        elif kind == 8:
            x[row] *= 1e-3
            x[row, width // 3] = 448.0
    return x


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
    """Tell which rows of float64 scores have a best key behind the cut that is close to the last before it.

    Zeros on both sides are none: a rectified sum is 0 in every precision, and positions decide.
    """
    if scores.shape[1] <= k:
        return torch.zeros(scores.shape[0], dtype=torch.bool)
    best = scores.sort(dim=1, descending=True).values
    gap = best[:, k - 1] - best[:, k]
    scale = scores.masked_fill(scores.isinf(), 0.0).abs().amax(dim=1)
    zeros = (best[:, k - 1] == 0) & (best[:, k] == 0)
    return best[:, k].isfinite() & (gap <= slack * scale) & ~zeros


def block_tables(g: torch.Generator, lengths: Sequence[int], page: int, pages: int, columns: int) -> Tensor:
    """Return block tables of shuffled pages; columns past a request's last page hold −1.

    Requests of more than a page begin with one page, as those of one prefix do; all others are a request's own.
    """
    table = own_pages(g, lengths, page, pages, columns)
    longer = [request for request, length in enumerate(lengths) if length > page]
    if longer:
        table[longer, 0] = table[longer[0], 0].item()
    return table


def own_pages(g: torch.Generator, lengths: Sequence[int], page: int, pages: int, columns: int) -> Tensor:
    """Return block tables of shuffled, distinct pages; columns past a request's last page hold −1."""
    table = torch.full((len(lengths), columns), -1, dtype=torch.int32)
    order = torch.randperm(pages, generator=g).tolist()
    for request, length in enumerate(lengths):
        for column in range(-(-length // page)):
            table[request, column] = order.pop()
    return table


def owned_slots(table: Tensor, lengths: Sequence[int], page: int) -> Tensor:
    """Return the slots that the requests' tokens occupy, in order, each once."""
    slots = dict.fromkeys(
        row[position // page] * page + position % page
        for row, length in zip(table.tolist(), lengths, strict=False)
        for position in range(length)
    )
    return torch.tensor(list(slots), dtype=torch.int64)
