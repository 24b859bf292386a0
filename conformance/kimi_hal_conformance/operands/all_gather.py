"""Small operands for any Spec of the all_gather family."""

from __future__ import annotations

import math

import torch

from kimi_hal.ops.all_gather import GatherSpec, total_problem
from kimi_hal_conformance.case import Make, Operands
from kimi_hal_conformance.operands.recipe import Fields, Recipe

ROWS = 8


def shape(spec: GatherSpec) -> tuple[int, ...]:
    """Return the shape of one rank's share."""
    return (ROWS, 3, 5, *([2] * 5))[: spec.ndim]


def total(spec: GatherSpec) -> int | None:
    """Return how many rows all ranks have: the most that their interleaving admits, not all where it can be."""
    if spec.layout != "token_order":
        return None
    legal = (n for n in range(spec.dcp.world * ROWS - 1, -1, -1) if total_problem(spec, ROWS, n) is None)
    return next(legal)


def gather(spec: GatherSpec, rows: int) -> Make:
    """Return random bytes on each rank, NaN payloads included; of booleans only the two that they have."""

    def make(g: torch.Generator) -> Operands:
        dtype = getattr(torch, spec.dtype)
        whole = total(spec)

        def share() -> Operands:
            *outer, last = shape(spec)
            raw = torch.randint(0, 256, (*outer, last * dtype.itemsize), generator=g, dtype=torch.uint8)
            x = (raw & 1 if dtype == torch.bool else raw).view(dtype)
            return {"x": x} if whole is None else {"x": x, "total": whole}

        return {"ranks": [share() for _ in range(spec.dcp.world)]}

    return make


def gather_bytes(spec: GatherSpec, rows: int) -> int:
    """Return the bytes of the gathered tensor on every rank, and of a thread."""
    size: int = math.prod(shape(spec)) * getattr(torch, spec.dtype).itemsize
    return 4 * size * spec.dcp.world**2 + spec.dcp.world * (2 << 20)


def bind(fields: Fields) -> None:
    """A rank is each of its group in turn."""
    fields["dcp.rank"] = 0


RANK = frozenset({"dcp.rank"})
RECIPES = {
    "all_gather": Recipe(
        gather, gather_bytes, ranks=lambda spec: spec.dcp.world, bind=bind, tied=RANK, rows=ROWS
    )
}
