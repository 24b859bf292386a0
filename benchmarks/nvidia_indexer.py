"""NVIDIA's own indexer and selection on an H200, beside DeepGEMM and vLLM's selection, by CUDA-graph replay.

Predictions, written before the last change (copy 4.26 TB/s measured):

* top-2,048: a thread lists keys above the threshold without a branch and hands them over some at a time: 2,048 × 128K
  340 µs, 2,048 × 32K 130, 256 × 32K 27, 64 × 128K 25, 1 × 1M 18.5. A pass over other numbers while scores are on their
  way, so that instructions are there: 1 × 8K 7.3, 64 × 8K 8.5, both together at 1 × 8K 10.5.
* host: operands laid out like those of the call before are recognised by one comparison: 9.5 µs for scores, 7 for a
  selection.
* FP8 scores: a single request's pages asked for before its length is known, keys that leave the cache first: 1 × 8K
  6 µs, 1 × 128K 10, 8 × 128K 40, 64 × 128K 280; prefill as before.
* MXFP4: five warpgroups that get the registers of the one that copies: 64 × 128K 190.
* FP8 prefill by FP8 products (`nvidia.cuda_fp8_sum`): two warpgroups take turns at the matrix unit and read a page of
  keys for 16 rows, so that neither additions nor the second-level cache limit: 1,300 TFLOP/s, 2,048 × 128K 1,700 µs.
* both together: the selection is launched while scores are still written, 2 µs less than one after the other.

``python -m benchmarks nvidia_indexer`` needs an H200. Peers are timed where they can be loaded: ``DEEPGEMM`` names a
folder that holds the package ``deep_gemm``, ``VLLM_C`` vLLM's ``_C_stable_libtorch.abi3.so``; they do not load into one
process, so each half of the table has its own. What is timed is compared first.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from torch import Tensor

import kimi_hal as hal
from benchmarks import indexer
from benchmarks.record import keep_cells, lines_of
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
    (8, 8 * K, 1),
    (8, 32 * K, 1),
    (8, 128 * K, 1),
    (8, 1024 * K, 1),
    (32, 32 * K, 1),
    (64, 8 * K, 1),
    (64, 32 * K, 1),
    (64, 128 * K, 1),
    (64, 1024 * K, 1),
    (1, 8 * K, 2),
    (1, 32 * K, 2),
    (1, 128 * K, 2),
    (1, 1024 * K, 2),
    (8, 128 * K, 2),
    (64, 8 * K, 2),
    (64, 32 * K, 2),
    (64, 128 * K, 2),
)
PREFILLS = ((2048, 32 * K), (2048, 128 * K), (8192, 32 * K), (8192, 128 * K))
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
SEARCHES = (
    (1, 8 * K),
    (1, 32 * K),
    (1, 128 * K),
    (1, 1024 * K),
    (8, 32 * K),
    (8, 128 * K),
    (32, 32 * K),
    (64, 8 * K),
    (64, 32 * K),
    (64, 128 * K),
    (64, 1024 * K),
)


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


def built(operator: str, spec: Spec, limits: Limits, numerics: str = "") -> Callable[..., Any]:
    """Return the run function of this backend's own implementation, of the exact one or of a class of numerics."""
    from kimi_hal_nvidia import fp8_sum, scores, sizes, topk
    from kimi_hal_nvidia import indexer as search

    exact = {"indexer_logits": scores, "indexer_topk": search, "topk_select": topk}
    module = fp8_sum if numerics else exact[operator]
    major, minor = torch.cuda.get_device_capability()
    context = BuildContext(
        operator=operator,
        spec=spec,
        limits=limits,
        device=DEVICE,
        arch=f"sm_{major}{minor}",
        sizes=Sizes(),
        group=None,
        persistent=torch.zeros(sizes.TICKETS, dtype=torch.uint8, device=DEVICE),
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
    goal: float | None,
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
        "met": None if ratio is None or goal is None else ratio >= goal,
    }


def scores(peers: Peers, rate: float) -> Iterator[dict[str, Any]]:
    """Check and time scores; MXFP4 keys have our FP8 as their peer."""
    work = [(r, c, n) for r, c, n in DECODES] + [(1, c, n) for n, c in PREFILLS]
    for requests, context, rows in work:
        fp8 = math.nan
        for name in (FP8, MXFP4):
            if rows > 4 and (name == MXFP4 or requests * rows * context > 1 << 30):
                continue
            total = requests * rows
            limits = Limits(max_rows=total, max_reqs=requests, max_context=context, rows_per_req=rows)
            batch = indexer.Batch(name, requests, context, rows, limits)
            spec = IndexerSpec(index=name, num_heads=indexer.HEADS)
            moved = requests * context * formats.index(name).row_bytes + 4 * total * context
            theirs = peers.scores(batch, rows, context) if name == FP8 else None
            for numerics, bound in BOUNDS.items() if name == FP8 and rows > 4 else [("", 1e-5)]:
                ours = scored(batch, spec, limits, numerics, bound)
                peer = ("our FP8", fp8) if name == MXFP4 else theirs and ("DeepGEMM", theirs)
                if name == FP8 and not numerics:
                    fp8 = ours
                one = cell(
                    "indexer_logits",
                    f"{NAMES[name]} {'prefill ' if rows > 4 else ''}{requests} × {context // K}K × {rows}"
                    + (f", {numerics}" if numerics else ""),
                    ours,
                    peer or None,
                    goal_of(name, requests, context, rows),
                    moved / ours * 1e6 / rate,
                    2 * total * indexer.HEADS * 128 * context / ours / 1e6 if rows > 4 else None,
                )
                rounds = {"rounds": f"logits={numerics}"} if numerics else {}  # else ours rounds nothing
                yield one | rounds | ({"peer_rounds": "logits=fp8_sum"} if name == FP8 and peer else {})
            del batch


#: Class of numerics, without ``logits=`` -> the largest error of its scores, relative to a row's mean.
BOUNDS = {"": 1e-5, "fp8_sum": 5e-3}


def goal_of(name: str, requests: int, context: int, rows: int) -> float | None:
    """Return how many times as fast as its peer a cell should be; None: there is no goal."""
    if name == MXFP4:
        return None if context < 32 * K else 1.5 if (requests, context) == (64, 128 * K) else 1.0
    return 1.3 if (requests, context, rows) == (1, 128 * K, 1) else 1.0


def scored(batch: indexer.Batch, spec: IndexerSpec, limits: Limits, numerics: str, bound: float) -> float:
    """Check scores by one of this backend's kernels and return their time in µs."""
    run = built("indexer_logits", spec, limits, numerics)
    out = torch.full((limits.max_rows, limits.max_context), math.nan, device=DEVICE)
    run(*batch.operands, out=out)
    error = indexer.worst(spec, batch, out)
    assert error < bound, (spec.index, limits, numerics, error)
    return indexer.microseconds(lambda: run(*batch.operands, out=out))


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


def searches(rate: float) -> Iterator[dict[str, Any]]:
    """Time scores and selection in one call. Peers read FP8 keys: none has MXFP4 on this device."""
    for name, (requests, context) in itertools.product((FP8, MXFP4), SEARCHES):
        limits = Limits(max_rows=requests, max_reqs=requests, max_context=context, rows_per_req=1)
        batch = indexer.Batch(name, requests, context, 1, limits)
        spec = IndexerTopKSpec(index=name, num_heads=indexer.HEADS, topk=TOPK)
        run = built("indexer_topk", spec, limits)
        out = torch.empty(requests, TOPK, dtype=torch.int32, device=DEVICE)
        ours = indexer.microseconds(lambda r=run, b=batch, o=out: r(*b.operands, out=o))
        moved = requests * context * formats.index(name).row_bytes
        what = f"{NAMES[name]} {requests} × {context // K}K"
        yield cell("indexer_topk", what, ours, None, 1.3, moved / ours * 1e6 / rate)
        del batch


def selections_of_searches(peers: Peers) -> Iterator[dict[str, Any]]:
    """Time the peer's half of a search that selects; the other half is a cell of its own."""
    for requests, context in SEARCHES:
        length = torch.full((requests,), context, dtype=torch.int32, device=DEVICE)
        peer = peers.selection(torch.randn(requests, context, device=DEVICE), length)
        if peer:
            yield {"search": f"{requests} × {context // K}K", "peer": peer[0], "peer_ms": peer[1] / 1e3}


def host(run: Callable[[], Any], rounds: int = 101, calls: int = 100) -> float:
    """Return the host's time of a call in µs: of many short rounds the median, since a core does other things too."""
    spent = []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        spent.append((time.perf_counter() - begin) / calls * 1e6)
        torch.cuda.synchronize()
    return statistics.median(spent[1:])


@triton.jit
def nothing(a, b, c, d, e, f, g, h, i, j, k, m):
    """Take as many arguments as a kernel of scores, and do nothing."""


def hosts() -> Iterator[dict[str, Any]]:
    """Measure the host's time of a call with given outputs, through a plan: one launch, of a search two.

    The peer, Triton's launch of a kernel with twelve arguments, tells how fast this host's core was.
    """
    x, empty = torch.randn(1, 8 * K, device=DEVICE), torch.empty(1, 0, device=DEVICE)
    length = torch.full((1,), 8 * K, dtype=torch.int32, device=DEVICE)
    out = torch.empty(1, TOPK, dtype=torch.int32, device=DEVICE)
    limits = Limits(max_rows=1, max_reqs=1, max_context=8 * K, rows_per_req=1)
    select, score, search = (
        hal.plan(operator, spec, limits, device=DEVICE, implementation="nvidia.cuda")
        for operator, spec in (
            ("topk_select", TopKSpec(topk=TOPK)),
            ("indexer_logits", IndexerSpec(index=FP8, num_heads=indexer.HEADS)),
            ("indexer_topk", IndexerTopKSpec(index=FP8, num_heads=indexer.HEADS, topk=TOPK)),
        )
    )
    operands = indexer.Batch(FP8, 1, 8 * K, 1, limits).operands
    to = torch.empty(1, 8 * K, device=DEVICE)
    room = torch.empty(search.workspace_bytes, dtype=torch.uint8, device=DEVICE)
    launch = host(lambda: nothing[(1,)](*operands, to, out, length, x, room))
    for operator, goal, run in (
        ("topk_select", 10, lambda: select.run(x, length, out=out, scores_out=empty)),
        ("indexer_logits", 10, lambda: score.run(*operands, out=to)),
        ("indexer_topk", 20, lambda: search.run(*operands, out=out, scores_out=empty, workspace=room)),
    ):
        one = cell(operator, "host time", host(run), ("a Triton launch of 12 arguments", launch), goal / 1e3)
        yield {**one, "met": one["ours_ms"] <= one["goal"]}


#: Half of the table -> the variable whose library it must not load.
HALVES = {"selections": "DEEPGEMM", "scores": "VLLM_C"}


def measure(half: str) -> None:
    """Measure a half of the table and print it, a line for each cell."""
    peers, rate = Peers(), indexer.copy_rate()
    print(f"{torch.cuda.get_device_name()}, copy {rate / 1e12:.3f} TB/s", file=sys.stderr, flush=True)
    parts = {
        "selections": (selections(peers, rate), selections_of_searches(peers)),
        "scores": (searches(rate), hosts(), scores(peers, rate)),
    }
    for part in parts[half]:
        for one in part:
            print(json.dumps(one, ensure_ascii=False), flush=True)


def joined(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the cells, those of searches with their peer: DeepGEMM's scores and the best selection together."""
    selected = {one["search"]: one for one in lines if "search" in one}
    cells = [one for one in lines if "search" not in one]
    scored = {one["cell"]: one["peer_ms"] for one in cells if one["operator"] == "indexer_logits"}
    for one in cells:
        _, _, what = one["cell"].partition(" ")
        first, second = scored.get(f"FP8 {what} × 1"), selected.get(what)
        if one["operator"] == "indexer_topk" and first and second:
            one["peer"], one["peer_ms"] = (
                f"DeepGEMM (FP8) + {second['peer']}",
                round(first + second["peer_ms"], 5),
            )
            one["ratio"] = round(one["peer_ms"] / one["ours_ms"], 3)
            one["met"] = one["ratio"] >= one["goal"]
    return cells


def main() -> None:
    """Measure, print and keep: cells of these operators replace those of an earlier run."""
    lines: list[dict[str, Any]] = []
    for half, without in HALVES.items():
        seen = {name: value for name, value in os.environ.items() if name != without}
        lines += lines_of("nvidia_indexer", half, seen)
    keep_cells(joined(lines))


if __name__ == "__main__":
    measure(sys.argv[1])
