"""Peak memory of ``indexer_topk`` in the reference over one context of 2²⁰ keys, 32 heads, top 2,048.

Prediction: under 1 GiB beyond the cache itself, since no row's scores are materialised with their heads. The peak is
the kernel's high-water mark of the resident set, reset before the call (Linux).
"""

from __future__ import annotations

import time
from pathlib import Path

import torch

from benchmarks.record import keep
from kimi_hal import formats
from kimi_hal.dispatch.plan import plan
from kimi_hal.ops.indexer import IndexerTopKSpec
from kimi_hal.ops.spec import Limits

CONTEXT = 1 << 20
FORMATS = ("index.fp8.e4m3fn.pow2.page64", "index.mxfp4.page64")


def resident(what: str) -> float:
    """Return a resident-set figure of this process in MiB: ``VmRSS`` now, or ``VmHWM`` the high-water mark."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(what))


def measure(name: str, rows: int) -> dict[str, float]:
    """Return the growth of the peak and the time of one call."""
    fmt = formats.index(name)
    pages = CONTEXT // fmt.page
    spec = IndexerTopKSpec(index=name, return_selected=True, ordered=True)
    run = plan("indexer_topk", spec, Limits(max_rows=rows, max_reqs=1), device="cpu").run
    cache = torch.zeros(pages, fmt.page_bytes, dtype=torch.uint8)
    for start in range(0, CONTEXT, 1 << 16):
        fmt.write(cache, torch.arange(start, start + (1 << 16)), torch.randn(1 << 16, 128))
    q, scale = fmt.encode_query(torch.randn(rows, 32, 128).bfloat16())
    if scale is None or fmt.element != "e2m1":
        scale = torch.empty(rows, 32, 0, dtype=torch.uint8)
    operands = (q, scale, torch.randn(rows, 32), cache, torch.arange(pages, dtype=torch.int32)[None])
    ends = torch.full((rows,), CONTEXT, dtype=torch.int32)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before, start_time = resident("VmRSS"), time.perf_counter()
    picked, _ = run(*operands, torch.zeros(rows, dtype=torch.int32), ends)
    seconds = time.perf_counter() - start_time
    assert int((picked >= 0).sum()) == rows * 2048
    return {
        "rows": rows,
        "peak_growth_mib": round(resident("VmHWM") - before, 1),
        "seconds": round(seconds, 2),
    }


def main() -> None:
    """Measure both key formats and keep the figures."""
    figures = {}
    for name in FORMATS:
        figures[name] = measure(name, rows=4)
        print(name, figures[name])
    keep("indexer_memory", figures)
