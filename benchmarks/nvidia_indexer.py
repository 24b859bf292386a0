"""NVIDIA's own indexer and selection on an H200, beside DeepGEMM and vLLM's selection, by CUDA-graph replay.

Predictions, written before the last run (copy 4.26 TB/s measured):

* top-2,048: a launch with an empty kernel costs about 3 µs here, a row of 8K in registers about 4 more: 7–8 µs. A
  cluster of 8 on 128K: sample 2, collect 2, exchange 2, k-th 1, emission 2: 12–13. 64 × 1M reads 268 MB once and a
  sixty-fourth twice: 63 µs at the copy rate, 80–90 expected. 2,048 × 128K: 251 at the copy rate, 350 expected.
* FP8 scores: 132 bytes a key at the copy rate are 260 µs for 64 × 128K, 285 expected; 1 × 128K 4 µs and three waits for
  memory, 11–12 expected. MXFP4 is bound by instructions: 280 of 330 clocks for 64 keys, 190 µs for 64 × 128K.
* prefill of 2,048 × 128K: 2.2 TFLOP at the measured rate of float16 products are 3.1 ms; 3.4 expected. DeepGEMM's FP8
  products take 2.4, which no float16 product can reach.

``python -m benchmarks nvidia_indexer`` needs an H200. Peers are timed where they can be loaded: ``DEEPGEMM`` names a
folder that holds the package ``deep_gemm``, ``VLLM_C`` vLLM's ``_C_stable_libtorch.abi3.so``. What is timed is
compared first.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks import indexer
from benchmarks.record import RESULTS
from kimi_hal import formats
from kimi_hal.dispatch.contract import BuildContext, Sizes
from kimi_hal.ops import OPERATORS, check
from kimi_hal.ops.indexer import IndexerSpec, IndexerTopKSpec
from kimi_hal.ops.spec import Limits, Spec
from kimi_hal.ops.topk_merge import TopKSpec

DEVICE, K, TOPK = "cuda", 1024, 2048
FP8, MXFP4 = indexer.FP8, indexer.MXFP4
NAMES = {FP8: "FP8", MXFP4: "MXFP4"}
#: Requests, tokens of each, rows of each request.
DECODES = (
    (1, 8 * K, 1),
    (1, 32 * K, 1),
    (1, 128 * K, 1),
    (1, 1024 * K, 1),
    (8, 128 * K, 1),
    (32, 32 * K, 1),
    (64, 8 * K, 1),
    (64, 32 * K, 1),
    (64, 128 * K, 1),
    (1, 128 * K, 2),
    (64, 32 * K, 2),
)
PREFILLS = ((2048, 32 * K), (2048, 128 * K), (8192, 32 * K))
SELECTIONS = (
    (1, 8 * K),
    (64, 8 * K),
    (1, 32 * K),
    (64, 32 * K),
    (1, 128 * K),
    (8, 128 * K),
    (64, 128 * K),
    (1, 1024 * K),
    (8, 1024 * K),
    (64, 1024 * K),
    (256, 32 * K),
    (2048, 8 * K),
    (2048, 32 * K),
    (2048, 128 * K),
)
SEARCHES = ((1, 8 * K), (1, 128 * K), (32, 32 * K), (64, 32 * K), (64, 128 * K), (1, 1024 * K))


class Peers:
    """The libraries that can be loaded here."""

    def __init__(self) -> None:
        self.deepgemm: Any = None
        if folder := os.environ.get("DEEPGEMM"):
            sys.path.append(folder)
            import deep_gemm

            self.deepgemm = deep_gemm
        self.vllm: Any = None
        if library := os.environ.get("VLLM_C"):
            torch.ops.load_library(library)
            self.vllm = torch.ops._C
            self.room = torch.zeros(1 << 20, dtype=torch.uint8, device=DEVICE)

    def scores(self, batch: indexer.Batch, rows: int, context: int) -> float | None:
        """Time DeepGEMM's scores of FP8 keys."""
        if self.deepgemm is None:
            return None
        dg, requests = self.deepgemm, batch.table.shape[0]
        q, _, weights = batch.query
        if rows > 4:
            pages = batch.cache[batch.table[0].long()]
            keys = pages[:, :8192].reshape(-1, 128).view(torch.float8_e4m3fn).contiguous()
            scales = pages[:, 8192:].contiguous().view(torch.float32).reshape(-1).contiguous()
            start = torch.zeros_like(batch.row_len)
            return indexer.microseconds(
                lambda: dg.fp8_fp4_mqa_logits(
                    (q, None), (keys, scales), weights, start, batch.row_len, context
                ),
                9,
            )
        lengths = batch.row_len.view(requests, rows).contiguous()
        told = dg.get_paged_mqa_logits_metadata(lengths, 64, processors())
        query = q.view(requests, rows, indexer.HEADS, 128)
        cache = batch.cache.view(-1, 64, 1, 132)
        return indexer.microseconds(
            lambda: dg.fp8_fp4_paged_mqa_logits(
                (query, None), cache, weights, lengths, batch.table, told, context
            )
        )

    def selection(self, x: Tensor, length: Tensor) -> tuple[str, float] | None:
        """Time vLLM's kernels and return the best."""
        if self.vllm is None:
            return None
        rows, width = x.shape
        out = torch.empty(rows, TOPK, dtype=torch.int32, device=DEVICE)
        kernels: dict[str, Callable[[], Any]] = {
            "persistent": lambda: self.vllm.persistent_topk(x, length, out, self.room, TOPK, width),
            "per row": lambda: self.vllm.top_k_per_row_decode(
                x, 1, length, out, rows, x.stride(0), x.stride(1), TOPK
            ),
        }
        if rows <= 64:
            kernels["cooperative"] = lambda: self.vllm.cooperative_topk(
                x, length, out, self.room, TOPK, width
            )
        times = {f"vLLM {name}": indexer.microseconds(kernel) for name, kernel in kernels.items()}
        best = min(times, key=times.__getitem__)
        return best, times[best]


def processors() -> int:
    return torch.cuda.get_device_properties(DEVICE).multi_processor_count


def built(operator: str, spec: Spec, limits: Limits) -> Callable[..., Any]:
    """Return the run function of this backend's own implementation."""
    from kimi_hal_nvidia import indexer as search
    from kimi_hal_nvidia import scores, topk

    module = {"indexer_logits": scores, "indexer_topk": search, "topk_select": topk}[operator]
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


def cell(
    operator: str,
    what: str,
    ours: float,
    peer: tuple[str, float] | None,
    goal: float,
    bw: float | None = None,
    tflops: float | None = None,
) -> dict[str, Any]:
    """Return one cell of the table: times in ms, the peer's time over ours, the goal for that."""
    ratio = None if peer is None else round(peer[1] / ours, 3)
    return {
        "operator": operator,
        "cell": what,
        "ours_ms": round(ours / 1e3, 5),
        "peer": None if peer is None else peer[0],
        "peer_ms": None if peer is None else round(peer[1] / 1e3, 5),
        "ratio": ratio,
        "bw": None if bw is None else round(bw, 3),
        "tflops": None if tflops is None else round(tflops),
        "goal": goal,
        "met": None if ratio is None else ratio >= goal,
    }


def scores(peers: Peers, rate: float) -> Iterator[dict[str, Any]]:
    """Check and time scores; MXFP4 keys have our FP8 as their peer."""
    work = [(r, c, n) for r, c, n in DECODES] + [(1, c, n) for n, c in PREFILLS]
    for requests, context, rows in work:
        fp8 = math.nan
        for name in (FP8, MXFP4):
            if rows > 4 and (name == MXFP4 or requests * rows * context > 1 << 29):
                continue
            total = requests * rows
            limits = Limits(max_rows=total, max_reqs=requests, max_context=context, rows_per_req=rows)
            batch = indexer.Batch(name, requests, context, rows, limits)
            spec = IndexerSpec(index=name, num_heads=indexer.HEADS)
            run = built("indexer_logits", spec, limits)
            out = torch.full((total, context), math.nan, device=DEVICE)
            run(*batch.operands, out=out)
            error = indexer.worst(spec, batch, out)
            assert error < 1e-5, (name, requests, context, rows, error)
            ours = indexer.microseconds(lambda b=batch, r=run, o=out: r(*b.operands, out=o))
            moved = requests * context * formats.index(name).row_bytes + 4 * total * context
            if name == FP8:
                fp8, theirs = ours, peers.scores(batch, rows, context)
                peer = None if theirs is None else ("DeepGEMM", theirs)
            else:
                peer = ("our FP8", fp8)
            small = context < 32 * K
            goal = (0.0 if small else 1.5 if requests * context > 1 << 22 else 1.0) if name == MXFP4 else 1.0
            if name == FP8 and (requests, context, rows) == (1, 128 * K, 1):
                goal = 1.3
            yield cell(
                "indexer_logits",
                f"{NAMES[name]} {'prefill ' if rows > 4 else ''}{requests} × {context // K}K × {rows}",
                ours,
                peer,
                goal,
                moved / ours * 1e6 / rate,
                2 * total * indexer.HEADS * 128 * context / ours / 1e6 if rows > 4 else None,
            )
            del batch, out


def selections(peers: Peers, rate: float) -> Iterator[dict[str, Any]]:
    """Check and time selections from rows of normal scores."""
    for rows, width in SELECTIONS:
        limits = Limits(max_rows=rows, max_reqs=rows, max_context=width)
        run = built("topk_select", TopKSpec(topk=TOPK), limits)
        x = torch.randn(rows, width, device=DEVICE)
        length = torch.full((rows,), width, dtype=torch.int32, device=DEVICE)
        out = torch.full((rows, TOPK), -7, dtype=torch.int32, device=DEVICE)
        run(x, length, out=out)
        assert bool((out.diff(dim=1) > 0).all())
        for first in range(0, rows, 256):
            some = slice(first, first + 256)
            mine = x[some].gather(1, out[some].long()).sort(dim=1, descending=True).values
            assert torch.equal(mine, x[some].topk(TOPK, dim=1).values), (rows, width)
        ours = indexer.microseconds(lambda r=run, s=x, n=length, o=out: r(s, n, out=o), 41)
        moved = 4 * rows * (width + TOPK)
        yield cell(
            "topk_select",
            f"{rows} × {width // K}K",
            ours,
            peers.selection(x, length),
            1.0,
            moved / ours * 1e6 / rate,
        )


def searches(peers: Peers, rate: float) -> Iterator[dict[str, Any]]:
    """Time scores and selection in one call; the peers are DeepGEMM and the best selection together."""
    for requests, context in SEARCHES:
        limits = Limits(max_rows=requests, max_reqs=requests, max_context=context, rows_per_req=1)
        batch = indexer.Batch(FP8, requests, context, 1, limits)
        spec = IndexerTopKSpec(index=FP8, num_heads=indexer.HEADS, topk=TOPK)
        run = built("indexer_topk", spec, limits)
        out = torch.empty(requests, TOPK, dtype=torch.int32, device=DEVICE)
        ours = indexer.microseconds(lambda r=run, b=batch, o=out: r(*b.operands, out=o))
        first = peers.scores(batch, 1, context)
        second = peers.selection(torch.randn(requests, context, device=DEVICE), batch.row_len)
        peer = first and second and (f"DeepGEMM + {second[0]}", first + second[1])
        moved = requests * context * 132
        yield cell(
            "indexer_topk", f"FP8 {requests} × {context // K}K", ours, peer, 1.3, moved / ours * 1e6 / rate
        )


def host(run: Callable[[], Any], calls: int = 400) -> float:
    """Return the host's time of a call in µs."""
    import time

    for _ in range(50):
        run()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    spent = (time.perf_counter() - begin) / calls * 1e6
    torch.cuda.synchronize()
    return spent


def hosts() -> Iterator[dict[str, Any]]:
    """Measure the host's time of one launch with given outputs."""
    x, empty = torch.randn(1, 8 * K, device=DEVICE), torch.empty(1, 0, device=DEVICE)
    length = torch.full((1,), 8 * K, dtype=torch.int32, device=DEVICE)
    out = torch.empty(1, TOPK, dtype=torch.int32, device=DEVICE)
    limits = Limits(max_rows=1, max_reqs=1, max_context=8 * K, rows_per_req=1)
    run = built("topk_select", TopKSpec(topk=TOPK), limits)
    yield cell(
        "topk_select", "host time", host(lambda: run(x, length, out=out, scores_out=empty)), None, 0.01
    )
    batch = indexer.Batch(FP8, 1, 8 * K, 1, limits)
    score = built("indexer_logits", IndexerSpec(index=FP8, num_heads=indexer.HEADS), limits)
    to = torch.empty(1, 8 * K, device=DEVICE)
    operands = batch.operands
    yield cell("indexer_logits", "host time", host(lambda: score(*operands, out=to)), None, 0.01)


def main() -> None:
    """Measure, print and keep: cells of these operators replace those of an earlier run."""
    peers, rate = Peers(), indexer.copy_rate()
    print(f"{torch.cuda.get_device_name()}, copy {rate / 1e12:.3f} TB/s", flush=True)
    cells = []
    for found in (selections(peers, rate), scores(peers, rate), searches(peers, rate), hosts()):
        for one in found:
            if one["cell"] == "host time":
                one["met"] = one["ours_ms"] <= one["goal"]
            cells.append(one)
            print(json.dumps(one, ensure_ascii=False), flush=True)
    path = RESULTS / "h200" / "summary.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    mine = {one["operator"] for one in cells}
    kept = json.loads(path.read_text()) if path.is_file() else []
    cells = [one for one in kept if one["operator"] not in mine] + cells
    lines = ",\n".join(f"  {json.dumps(one, ensure_ascii=False)}" for one in cells)
    path.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
