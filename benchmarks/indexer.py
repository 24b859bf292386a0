"""The portable indexer and selection on a GPU, beside torch, by CUDA-graph replay.

Predictions for an H200 (copy 4.28 TB/s, bf16 700 TFLOP/s measured), written before the first run:

* scores of FP8 keys, 32 heads: bytes are 132 read and 4 written a key, so 64 × 128K cannot take less than 266 µs. A
  tile of 128 keys is about 900 instructions a warp, which alone would take as long; 350–450 µs, 0.6–0.75 of the copy
  rate. One row of 128K: 12 µs or more, a launch and two waits for memory. MXFP4 keys have half the bytes but twice the
  arithmetic: about the same time.
* prefill of 2,048 rows × 128K: 2.2 TFLOP at the float16 rate is 3.1 ms, and ReLU, weight and sum over heads take 1.2 ms
  that overlap badly: 4.5–6 ms.
* top-2,048 of float32: four launches of 2–3 µs and two passes. 64 × 128K: 40–60 µs; 1 × 128K and 1 × 1M: 25–35 µs;
  64 × 1M: 150–200 µs; 2,048 × 128K: 0.6–0.8 ms; 1 × 8K (one launch): 8–12 µs.

``python -m benchmarks indexer`` needs a CUDA device. Every timed result is compared first: scores with the reference in
float64 on two rows, selections with torch's own on all rows.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.record import keep
from kimi_hal import formats
from kimi_hal.dispatch.contract import BuildContext, Sizes
from kimi_hal.ops import OPERATORS, check
from kimi_hal.ops.indexer import IndexerSpec, IndexerTopKSpec, IndexQuerySpec, StoreIndexSpec
from kimi_hal.ops.spec import Limits, Spec
from kimi_hal.ops.topk_merge import TopKSpec
from kimi_hal.reference import indexer as reference

DEVICE = "cuda"
FP8, MXFP4 = "index.fp8.e4m3fn.pow2.page64", "index.mxfp4.page64"
HEADS, TOPK = 32, 2048
K = 1024
#: Requests, tokens of each, rows of each request.
DECODES = (
    (1, 8 * K, 1),
    (1, 128 * K, 1),
    (1, 1024 * K, 1),
    (8, 128 * K, 1),
    (32, 32 * K, 1),
    (64, 32 * K, 1),
    (64, 128 * K, 1),
    (64, 128 * K, 4),
)
PREFILLS = ((2048, 32 * K), (2048, 128 * K))
SELECTIONS = (
    (1, 8 * K),
    (64, 8 * K),
    (64, 32 * K),
    (1, 128 * K),
    (64, 128 * K),
    (1, 1024 * K),
    (64, 1024 * K),
    (2048, 128 * K),
)
#: Bytes written between repetitions, more than the L2 cache holds.
FLUSH = 256 << 20


def built(operator: str, spec: Spec, limits: Limits) -> Callable[..., Any]:
    """Return the run function of the portable implementation."""
    from kimi_hal.triton import indexer, topk_merge

    module = topk_merge if operator == "topk_select" else indexer
    major, minor = torch.cuda.get_device_capability()
    context = BuildContext(
        operator=operator,
        spec=spec,
        limits=limits,
        device=DEVICE,
        arch=f"sm_{major}{minor}",
        sizes=Sizes(),
        group=None,
        persistent=None,
        check=check.compiled(OPERATORS[operator], spec, limits, device=DEVICE),
        settings={},
    )
    run: Callable[..., Any] = getattr(module, f"build_{operator}")(context)
    return run


def microseconds(fn: Callable[[], Any], repeats: int = 25) -> float:
    """Return the median time of a graph's replay, caches cold."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        fn()
        fn()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn()
    flush = torch.empty(FLUSH // 4, dtype=torch.int32, device=DEVICE)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in events:
        flush.zero_()
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events) * 1e3


def copy_rate() -> float:
    """Return the bytes a second that a large copy reads and writes."""
    source = torch.empty(1 << 30, dtype=torch.float32, device=DEVICE)
    target = torch.empty_like(source)
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)  # not in a graph, whose copy nodes are slower
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return 8 * source.numel() / statistics.median(times) * 1e3


class Batch:
    """Requests of equal length in shuffled pages, and quantised queries of the newest rows of each."""

    def __init__(self, name: str, requests: int, context: int, rows: int, limits: Limits) -> None:
        fmt = formats.index(name)
        pages = requests * context // fmt.page
        self.cache = torch.empty(pages, fmt.page_bytes, dtype=torch.uint8, device=DEVICE)
        put = built("store_index_keys", StoreIndexSpec(index=name), Limits(max_rows=1 << 20, max_reqs=1))
        for first in range(0, pages * fmt.page, 1 << 20):
            count = min(1 << 20, pages * fmt.page - first)
            keys = torch.randn(count, 128, device=DEVICE, dtype=torch.bfloat16)
            put(keys, torch.arange(first, first + count, device=DEVICE), self.cache)
        shuffled = torch.randperm(pages, device=DEVICE, dtype=torch.int32)
        self.table = shuffled.view(requests, context // fmt.page)
        quantise = built("quantize_index_query", IndexQuerySpec(index=name, num_heads=HEADS), limits)
        q = torch.randn(requests * rows, HEADS, 128, device=DEVICE, dtype=torch.bfloat16)
        self.query = quantise(q, torch.randn(requests * rows, HEADS, device=DEVICE))
        request = torch.arange(requests, device=DEVICE, dtype=torch.int32)
        self.row_req = request.repeat_interleave(rows)
        newest = torch.arange(context - rows + 1, context + 1, device=DEVICE, dtype=torch.int32)
        self.row_len = newest.repeat(requests)

    @property
    def operands(self) -> tuple[Tensor, ...]:
        """Return the seven operands of the scores."""
        return (*self.query, self.cache, self.table, self.row_req, self.row_len)


def worst(spec: IndexerSpec, batch: Batch, out: Tensor) -> float:
    """Return the largest error of the first and the last row, relative to the scores' size."""
    error = 0.0
    for row in (0, out.shape[0] - 1):
        some = slice(row, row + 1)
        query = (x[some] for x in batch.query)
        rows = (batch.row_req[some], batch.row_len[some])
        exact = reference.indexer_logits(spec, *query, batch.cache, batch.table, *rows, dtype=torch.float64)
        keys = int(batch.row_len[row])
        off = (out[row, :keys].double() - exact[0, :keys]).abs().max() / exact[0, :keys].abs().mean()
        error = max(error, float(off))
    return error


def torch_scores(batch: Batch, name: str) -> Tensor:
    """Score in plain torch: gather and decode the keys, multiply in bfloat16, weigh."""
    fmt = formats.index(name)
    keys = fmt.read_pages(batch.cache[batch.table.flatten().long()], torch.bfloat16)
    keys = keys.view(batch.table.shape[0], -1, 128)
    q = fmt.decode_query(batch.query[0], batch.query[1], torch.bfloat16)
    dots = torch.bmm(q, keys.transpose(1, 2)).relu()
    scores: Tensor = torch.einsum("th,thn->tn", batch.query[2].bfloat16(), dots)
    return scores


def scores(name: str, requests: int, context: int, rows: int, rate: float) -> dict[str, Any]:
    """Check and time the scores of one batch."""
    total = requests * rows
    limits = Limits(max_rows=total, max_reqs=requests, max_context=context, rows_per_req=rows)
    batch = Batch(name, requests, context, rows, limits)
    spec = IndexerSpec(index=name, num_heads=HEADS)
    run = built("indexer_logits", spec, limits)
    out = torch.full((total, context), torch.nan, device=DEVICE)
    run(*batch.operands, out=out)
    error = worst(spec, batch, out)
    assert error < 1e-4, (name, requests, context, rows, error)
    time = microseconds(lambda: run(*batch.operands, out=out))
    read = requests * context * formats.index(name).row_bytes
    moved = read + 4 * total * context
    found = {
        "µs": round(time, 1),
        "share of copy rate": round(moved / time * 1e6 / rate, 3),
        "TFLOP/s": round(2 * total * HEADS * 128 * context / time / 1e6, 1),
        "error": error,
    }
    if rows == 1 and requests * context <= 256 * K:
        found["torch µs"] = round(microseconds(lambda: torch_scores(batch, name), 7), 1)
    return found


def selection(rows: int, width: int, rate: float, **fields: Any) -> dict[str, Any]:
    """Check and time the selection from rows of normal scores."""
    spec = TopKSpec(topk=TOPK, **fields)
    run = built("topk_select", spec, Limits(max_rows=rows, max_reqs=rows, max_context=width))
    x = torch.randn(rows, width, device=DEVICE)
    length = torch.full((rows,), width, dtype=torch.int32, device=DEVICE)
    out = torch.full((rows, TOPK), -7, dtype=torch.int32, device=DEVICE)
    workspace = torch.full((1 << 26,), 0xFF, dtype=torch.uint8, device=DEVICE)
    chosen, _ = run(x, length, out=out, workspace=workspace)
    assert bool((chosen.diff(dim=1) > 0).all())
    rounded = x.to(getattr(torch, spec.score)).float()
    mine = rounded.gather(1, chosen.long()).sort(dim=1, descending=True).values
    for first in range(0, rows, 256):
        best = rounded[first : first + 256].topk(TOPK, dim=1).values
        assert torch.equal(mine[first : first + 256], best), (rows, width)
    time = microseconds(lambda: run(x, length, out=out, workspace=workspace))
    plain = microseconds(lambda: torch.topk(x, TOPK, dim=1, sorted=False), 7)
    moved = 4 * rows * (width + TOPK)
    return {
        "µs": round(time, 1),
        "share of copy rate": round(moved / time * 1e6 / rate, 3),
        "torch µs": round(plain, 1),
    }


def search(requests: int, context: int, rows: int, rate: float) -> dict[str, Any]:
    """Time scores and selection in one call."""
    total = requests * rows
    limits = Limits(max_rows=total, max_reqs=requests, max_context=context, rows_per_req=rows)
    batch = Batch(FP8, requests, context, rows, limits)
    run = built("indexer_topk", IndexerTopKSpec(index=FP8, num_heads=HEADS, topk=TOPK), limits)
    out = torch.empty(total, TOPK, dtype=torch.int32, device=DEVICE)
    time = microseconds(lambda: run(*batch.operands, out=out))
    read = requests * context * formats.index(FP8).row_bytes
    return {"µs": round(time, 1), "share of copy rate": round(read / time * 1e6 / rate, 3)}


def small(rows: int) -> dict[str, float]:
    """Time quantisation and storing of ``rows`` tokens."""
    limits = Limits(max_rows=rows, max_reqs=rows)
    q = torch.randn(rows, HEADS, 128, device=DEVICE, dtype=torch.bfloat16)
    weights = torch.randn(rows, HEADS, device=DEVICE)
    found = {}
    for name in (FP8, MXFP4):
        quantise = built("quantize_index_query", IndexQuerySpec(index=name, num_heads=HEADS), limits)
        outs = dict(zip(("q_out", "q_scale_out", "weights_out"), quantise(q, weights), strict=True))
        found[f"quantise {name}, µs"] = round(microseconds(lambda f=quantise, o=outs: f(q, weights, **o)), 1)
        put = built("store_index_keys", StoreIndexSpec(index=name), limits)
        cache = torch.empty(rows, formats.index(name).page_bytes, dtype=torch.uint8, device=DEVICE)
        slots = torch.randperm(rows * 64, device=DEVICE)[:rows]
        found[f"store {name}, µs"] = round(microseconds(lambda f=put, c=cache, s=slots: f(q[:, 0], s, c)), 1)
    return found


def main() -> None:
    """Measure, print and keep."""
    rate = copy_rate()
    figures: dict[str, Any] = {"device": torch.cuda.get_device_name(), "copy TB/s": round(rate / 1e12, 3)}

    def note(what: str, found: dict[str, Any]) -> None:
        figures[what] = found
        print(what, found, flush=True)

    for requests, context, rows in DECODES:
        for name in (FP8, MXFP4):
            label = f"scores {name} {requests} × {context // K}K × {rows}"
            note(label, scores(name, requests, context, rows, rate))
    for rows, context in PREFILLS:
        note(f"scores {FP8} prefill {rows} × {context // K}K", scores(FP8, 1, context, rows, rate))
    for rows, width in SELECTIONS:
        note(f"top-2048 {rows} × {width // K}K", selection(rows, width, rate))
    note("top-2048 of bfloat16 scores 64 × 128K", selection(64, 128 * K, rate, score="bfloat16"))
    for requests, context in ((1, 128 * K), (64, 128 * K)):
        note(f"indexer_topk {requests} × {context // K}K", search(requests, context, 1, rate))
    for rows in (64, 4096):
        note(f"{rows} rows", small(rows))
    keep("h200_indexer", figures)


if __name__ == "__main__":
    main()
