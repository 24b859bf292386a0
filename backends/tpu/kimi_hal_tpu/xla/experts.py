"""Grouped MXFP4 experts as a traced program: a loop over tiles of rows of one expert each, as many as there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kimi_hal.formats import minifloat
from kimi_hal.ops.moe import MoESpec
from kimi_hal.reference import moe as reference
from kimi_hal_tpu import expert_grid, scales
from kimi_hal_tpu.xla import powers
from kimi_hal_tpu.xla.loops import repeat


class Tiles(NamedTuple):
    """What each tile does; tiles from ``used`` on do nothing.

    Attributes:
        used: int64 without dimensions, how many tiles have rows.
        expert: ``[tiles]`` int64, the local expert.
        rows: ``[tiles, size]`` int64; T where a tile has no more rows.
        weights: ``[tiles, size]`` float32, 0 there.
    """

    used: Tensor
    expert: Tensor
    rows: Tensor
    weights: Tensor


def cut(spec: MoESpec, local: Tensor, weights: Tensor, size: int) -> Tiles:
    """Sort ``[T, k]`` routes by local expert (−1: none here), then by row, and cut them into tiles of ``size`` rows."""
    rows, topk = local.shape
    device = local.device
    flat = local.reshape(-1)
    order = torch.sort(torch.where(flat < 0, spec.num_local, flat), stable=True).indices
    counts = (flat[:, None] == torch.arange(spec.num_local, device=device)).long().sum(dim=0)
    needed = (counts + size - 1) // size
    first, ends = counts.cumsum(0) - counts, needed.cumsum(0)
    tile = torch.arange(expert_grid.most(spec, rows * topk, size), device=device)
    expert = (ends <= tile[:, None]).long().sum(dim=1).clamp(max=spec.num_local - 1)
    own = (tile - (ends - needed)[expert])[:, None] * size + torch.arange(size, device=device)
    route = order[(first[expert][:, None] + own).clamp(0, rows * topk - 1)]
    there = own < counts[expert][:, None]
    return Tiles(
        used=ends[-1],
        expert=expert,
        rows=torch.where(there, route // topk, rows),
        weights=torch.where(there, weights.reshape(-1)[route], 0.0),
    )


def run(spec: MoESpec, x: Tensor, tiles: Tiles, weights: Sequence[Tensor]) -> Tensor:
    """Return the sum of each row's experts, ``[T, hidden]`` float32, in ascending local index.

    The weights of an expert without rows are neither read nor decoded. What fills up a tile reads a row of zeros behind
    the others, and adds to one behind the sums.
    """
    rows = torch.cat([x, torch.zeros_like(x[:1])])

    def one(number: Tensor, changing: list[Tensor], fixed: list[Tensor]) -> list[Tensor]:
        picked, part = tile(spec, number.reshape(1), fixed)
        return [changing[0].index_add(0, picked, part)]

    fixed = [rows, tiles.expert, tiles.rows, tiles.weights, *weights]
    return repeat(one, tiles.used, [torch.zeros_like(rows)], fixed)[0][:-1]


def tile(spec: MoESpec, number: Tensor, fixed: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return a tile's row numbers ``[size]`` and what its expert adds to each ``[size, hidden]``."""
    x, experts, rows, factors, *weights = fixed
    expert = experts.index_select(0, number)
    w13, w13_scale, w2, w2_scale = (tensor.index_select(0, expert)[0] for tensor in weights)
    picked = rows.index_select(0, number)[0]
    inputs, factor = x.index_select(0, picked), factors.index_select(0, number)[0][:, None]
    both = summed(inputs, w13, w13_scale, torch.ones_like(factor))
    hidden = reference.activate(spec, *both.chunk(2, dim=1)).bfloat16().float()
    return picked, summed(hidden, w2, w2_scale, factor)


def summed(x: Tensor, packed: Tensor, scale: Tensor, factor: Tensor) -> Tensor:
    """Return ``(x @ wᵀ) · factor`` of one expert's matrix, ``x [n, K]``, ``packed [N, K / 2]``, ``factor [n, 1]``.

    Groups of small scales are multiplied apart, and only where there are any: their sums are 2^64 times what they
    should be until the factor is in.
    """
    small = scale < scales.SMALL
    found = torch.matmul(x, weights(packed, powers.of_large(scale)).transpose(0, 1)) * factor

    def add(_: Tensor, changing: list[Tensor], fixed: list[Tensor]) -> list[Tensor]:
        x, packed, scale, factor = fixed
        part = torch.matmul(x, weights(packed, powers.of_small(scale)).transpose(0, 1))
        return [changing[0] + powers.scaled(part, scales.BACK, factor, scales.BACK)]

    return repeat(add, small.any().long(), [found], [x, packed, scale, factor])[0]


def weights(packed: Tensor, scale: Tensor) -> Tensor:
    """Return e2m1 codes under float32 scales, ``[N, K]``."""
    values = minifloat.decode_nibbles(packed).unflatten(1, (*scale.shape[1:], -1))
    return (values * scale[..., None]).flatten(1)
