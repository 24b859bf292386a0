"""What it costs on an H200 that a row's bits never depend on the size of a batch: one plan for every size.

Within a plan a row of attention or of a merge has the same bits in any call, but two plans may cut rows in other ways:
who wants equal bits at every size plans once, for the largest. Each size is timed as planned for it, and by a plan for
320 rows. Scores have the same bits by every plan, and cost nothing; whether they do is looked at.

Prediction, written before the first run: a plan for 320 rows cuts a row in one or two, so that one row of FP8 takes
twice to four times as long as in sixteen parts, 8 rows twice, 64 rows 1.2 times.

``python -m benchmarks nvidia_one_plan`` needs an H200.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import kimi_hal as hal
from benchmarks import indexer
from benchmarks import sparse_mla as portable
from benchmarks.indexer import microseconds
from benchmarks.record import keep
from kimi_hal.ops.indexer import IndexerSpec
from kimi_hal.ops.sparse_mla import MergeSpec, SparseMLASpec
from kimi_hal.ops.spec import Limits

DEVICE, MOST, PARTS = "cuda", 320, 8
SIZES = (1, 8, 32, 64, 128, 320)


def limits(rows: int) -> Limits:
    """Return the limits of a plan for so many rows."""
    return Limits(max_rows=rows, max_reqs=rows)


def attention(name: str, heads: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Time attention of each size as planned for it, and by the plan for the most rows."""
    spec = SparseMLASpec(num_heads=heads, latent=name, page=portable.PAGE, topk=portable.TOPK)
    cache = portable.cache_of(name)
    scale = torch.tensor([portable.SCALE], device=DEVICE) if name == portable.FP8 else None
    most = hal.plan("sparse_mla", spec, limits(MOST), device=DEVICE).run
    q, indices = portable.queries(MOST, heads), portable.selection(MOST)
    whole, _ = most(q, cache, indices, scale)
    for rows in SIZES:
        own = hal.plan("sparse_mla", spec, limits(rows), device=DEVICE).run
        some = (q[:rows], cache, indices[:rows], scale)
        assert torch.equal(most(*some)[0], whole[:rows])
        yield f"sparse_mla {name}, {heads} heads, {rows} rows", both(own, most, some)


def merges(heads: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Time merging of eight parts likewise."""
    spec = MergeSpec(parts=PARTS, num_heads=heads, return_lse=True)
    outs = torch.randn(PARTS, MOST, heads, 512, device=DEVICE).bfloat16()
    lses = torch.randn(PARTS, MOST, heads, device=DEVICE)
    most = hal.plan("merge_attn_states", spec, limits(MOST), device=DEVICE).run
    whole, _ = most(outs, lses)
    for rows in SIZES:
        own = hal.plan("merge_attn_states", spec, limits(rows), device=DEVICE).run
        some = (outs[:, :rows], lses[:, :rows])
        assert torch.equal(most(*some)[0], whole[:rows])
        yield f"merge_attn_states 8 parts, {heads} heads, {rows} rows", both(own, most, some)


def scores(name: str) -> Iterator[tuple[str, dict[str, bool]]]:
    """Tell whether scores have the bits of a plan for one row alone, in plans for several rows of one and of many."""
    spec, context = IndexerSpec(index=name, num_heads=indexer.HEADS), 8192
    alone = Limits(max_rows=1, max_reqs=64, max_context=context, rows_per_req=1)
    one = hal.plan("indexer_logits", spec, alone, device=DEVICE).run
    for requests, rows in ((64, 1), (8, 2), (2, 300)):
        most = Limits(max_rows=requests * rows, max_reqs=requests, max_context=context, rows_per_req=rows)
        batch = indexer.Batch(name, requests, context, rows, most)
        whole = hal.plan("indexer_logits", spec, most, device=DEVICE).run(*batch.operands)
        same = True
        for row in range(0, requests * rows, max(1, requests * rows // 8)):
            some = slice(row, row + 1)
            query = (x[some] for x in batch.query)
            found = one(*query, batch.cache, batch.table, batch.row_req[some], batch.row_len[some])
            keys = int(batch.row_len[row])
            same &= torch.equal(found[0, :keys], whole[row, :keys])
        yield f"indexer_logits {name}, {requests} requests of {rows} rows", {"bits of one row alone": same}


def both(
    own: Callable[..., Any], most: Callable[..., Any], operands: tuple[Tensor | None, ...]
) -> dict[str, float]:
    """Return the time by each of the two plans, and the second's over the first's."""
    out, lse = own(*operands)
    took = [
        microseconds(lambda f=f: f(*operands, out=out, lse_out=lse), 25)  # type: ignore[misc]
        for f in (own, most)
    ]
    return {
        "own plan, µs": round(took[0], 2),
        "plan for 320 rows, µs": round(took[1], 2),
        "ratio": round(took[1] / took[0], 2),
    }


def main() -> None:
    """Measure, print and keep."""
    figures: dict[str, Any] = {"device": torch.cuda.get_device_name()}
    for found in (
        scores(indexer.FP8),
        scores(indexer.MXFP4),
        attention(portable.FP8, 12),
        attention(portable.NVFP4, 12),
        attention(portable.FP8, 96),
        merges(12),
    ):
        for what, times in found:
            figures[what] = times
            print(what, times, flush=True)
    keep("h200/one_plan", figures)


if __name__ == "__main__":
    main()
