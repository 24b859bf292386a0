"""Cases of the all_gather family: layouts, dtypes, interleaves and ragged totals, bytes compared."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kimi_hal.ops.all_gather import GatherSpec
from kimi_hal.ops.spec import DCP, Limits
from kimi_hal_conformance.case import INTERP, Case, Make, Operands, add

LIMITS = Limits(max_rows=64, max_reqs=64)


def operands(spec: GatherSpec, rows: int, total: int | None) -> Make:
    """Return random bytes on each rank, NaN payloads included, as views of wider rows."""

    def make(g: torch.Generator) -> Operands:
        dtype = getattr(torch, spec.dtype)

        def share() -> Operands:
            shape = (rows, *([3] * (spec.ndim - 2)), 16 * dtype.itemsize)
            raw = torch.randint(0, 256, shape, generator=g, dtype=torch.uint8)
            x = raw.view(dtype)
            return {"x": x} if total is None else {"x": x, "total": total}

        return {"ranks": [share() for _ in range(spec.dcp.world)]}

    return make


def cases() -> Iterator[Case]:
    """Each layout and dtype over one, two and three ranks."""
    for world, interleave in ((1, 1), (2, 1), (3, 4)):
        dcp = DCP(world=world, interleave=interleave)
        for dtype in ("bfloat16", "float32", "uint8", "int32", "float8_e4m3fn"):
            for layout in ("rank_major", "token_order", "last_dim"):
                spec = GatherSpec(layout=layout, dtype=dtype, dcp=dcp, ndim=3 if dtype == "bfloat16" else 2)
                name = f"all_gather/{layout}/{dtype}/world{world}-interleave{interleave}"
                yield Case(
                    name, "all_gather", spec, LIMITS, operands(spec, 8, None), since=INTERP, ranks=world
                )
        ragged = GatherSpec(layout="token_order", dtype="uint8", dcp=dcp)
        for total in (0, 1, 8 * world - 3):
            name = f"all_gather/token_order/ragged{total}/world{world}-interleave{interleave}"
            yield Case(
                name, "all_gather", ragged, LIMITS, operands(ragged, 8, total), since=INTERP, ranks=world
            )


WHY = {
    "all_gather/rank_major/": "Rank order and bytes of every dtype: nothing is converted on the way.",
    "all_gather/token_order/": "Shares interleaved back into the order of tokens, over ranks and interleaves.",
    "all_gather/last_dim/": "Columns of each rank side by side, in rank order.",
    "all_gather/token_order/ragged": "A total that the ranks do not divide: the last shares are short, or empty.",
}

add(cases(), WHY)
