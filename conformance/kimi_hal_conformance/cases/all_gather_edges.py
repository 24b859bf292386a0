"""Edges of the all_gather family: views of wider rows, and numbers that a protocol could take for a mark."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kimi_hal.ops.all_gather import GatherSpec
from kimi_hal.ops.spec import DCP, Limits
from kimi_hal_conformance.case import INTERP, Case, Make, Operands, add
from kimi_hal_conformance.draws import normal, strided

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


def one_dimension(spec: GatherSpec) -> Make:
    """Return vectors, each rank's of other numbers."""

    def make(g: torch.Generator) -> Operands:
        return {"ranks": [{"x": normal(g, 6)} for _ in range(spec.dcp.world)]}

    return make


def no_rows(spec: GatherSpec) -> Make:
    """Return tensors without a row."""
    return lambda g: {"ranks": [{"x": torch.empty(0, 20)} for _ in range(spec.dcp.world)]}


def every_bit(spec: GatherSpec) -> Make:
    """Return numbers whose low bits, zero's sign and NaN payloads no conversion keeps."""

    def make(g: torch.Generator) -> Operands:
        dtype = getattr(torch, spec.dtype)
        size = dtype.itemsize

        def share() -> Operands:
            raw = torch.randint(0, 256, (4, 24 * size), generator=g, dtype=torch.uint8)
            ends = raw.view(4, 24, size)
            ends[:, 0, : size - 1], ends[:, 0, -1] = 0, 0x80  # −0, or the smallest integer
            ends[:, 1, : size - 1], ends[:, 1, -1] = 0xFF, 0x7F  # NaN with a payload, or the largest integer
            return {"x": raw.view(dtype)}

        return {"ranks": [share() for _ in range(spec.dcp.world)]}

    return make


def cases() -> Iterator[Case]:
    """Every layout; every wide dtype that the plain cases leave out."""
    for dtype in ("int16", "int64", "float16", "float64"):
        spec = GatherSpec(layout="rank_major", dtype=dtype, dcp=DCP(world=2), ndim=2)
        name = f"all_gather/edges/every-bit/{dtype}"
        yield Case(name, "all_gather", spec, LIMITS, every_bit(spec), since=INTERP, fault=24, ranks=2)
    for layout in ("rank_major", "token_order", "last_dim"):
        spec = GatherSpec(layout=layout, dtype="float32", dcp=DCP(world=2), ndim=2)
        name = f"all_gather/edges/no-rows/{layout}"
        yield Case(name, "all_gather", spec, LIMITS, no_rows(spec), since=INTERP, fault=24, ranks=2)
        flat = GatherSpec(layout=layout, dtype="float32", dcp=DCP(world=3, interleave=2), ndim=1)
        name = f"all_gather/edges/one-dimension/{layout}"
        yield Case(name, "all_gather", flat, LIMITS, one_dimension(flat), since=INTERP, ranks=3)
    for dtype in ("bfloat16", "float32"):
        for layout in ("rank_major", "token_order", "last_dim"):
            for world, interleave in ((1, 1), (2, 4)):
                dcp = DCP(world=world, interleave=interleave)
                spec = GatherSpec(layout=layout, dtype=dtype, dcp=dcp, ndim=2)
                name = f"all_gather/edges/{layout}/{dtype}/world{world}"
                yield Case(name, "all_gather", spec, LIMITS, marks(spec), since=INTERP, fault=24, ranks=world)


WHY = {
    "all_gather/edges/every-bit": "−0, NaN payloads and integers beyond 2^53: bytes are moved, never converted.",
    "all_gather/edges/one-dimension": "Vectors: their rows are their last dimension too.",
    "all_gather/edges/no-rows": "Tensors without a row: a dimension of length 0 is legal.",
    "all_gather/edges/": "Both zeros, NaN and the largest numbers in views of wider rows: no value is a mark.",
}

add(cases(), WHY)
