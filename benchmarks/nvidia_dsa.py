"""``dsa_decode`` on an H200 by NVIDIA's own kernels, beside its peers' parts, and ``merge_attn_states`` beside a copy.

Predictions, written before the first run. ``dsa_decode`` is four launches (query, scores, selection, attention):
1 × 128K in 45 µs, 64 × 128K in 375. Bytes of index keys are most of it, and DeepGEMM reads them at .93 of the copy
rate: no more than 1.2 times its composition at 64 × 128K. Merging is measured as ``auto`` plans it: of few rows by a
kernel that spreads a row and head over sixteen warps, .3 to .9 µs less than the portable one, of many by that.

``python -m benchmarks nvidia_dsa`` needs an H200. What the peers' parts take by themselves is kept and added up, in
whatever runs they could be loaded: ``DEEPGEMM`` and ``VLLM_C`` as for ``nvidia_indexer``, ``FLASH_MLA`` as for
``nvidia_sparse_mla``. ``ONLY_PEERS`` measures nothing else.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from typing import Any

import torch

import kimi_hal as hal
from benchmarks import indexer, nvidia_indexer
from benchmarks import sparse_mla as portable
from benchmarks.indexer import copy_rate, microseconds
from benchmarks.nvidia_indexer import Peers, cell
from benchmarks.nvidia_sparse_mla import FlashMLA, peer
from benchmarks.record import RESULTS, keep_cells
from kimi_hal import formats
from kimi_hal.ops.composites import DSASpec
from kimi_hal.ops.indexer import IndexerTopKSpec, IndexQuerySpec
from kimi_hal.ops.sparse_mla import MergeSpec, SparseMLASpec
from kimi_hal.ops.spec import Limits
from kimi_hal.reference import sparse_mla as reference

DEVICE, K = "cuda", 1024
MERGED = ((1, 12), (1, 96), (8, 12), (64, 12), (64, 96), (320, 12), (320, 96))
PARTS = 8
BATCHES = ((1, 32 * K), (1, 128 * K), (8, 32 * K), (8, 128 * K), (64, 32 * K), (64, 128 * K))
PEER_TIMES = RESULTS / "h200" / "dsa_peers.json"


def copied(size: int) -> float:
    """Return the time of a copy that moves so many bytes, half of them read."""
    source = torch.randint(0, 255, (size // 2,), dtype=torch.uint8, device=DEVICE)
    to = torch.empty_like(source)
    return microseconds(lambda: to.copy_(source))


def merged(rows: int, heads: int) -> float:
    """Return the time of merging as it is planned, compared first with the reference in float64."""
    spec = MergeSpec(parts=PARTS, num_heads=heads, return_lse=True)
    run = hal.plan("merge_attn_states", spec, Limits(max_rows=rows, max_reqs=rows), device=DEVICE).run
    outs = torch.randn(PARTS, rows, heads, 512, device=DEVICE).bfloat16()
    lses = torch.randn(PARTS, rows, heads, device=DEVICE)
    out, lse = run(outs, lses)
    exact, _ = reference.merge_attn_states(spec, outs, lses, dtype=torch.float64)
    assert portable.relative(out, exact) < 1.01 * portable.relative(exact.bfloat16(), exact)
    return round(microseconds(lambda: run(outs, lses, out=out, lse_out=lse), 41), 2)


def merges() -> Iterator[dict[str, Any]]:
    """Time merging of eight parts beside a copy of as many bytes."""
    for rows, heads in MERGED:
        took, size = merged(rows, heads), rows * heads * (PARTS + 1) * 1028
        found = cell(
            "merge_attn_states",
            f"8 parts, {rows} rows × {heads} heads",
            took,
            ("a copy of as many bytes", copied(size)),
            0.8,
        )
        yield found if rows > 1 else found | {"goal": 0.005, "met": took <= 5.0}


class Decode:
    """One layer's decode of requests of equal length: its operands and their plan."""

    def __init__(self, index: str, requests: int, context: int) -> None:
        limits = Limits(max_rows=requests, max_reqs=requests, max_context=context, rows_per_req=1)
        self.batch, heads = indexer.Batch(index, requests, context, 1, limits), indexer.HEADS
        spec = DSASpec(
            query=IndexQuerySpec(index=index, num_heads=heads),
            indexer=IndexerTopKSpec(index=index, num_heads=heads, topk=portable.TOPK),
            attn=SparseMLASpec(
                num_heads=12,
                latent=portable.FP8,
                page=portable.PAGE,
                topk=portable.TOPK,
                index_space="position",
            ),
        )
        self.plan = hal.plan("dsa_decode", spec, limits, device=DEVICE, implementation="nvidia.cuda")
        blocks = (requests, context // portable.PAGE)
        pages = portable.TOKENS // portable.PAGE
        self.operands = (
            portable.queries(requests, 12),
            torch.randn(requests, heads, 128, device=DEVICE).bfloat16(),
            torch.randn(requests, heads, device=DEVICE),
            portable.cache_of(portable.FP8),
            self.batch.cache,
            torch.randint(0, pages, blocks, dtype=torch.int32, device=DEVICE),
            self.batch.table,
            self.batch.row_req,
            self.batch.row_len,
            torch.tensor([portable.SCALE], device=DEVICE),
        )
        self.given: dict[str, Any] = {}
        if room := self.plan.sizes.workspace:
            self.given["workspace"] = torch.empty(room, dtype=torch.uint8, device=DEVICE)
        out, lse = self.plan.run(*self.operands, **self.given)
        self.given |= {"out": out, "lse_out": lse}

    def run(self) -> Any:
        """Call the plan with its outputs given."""
        return self.plan.run(*self.operands, **self.given)


def known_peers() -> dict[str, float]:
    """Return what the peers' parts took, in µs, as kept."""
    known: dict[str, float] = json.loads(PEER_TIMES.read_text()) if PEER_TIMES.is_file() else {}
    return known


def time_peers(peers: Peers, flash: FlashMLA | None) -> None:
    """Measure those parts of the peers that are here, and keep them beside what is kept of the others."""
    known = known_peers()
    for requests, context in BATCHES:
        limits = Limits(max_rows=requests, max_reqs=requests, max_context=context, rows_per_req=1)
        batch, what = (
            indexer.Batch(indexer.FP8, requests, context, 1, limits),
            f"{requests} × {context // K}K",
        )
        if scored := peers.scores(batch, 1, context):
            known[f"DeepGEMM {what}"] = round(scored, 2)
        if selected := peers.selection(torch.randn(requests, context, device=DEVICE), batch.row_len):
            known[f"vLLM {what}"] = round(selected[1], 2)
        if flash and (attended := peer(lambda f=flash, r=requests: f.decode(64, r))):
            known[f"FlashMLA {what}"] = attended
        print(what, {name: us for name, us in known.items() if name.endswith(what)}, flush=True)
    PEER_TIMES.write_text(json.dumps(known, ensure_ascii=False, indent=2) + "\n")


def decodes(rate: float) -> Iterator[dict[str, Any]]:
    """Time the composite; its peers are DeepGEMM's scores, vLLM's selection and FlashMLA's decode together.

    Peers read FP8 index keys: none has MXFP4 on this device.
    """
    known, size = known_peers(), formats.latent(portable.FP8).row_bytes
    for index, (requests, context) in itertools.product((indexer.FP8, indexer.MXFP4), BATCHES):
        decode, what = Decode(index, requests, context), f"{requests} × {context // K}K"
        ours, host = microseconds(decode.run), nvidia_indexer.host(decode.run)
        parts = [known.get(f"{name} {what}") for name in ("DeepGEMM", "vLLM", "FlashMLA")]
        beside = ("DeepGEMM (FP8) + vLLM + FlashMLA", sum(us for us in parts if us)) if all(parts) else None
        moved = requests * (context * formats.index(index).row_bytes + portable.TOPK * size)
        named = f"{what}, 12 heads" + (", MXFP4 index keys" if index == indexer.MXFP4 else "")
        found = cell("dsa_decode", named, ours, beside, 1.8, moved / ours * 1e6 / rate)
        yield found | {"host_ms": round(host / 1e3, 5)}
        del decode


def main() -> None:
    """Measure, print and keep the cells."""
    peers, flash = Peers(), FlashMLA() if os.environ.get("FLASH_MLA") else None
    if peers.deepgemm or peers.vllm or flash:
        time_peers(peers, flash)
    if os.environ.get("ONLY_PEERS"):
        return
    cells = []
    for found in (merges(), decodes(copy_rate())):
        for one in found:
            cells.append(one)
            print(json.dumps(one, ensure_ascii=False), flush=True)
    keep_cells(cells)


if __name__ == "__main__":
    main()
