"""What writes caches and quantises queries on an H200, random numbers and real text, beside a copy of as many bytes.

Predictions, written before the first run: a token is a launch and three waits for memory, 4.5 µs in all; 64 rows the
same; 4,096 rows as long as a copy of their bytes and 4 µs: queries of 32 heads (50 MB) 19 µs, keys 6, latents 8.

``python -m benchmarks nvidia_stores`` needs an H200, and the workload's file for the second half. Bytes that were
written are compared with the reference's first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import kimi_hal as hal
from benchmarks.indexer import FP8, HEADS, MXFP4, copy_rate, microseconds
from benchmarks.nvidia_indexer import NAMES, cell
from benchmarks.nvidia_real_text import DEVICE, PAGE, text
from benchmarks.record import REAL, keep_cells
from kimi_hal import formats
from kimi_hal.ops.indexer import IndexQuerySpec, StoreIndexSpec
from kimi_hal.ops.sparse_mla import StoreLatentSpec
from kimi_hal.ops.spec import Limits, Spec
from kimi_hal.reference import indexer as reference_indexer
from kimi_hal.reference import sparse_mla as reference_mla

ROWS = (1, 64, 4096)
LATENTS = {
    "latent.fp8.e4m3fn.tensor": "FP8 576",
    "latent.nvfp4.352": "NVFP4 352",
    "latent.flashmla.656": "656 B",
    "latent.bf16": "bf16",
}


def planned(operator: str, spec: Spec, rows: int) -> Any:
    """Return the plan that ``auto`` makes."""
    return hal.plan(operator, spec, Limits(max_rows=rows, max_reqs=rows), device=DEVICE)


def same(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> bool:
    """Tell whether results have the same bytes."""
    return all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(found, wanted, strict=True)
    )


def one(
    operator: str, what: str, data: str, call: Callable[[], Any], moved: int, rate: float
) -> dict[str, Any]:
    """Return a cell: nobody else does this, so its peer is a copy."""
    source = torch.zeros(max(1, moved // 2), dtype=torch.uint8, device=DEVICE)
    to = torch.empty_like(source)
    copied = ("a copy of as many bytes", microseconds(lambda: to.copy_(source), 41))
    took = microseconds(call, 41)
    found = cell(operator, f"{data}, {what}" if data else what, took, copied, None, moved / took * 1e6 / rate)
    return found | ({"data": data} if data else {})


def queries(q: Tensor, weights: Tensor, data: str, rate: float) -> Iterator[dict[str, Any]]:
    """Time the quantisation of index queries."""
    for name in (FP8, MXFP4):
        for rows in ROWS:
            spec = IndexQuerySpec(index=name, num_heads=HEADS)
            run, some = planned("quantize_index_query", spec, rows).run, (q[:rows], weights[:rows])
            outs = run(*some)
            assert same(outs, reference_indexer.quantize_index_query(spec, *some))
            given = dict(zip(("q_out", "q_scale_out", "weights_out"), outs, strict=True))
            moved = sum(x.numel() * x.element_size() for x in (*some, *outs))
            call = lambda f=run, s=some, g=given: f(*s, **g)  # noqa: E731
            yield one(
                "quantize_index_query", f"{NAMES[name]} {rows} rows × {HEADS} heads", data, call, moved, rate
            )


def keys(k: Tensor, data: str, rate: float) -> Iterator[dict[str, Any]]:
    """Time the storing of index keys in random slots."""
    for name in (FP8, MXFP4):
        fmt = formats.index(name)
        for rows in ROWS:
            spec, slots = StoreIndexSpec(index=name), torch.randperm(rows * PAGE, device=DEVICE)[:rows]
            cache = torch.zeros(rows, fmt.page_bytes, dtype=torch.uint8, device=DEVICE)
            wanted = cache.clone()
            run, some = planned("store_index_keys", spec, rows).run, k[:rows]
            run(some, slots, cache)
            reference_indexer.store_index_keys(spec, some, slots, wanted)
            assert torch.equal(cache, wanted)
            call = lambda f=run, s=some, at=slots, c=cache: f(s, at, c)  # noqa: E731
            moved = rows * (2 * 128 + 8 + fmt.row_bytes)
            yield one("store_index_keys", f"{NAMES[name]} {rows} keys", data, call, moved, rate)


def latents(parts: tuple[Tensor, Tensor], data: str, rate: float) -> Iterator[dict[str, Any]]:
    """Time the storing of latents in random slots, in each format."""
    for name, label in LATENTS.items():
        fmt = formats.latent(name)
        for rows in ROWS:
            spec = StoreLatentSpec(latent=name, page=PAGE)
            slots = torch.randperm(rows * PAGE, device=DEVICE)[:rows]
            cache = torch.zeros(rows, PAGE * fmt.row_bytes, dtype=torch.uint8, device=DEVICE)
            wanted, some = cache.clone(), tuple(x[:rows] for x in parts)
            largest = max(float(x.float().abs().max()) for x in parts)
            scale = torch.tensor([largest / 448], device=DEVICE) if fmt.needs_scale else None
            run = planned("store_latent", spec, rows).run
            run(*some, slots, cache, scale)
            reference_mla.store_latent(spec, *some, slots, wanted, scale)
            assert torch.equal(cache, wanted)
            call = lambda f=run, s=some, at=slots, c=cache, n=scale: f(*s, at, c, n)  # noqa: E731
            moved = rows * (2 * 576 + 8 + fmt.row_bytes)
            yield one("store_latent", f"{label} {rows} tokens", data, call, moved, rate)


def cells(rate: float) -> Iterator[dict[str, Any]]:
    """Time all of them on random numbers, then on the text."""
    most = max(ROWS)
    q, w = torch.randn(most, HEADS, 128, device=DEVICE).bfloat16(), torch.randn(most, HEADS, device=DEVICE)
    kv_c, k_pe = (
        torch.randn(most, 512, device=DEVICE).bfloat16(),
        torch.randn(most, 64, device=DEVICE).bfloat16(),
    )
    yield from queries(q, w, "", rate)
    yield from keys(q[:, 0].contiguous(), "", rate)
    yield from latents((kv_c, k_pe), "", rate)
    rows = range(1000, 1000 + most)
    q, w = (x.to(DEVICE).contiguous() for x in text().index_query(rows))
    kv_c, k_pe = (x.to(DEVICE).contiguous() for x in text().latents(rows.start, rows.stop))
    yield from queries(q, w.float(), REAL, rate)
    yield from keys(text().index_keys(rows).to(DEVICE).contiguous(), REAL, rate)
    yield from latents((kv_c, k_pe), REAL, rate)


def main() -> None:
    """Measure, print and keep the cells."""
    found = []
    for one_cell in cells(copy_rate()):
        found.append(one_cell)
        print(one_cell, flush=True)
    keep_cells(found)


if __name__ == "__main__":
    main()
