"""NVIDIA's own kernels on an H200 over activations of real text (``docs/workload.md``), beside their peers.

Requests of 32,768 tokens each, the newest positions of the text, every request with pages of its own. Predictions,
written before the first run: scores, attention and the merge take what they take on random numbers, within 3 %. A
selection meets scores of exactly 0 in two of three columns and few large ones: no slower than of normal scores, but a
row in which fewer than 2,048 scores are above 0 has its cut among equal ones and is counted again, up to 1.5 times.

``python -m benchmarks nvidia_real_text`` needs an H200 and the workload's file. Peers as for ``nvidia_indexer`` and
``nvidia_sparse_mla``, in three processes. What is timed is compared first: scores and attention with the reference in
float64, selections and searches entry for entry.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

import kimi_hal as hal
from benchmarks import indexer
from benchmarks.indexer import FP8, HEADS, MXFP4, copy_rate, microseconds
from benchmarks.nvidia_indexer import NAMES, Peers, cell
from benchmarks.nvidia_sparse_mla import FlashMLA
from benchmarks.record import REAL, keep_cells, lines_of
from benchmarks.sparse_mla import relative
from kimi_hal import formats, workload
from kimi_hal.ops.composites import DSASpec
from kimi_hal.ops.indexer import IndexerSpec, IndexerTopKSpec, IndexQuerySpec, StoreIndexSpec
from kimi_hal.ops.sparse_mla import MergeSpec, SparseMLASpec, StoreLatentSpec
from kimi_hal.ops.spec import Limits, Spec
from kimi_hal.ops.topk_merge import TopKSpec
from kimi_hal.reference import selection
from kimi_hal.reference import sparse_mla as reference

DEVICE, OURS = "cuda", "nvidia.cuda"
TOPK, PAGE, PARTS = 2048, 64, 8
BATCHES = (1, 64)
LATENTS = {"FP8": "latent.fp8.e4m3fn.tensor", "NVFP4": "latent.nvfp4.352"}
RECORD = "latent.flashmla.656"


@cache
def text() -> workload.Workload:
    """Return the workload: 32,768 tokens."""
    return workload.load()


def length() -> int:
    """Return the tokens of a request."""
    return len(text().token_ids)


def planned(operator: str, spec: Spec, limits: Limits, implementation: str | None = OURS) -> Any:
    """Return a plan of this backend's own implementation, or of what ``auto`` takes."""
    return hal.plan(operator, spec, limits, device=DEVICE, implementation=implementation)


def limits_of(requests: int) -> Limits:
    """Return the limits of a decode of so many requests."""
    return Limits(max_rows=requests, max_reqs=requests, max_context=length(), rows_per_req=1)


def newest(requests: int) -> range:
    """Return the positions that the requests decode: the text's last ones."""
    return range(length() - requests, length())


class TextBatch(indexer.Batch):
    """Requests that hold the text in shuffled pages of their own, and the queries of its newest tokens."""

    def __init__(self, name: str, requests: int) -> None:
        fmt, tokens, limits = formats.index(name), length(), limits_of(requests)
        pages = requests * tokens // fmt.page
        self.cache = torch.zeros(pages, fmt.page_bytes, dtype=torch.uint8, device=DEVICE)
        self.table = torch.randperm(pages, device=DEVICE, dtype=torch.int32).view(requests, -1)
        put = planned(
            "store_index_keys", StoreIndexSpec(index=name), Limits(max_rows=tokens, max_reqs=1), None
        )
        keys = text().index_keys(range(tokens)).to(DEVICE).contiguous()
        for row in self.table:
            put.run(keys, slots_of(row), self.cache)
        self.asked = [x.to(DEVICE).contiguous() for x in text().index_query(newest(requests))]
        self.asked[1] = self.asked[1].float()
        quantise = planned("quantize_index_query", IndexQuerySpec(index=name, num_heads=HEADS), limits, None)
        self.query = quantise.run(*self.asked)
        self.row_req = torch.arange(requests, device=DEVICE, dtype=torch.int32)
        self.row_len = torch.tensor([p + 1 for p in newest(requests)], device=DEVICE, dtype=torch.int32)


def slots_of(row: Tensor) -> Tensor:
    """Return the slots of a request's positions, from its row of a block table."""
    return (row.long()[:, None] * PAGE + torch.arange(PAGE, device=DEVICE)).flatten()


def scored(batch: TextBatch, name: str) -> tuple[Tensor, Any]:
    """Return checked scores of a batch and their call into the same buffer."""
    requests, spec = len(batch.row_len), IndexerSpec(index=name, num_heads=HEADS)
    run = planned("indexer_logits", spec, limits_of(requests)).run
    out = torch.full((requests, length()), torch.nan, device=DEVICE)
    run(*batch.operands, out=out)
    error = indexer.worst(spec, batch, out)
    assert error < 1e-4, (
        name,
        requests,
        error,
    )  # of a score's mean size: the largest is thirty times as large
    return out, lambda: run(*batch.operands, out=out)


def named(what: str, requests: int) -> str:
    """Return a cell's name."""
    return f"real text, {what}{requests} × {length() // 1024}K"


def scores(peers: Peers, rate: float) -> Iterator[dict[str, Any]]:
    """Time scores; MXFP4 keys have our FP8 as their peer."""
    for requests in BATCHES:
        fp8 = 0.0
        for name in (FP8, MXFP4):
            batch = TextBatch(name, requests)
            _, call = scored(batch, name)
            took = microseconds(call)
            moved = requests * length() * (formats.index(name).row_bytes + 4)
            if name == FP8:
                fp8, theirs = took, peers.scores(batch, 1, length())
                peer = None if theirs is None else ("DeepGEMM", theirs)
            else:
                peer = ("our FP8", fp8)
            yield cell(
                "indexer_logits",
                named(f"{NAMES[name]} ", requests),
                took,
                peer,
                1.0,
                moved / took * 1e6 / rate,
            )


def selections(peers: Peers, rate: float) -> Iterator[dict[str, Any]]:
    """Time selections from real scores, and both together."""
    for requests in BATCHES:
        batch, limits = TextBatch(FP8, requests), limits_of(requests)
        x, _ = scored(batch, FP8)
        x = x.masked_fill(torch.arange(length(), device=DEVICE) >= batch.row_len[:, None], 0.0)
        wanted = selection.select_positions(x, batch.row_len, TOPK).int()
        select = planned("topk_select", TopKSpec(topk=TOPK), limits).run
        search = planned("indexer_topk", IndexerTopKSpec(index=FP8, num_heads=HEADS, topk=TOPK), limits).run
        out = torch.full((requests, TOPK), -7, dtype=torch.int32, device=DEVICE)
        select(x, batch.row_len, out=out)
        assert torch.equal(out, wanted)
        took = microseconds(lambda f=select, s=x, n=batch.row_len, o=out: f(s, n, out=o), 41)
        moved = 4 * requests * (length() + TOPK)
        peer = peers.selection(x, batch.row_len)
        yield cell("topk_select", named("", requests), took, peer, 1.0, moved / took * 1e6 / rate)
        search(*batch.operands, out=out)
        assert torch.equal(out, wanted)
        took = microseconds(lambda f=search, b=batch, o=out: f(*b.operands, out=o))
        moved = requests * length() * 132
        yield cell("indexer_topk", named("FP8 ", requests), took, None, 1.3, moved / took * 1e6 / rate)


class Latents:
    """The text's latents in pages of each request, the keys that its indexer selects, and absorbed queries."""

    def __init__(self, requests: int) -> None:
        self.batch, self.requests = TextBatch(FP8, requests), requests
        found, _ = scored(self.batch, FP8)
        beyond = torch.arange(length(), device=DEVICE) >= self.batch.row_len[:, None]
        positions = selection.select_positions(found.masked_fill(beyond, 0.0), self.batch.row_len, TOPK)
        self.table = torch.randperm(self.batch.table.numel(), device=DEVICE, dtype=torch.int32)
        self.table = self.table.view_as(self.batch.table)
        at = self.table.gather(1, positions // PAGE) * PAGE + positions % PAGE
        self.indices = at.int()
        self.parts = [x.to(DEVICE).contiguous() for x in text().latents(0, length())]
        largest = max(float(x.float().abs().max()) for x in self.parts)
        self.scale = torch.tensor([largest / 448], device=DEVICE)

    def cache(self, name: str) -> Tensor:
        """Return the latents of every request in a format."""
        fmt = formats.latent(name)
        pages = torch.zeros(self.table.numel(), PAGE * fmt.row_bytes, dtype=torch.uint8, device=DEVICE)
        spec = StoreLatentSpec(latent=name, page=PAGE)
        put = planned("store_latent", spec, Limits(max_rows=length(), max_reqs=1), None)
        for row in self.table:
            put.run(*self.parts, slots_of(row), pages, self.scale_of(name))
        return pages

    def scale_of(self, name: str) -> Tensor | None:
        """Return the cache's scale, where its format has one."""
        return self.scale if formats.latent(name).needs_scale else None

    def query(self, heads: int) -> Tensor:
        """Return the queries of the newest tokens."""
        return text().mla_query(newest(self.requests), heads).to(DEVICE).contiguous()


def attended(found: Latents, label: str, heads: int) -> float:
    """Return the time of attention, compared with the reference in float64."""
    name, q = LATENTS[label], found.query(heads)
    spec = SparseMLASpec(num_heads=heads, latent=name, page=PAGE, topk=TOPK)
    run, pages, scale = (
        planned("sparse_mla", spec, limits_of(found.requests)).run,
        found.cache(name),
        found.scale_of(name),
    )
    out, lse = run(q, pages, found.indices, scale)
    few = slice(0, 2)
    exact, _ = reference.sparse_mla(spec, q[few], pages, found.indices[few], scale, dtype=torch.float64)
    assert relative(out[few], exact) < 1.05 * relative(exact.bfloat16(), exact)
    return microseconds(lambda: run(q, pages, found.indices, scale, out=out, lse_out=lse))


class TextFlash(FlashMLA):
    """FlashMLA's decode over the text as 656-byte records."""

    def attended(self, found: Latents, heads: int) -> float:
        """Return the time of a decode, heads padded with zeros."""
        pages = found.cache(RECORD).view(torch.float8_e4m3fn).view(-1, PAGE, 1, 656)
        asked = found.query(96 if heads == 128 else 12)
        q = torch.nn.functional.pad(asked, (0, 0, 0, heads - asked.shape[1]))[:, None]
        state: list[Any] = [None, None]

        def run() -> None:
            _, _, *state[:] = self.ops.sparse_decode_fwd(
                q, pages, found.indices[:, None], None, None, *state, None, None, None, 512, 192**-0.5, None
            )

        run()
        return microseconds(run)


def attention(flash: TextFlash | None, rate: float) -> Iterator[dict[str, Any]]:
    """Time attention over what the text's indexer selects, the merge of its parts, and the composite."""
    for requests in BATCHES:
        found, fp8 = Latents(requests), 0.0
        for label, heads, wide, goal in (
            ("FP8", 12, 64, 2.5 if requests == 1 else 2.2),
            ("NVFP4", 12, 0, 1.0),
            ("FP8", 96, 128, 1.2),
        ):
            took = attended(found, label, heads)
            fp8 = took if (label, heads) == ("FP8", 12) else fp8
            peer = ("our FP8", fp8) if label == "NVFP4" else None
            if flash and wide:
                peer = (f"FlashMLA, padded to {wide}", flash.attended(found, wide))
            moved = requests * TOPK * formats.latent(LATENTS[label]).row_bytes
            what = f"real text, {heads} heads {label}, {requests} rows"
            yield cell("sparse_mla", what, took, peer, goal, moved / took * 1e6 / rate)
        yield merged(found)
        yield composed(found, rate)


def merged(found: Latents) -> dict[str, Any]:
    """Return the cell of merging eight parts of the selected keys, as planned."""
    spec = SparseMLASpec(num_heads=12, latent=LATENTS["FP8"], page=PAGE, topk=TOPK // PARTS)
    part, pages, q = (
        planned("sparse_mla", spec, limits_of(found.requests)).run,
        found.cache(spec.latent),
        found.query(12),
    )
    pieces = [part(q, pages, x.contiguous(), found.scale) for x in found.indices.chunk(PARTS, dim=1)]
    outs, lses = torch.stack([o for o, _ in pieces]), torch.stack([n for _, n in pieces])
    merge = MergeSpec(parts=PARTS, num_heads=12, return_lse=True)
    run = planned("merge_attn_states", merge, limits_of(found.requests), None).run
    out, lse = run(outs, lses)
    exact, _ = reference.merge_attn_states(merge, outs, lses, dtype=torch.float64)
    assert relative(out, exact) < 1.01 * relative(exact.bfloat16(), exact)
    took = microseconds(lambda: run(outs, lses, out=out, lse_out=lse), 41)
    size = found.requests * 12 * (PARTS + 1) * 1028
    source = torch.zeros(size // 2, dtype=torch.uint8, device=DEVICE)
    to = torch.empty_like(source)
    copied = ("a copy of as many bytes", microseconds(lambda: to.copy_(source), 41))
    one = cell(
        "merge_attn_states", f"real text, 8 parts, {found.requests} rows × 12 heads", took, copied, 0.8
    )
    return one if found.requests > 1 else one | {"goal": 0.005, "met": took <= 5.0}


def composed(found: Latents, rate: float) -> dict[str, Any]:
    """Return the cell of one layer's decode."""
    batch = found.batch
    spec = DSASpec(
        query=IndexQuerySpec(index=FP8, num_heads=HEADS),
        indexer=IndexerTopKSpec(index=FP8, num_heads=HEADS, topk=TOPK),
        attn=SparseMLASpec(num_heads=12, latent=LATENTS["FP8"], page=PAGE, topk=TOPK, index_space="position"),
    )
    plan = planned("dsa_decode", spec, limits_of(found.requests), None)
    operands = (
        found.query(12), *batch.asked, found.cache(LATENTS["FP8"]), batch.cache, found.table, batch.table,
        batch.row_req, batch.row_len, found.scale,
    )  # fmt: skip
    given: dict[str, Any] = {}
    if plan.workspace_bytes:
        given["workspace"] = plan.new_workspace()
    out, lse = plan.run(*operands, **given)
    took = microseconds(lambda: plan.run(*operands, **given, out=out, lse_out=lse))
    moved = found.requests * (length() * 132 + TOPK * 576)
    what = named("", found.requests) + ", 12 heads"
    return cell("dsa_decode", what, took, None, 1.8, moved / took * 1e6 / rate)


#: Part of the table -> the variables whose libraries its process loads.
PARTS_OF_TABLE = {"scores": "DEEPGEMM", "selections": "VLLM_C", "attention": "FLASH_MLA"}


def measure(part: str) -> None:
    """Measure a part of the table and print it, a line for each cell."""
    torch.manual_seed(0)
    rate = copy_rate()
    if part == "attention":
        found = attention(TextFlash() if os.environ.get("FLASH_MLA") else None, rate)
    else:
        found = (scores if part == "scores" else selections)(Peers(), rate)
    for one in found:
        print(json.dumps(one | {"data": REAL}, ensure_ascii=False), flush=True)


def together(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the cells; those of searches and of the composite have their peers' parts added up."""
    took = {(one["operator"], one["cell"]): (one["peer"], one["peer_ms"]) for one in cells}
    for requests in BATCHES:
        parts = [
            took.get(key, (None, None))
            for key in (
                ("indexer_logits", named("FP8 ", requests)),
                ("topk_select", named("", requests)),
                ("sparse_mla", f"real text, 12 heads FP8, {requests} rows"),
            )
        ]
        for operator, what, theirs in (
            ("indexer_topk", named("FP8 ", requests), parts[:2]),
            ("dsa_decode", named("", requests) + ", 12 heads", parts),
        ):
            one = next((c for c in cells if (c["operator"], c["cell"]) == (operator, what)), None)
            if one and all(ms for _, ms in theirs):
                one["peer"], one["peer_ms"] = (
                    " + ".join(n for n, _ in theirs),
                    round(sum(m for _, m in theirs), 5),
                )
                one["ratio"] = round(one["peer_ms"] / one["ours_ms"], 3)
                one["met"] = one["ratio"] >= one["goal"]
    return cells


def main() -> None:
    """Measure, print and keep: cells of this workload replace those of an earlier run."""
    cells: list[dict[str, Any]] = []
    for part, library in PARTS_OF_TABLE.items():
        seen = {n: v for n, v in os.environ.items() if n == library or n not in PARTS_OF_TABLE.values()}
        cells += lines_of("nvidia_real_text", part, seen)
    keep_cells(together(cells))


if __name__ == "__main__":
    measure(sys.argv[1])
