"""Edges of the all_gather family: views of wider rows, and numbers that a protocol could take for a mark."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kimi_hal.ops.all_gather import GatherSpec
from kimi_hal.ops.spec import DCP, Limits
from kimi_hal_conformance.case import INTERP, Case, Make, Operands, add
from kimi_hal_conformance.draws import strided

LIMITS = Limits(max_rows=64, max_reqs=64)


def marks(spec: GatherSpec) -> Make:
    """Return views of wider rows, full of both zeros, NaN and the largest numbers."""

    def make(g: torch.Generator) -> Operands:
        values = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -3e38, 1e-45])
        dtype = getattr(torch, spec.dtype)

        def share() -> Operands:
            return {"x": strided(values[torch.randint(6, (8, 20), generator=g)].to(dtype))}

        return {"ranks": [share() for _ in range(spec.dcp.world)]}

    return make


def no_rows(spec: GatherSpec) -> Make:
    """Return tensors without a row."""
    return lambda g: {"ranks": [{"x": torch.empty(0, 20)} for _ in range(spec.dcp.world)]}


def cases() -> Iterator[Case]:
    """Every layout."""
    for layout in ("rank_major", "token_order", "last_dim"):
        spec = GatherSpec(layout=layout, dtype="float32", dcp=DCP(world=2), ndim=2)
        name = f"all_gather/edges/no-rows/{layout}"
        yield Case(name, "all_gather", spec, LIMITS, no_rows(spec), since=INTERP, fault=24, ranks=2)
    for dtype in ("bfloat16", "float32"):
        for layout in ("rank_major", "token_order", "last_dim"):
            for world, interleave in ((1, 1), (2, 4)):
                dcp = DCP(world=world, interleave=interleave)
                spec = GatherSpec(layout=layout, dtype=dtype, dcp=dcp, ndim=2)
                name = f"all_gather/edges/{layout}/{dtype}/world{world}"
                yield Case(name, "all_gather", spec, LIMITS, marks(spec), since=INTERP, fault=24, ranks=world)


WHY = {
    "all_gather/edges/no-rows": "Tensors without a row: a dimension of length 0 is legal.",
    "all_gather/edges/": "Both zeros, NaN and the largest numbers in views of wider rows: no value is a mark.",
}

add(cases(), WHY)
