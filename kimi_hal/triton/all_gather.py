"""The portable Triton kernel of ``all_gather``: received bytes are laid out as the Spec says, in one pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kimi_hal.dispatch.contract import BuildContext
from kimi_hal.errors import ContractError
from kimi_hal.ops.all_gather import GatherSpec, gathered_rows, total_problem
from kimi_hal.parallel.groups import Group, require
from kimi_hal.triton.shards import local_of

#: Words that a program moves at once, and those of one piece at most.
TILE, WIDTH = 4096, 1024
DENSE = torch.contiguous_format
#: Words by size in bytes.
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@triton.jit(do_not_specialize=("rows", "pieces", "world"))
def lay_out(
    parts,
    out,
    rows,
    pieces,
    width,
    out_stride,
    world,
    TOKENS: tl.constexpr,
    WORLD: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Move pieces of ``width`` words from ``parts [W, rows, width]`` into ``out``.

    ``TOKENS``: piece p is the row of position p, and row p of ``out``. Else piece i · W + r is row i of rank r, and
    stands r pieces from the beginning of row i.
    """
    piece = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (piece < pieces)[:, None] & (column < width)[None, :]
    if TOKENS:
        rank = piece // INTERLEAVE % WORLD
        row = local_of(piece, WORLD, INTERLEAVE)
        to = piece.to(tl.int64) * out_stride
    else:
        row = piece // world
        rank = piece - row * world
        to = row.to(tl.int64) * out_stride + rank * width
    start = (rank.to(tl.int64) * rows + row) * width
    word = tl.load(parts + start[:, None] + column[None, :], mask=inside, other=0)
    tl.store(out + to[:, None] + column[None, :], word, mask=inside)


class Gatherer:
    """Gathers a tensor from all ranks, for one Spec."""

    def __init__(self, spec: GatherSpec, group: Group | None) -> None:
        self.spec, self.world = spec, spec.dcp.world
        self.group = require(group, spec.dcp) if self.world > 1 else None
        self.tokens = spec.layout == "token_order"

    def __call__(self, x: Tensor, total: int | None, out: Tensor | None) -> Tensor:
        """Return every rank's tensor as the Spec lays it out, in ``out`` if it is given."""
        if self.group is None:
            return self.alone(x, total, out)
        if self.spec.layout == "rank_major":
            return self.collected(x, self.group, out)
        if out is None:
            out = x.new_empty(self.shape(x, total))
        parts = self.group.all_gather(x)
        rows = self.rows(out)
        if rows is None:
            whole = out.new_empty(self.sides(out))
            self.lay_out(parts, whole)
            return out.copy_(whole.view(out.shape))
        self.lay_out(parts, rows)
        return out

    def alone(self, x: Tensor, total: int | None, out: Tensor | None) -> Tensor:
        """Return one rank's own tensor, or its first ``total`` rows."""
        own = x[None] if self.spec.layout == "rank_major" else x[:total]
        return own.detach().clone(memory_format=DENSE) if out is None else out.copy_(own)

    def collected(self, x: Tensor, group: Group, out: Tensor | None) -> Tensor:
        """Return the ranks' tensors behind each other: the group writes them where they belong."""
        if out is None or out.is_contiguous():
            return group.all_gather(x, out=out)
        return out.copy_(group.all_gather(x))

    def shape(self, x: Tensor, total: int | None) -> tuple[int, ...]:
        """Return the shape of a result that is laid out."""
        if self.tokens:
            return (gathered_rows(self.spec, x.shape[0], total), *x.shape[1:])
        return (*x.shape[:-1], self.world * x.shape[-1])

    def sides(self, out: Tensor) -> tuple[int, int]:
        """Return how many rows a result has, and how wide they are."""
        lead = 1 if self.tokens else out.dim() - 1
        return math.prod(out.shape[:lead]), math.prod(out.shape[lead:])

    def rows(self, out: Tensor) -> Tensor | None:
        """Return a result as rows, in token order one a position; ``None`` where a row is not contiguous."""
        try:
            rows = out.view(self.sides(out))
        except RuntimeError:
            return None
        return rows if rows.shape[1] < 2 or rows.stride(1) == 1 else None

    def lay_out(self, parts: Tensor, out: Tensor) -> None:
        """Move ``parts [W, *x.shape]`` into rows."""
        share = out.shape[1] if self.tokens else out.shape[1] // self.world
        pieces = out.shape[0] * (1 if self.tokens else self.world)
        if not pieces * share:
            return
        words = word(parts, out, share)
        sent, made = parts.reshape(-1).view(words), as_words(out, words)
        width = share * out.element_size() // words.itemsize
        columns = min(WIDTH, triton.next_power_of_2(width))
        height = min(64, TILE // columns)
        lay_out[(triton.cdiv(pieces, height), triton.cdiv(width, columns))](
            sent,
            made,
            parts.shape[1] if self.tokens else out.shape[0],
            pieces,
            width,
            made.stride(0),
            self.world,
            TOKENS=self.tokens,
            WORLD=self.world,
            INTERLEAVE=self.spec.dcp.interleave,
            ROWS=height,
            COLUMNS=columns,
        )


def word(parts: Tensor, out: Tensor, share: int) -> torch.dtype:
    """Return the largest word of which a piece, a row's stride and both addresses are multiples."""
    size = out.element_size()
    offsets = (out.stride(0) * size, out.storage_offset() * size, parts.storage_offset() * size)
    numbers = (share * size, out.data_ptr(), parts.data_ptr(), *offsets)
    return next(d for n, d in WORDS.items() if not any(number % n for number in numbers))


def as_words(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows as words; the last dimension's stride is 1, whatever a single column says."""
    return rows.as_strided(rows.shape, (rows.stride(0), 1)).view(dtype)


def build_all_gather(ctx: BuildContext) -> Callable[..., Any]:
    """Make the run function of ``all_gather``: a message, and one copy where ranks do not stand behind each other."""
    spec, check = ctx.spec, ctx.check
    gather = Gatherer(spec, ctx.group)

    def run(x: Any, total: Any = None, *, out: Any = None, workspace: Any = None) -> Any:
        check(x=x, total=total, out=out, workspace=workspace)
        problem = total_problem(spec, x.shape[0], total)
        if problem:
            raise ContractError("all_gather", [problem])
        return gather(x, total, out)

    return run
