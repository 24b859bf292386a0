"""Bytes that the merges of selections send, and how often the first message does not decide a row.

Predictions: at W = 8 ``compact`` sends at most 1/10 of ``full`` where nothing is sent twice, and with
interleave 1 nothing is. k is 2,048. Random scores are normal numbers in bfloat16; real ones are index scores of
the real-text workload, if it has been built. Interleave 1 deals single tokens to the ranks, 64 and 1,024 deal
runs of them. The workload's encoder began its positions anew every 510 tokens and its scores repeat with
them, so that 8 ranks of runs of 64, a round of 512, get very unequal shares: a bad case, not a typical one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.record import keep
from kimi_hal import formats, workload
from kimi_hal.errors import KimiHalError
from kimi_hal.ops.indexer import IndexerSpec, IndexQuerySpec
from kimi_hal.ops.spec import DCP
from kimi_hal.ops.topk_merge import TopKMergeSpec, TopKSpec
from kimi_hal.parallel import ownership
from kimi_hal.parallel.captured import Capacity
from kimi_hal.parallel.groups import Group, LoopbackGroup
from kimi_hal.reference import indexer, protocols
from kimi_hal.reference import topk_merge as reference

K = 2048
INDEX = "index.fp8.e4m3fn.pow2.page64"
ROWS, CONTEXTS = 16, (8192, 32768, 131072)
REAL_ROWS = 64


def share(scores: Tensor, dcp: DCP) -> Tensor:
    """Return the columns that a rank owns; what it owns none of is −inf and beyond its length."""
    columns = ownership.local_length(scores.shape[1], DCP(world=dcp.world, interleave=dcp.interleave))
    position = ownership.position(torch.arange(columns), dcp)
    mine = scores.new_full((scores.shape[0], columns), -torch.inf)
    mine[:, position < scores.shape[1]] = scores[:, position[position < scores.shape[1]]]
    return mine


def candidates(scores: Tensor, row_len: Tensor, dcp: DCP) -> tuple[Tensor, Tensor]:
    """Return a rank's selection: positions and scores."""
    spec = TopKSpec(topk=K, score="bfloat16", scores_dtype="bfloat16", return_selected=True, dcp=dcp)
    index, chosen = reference.topk_select(spec, share(scores, dcp), row_len)
    return index, chosen.bfloat16()


def merged(scores: Tensor, row_len: Tensor, world: int, interleave: int, protocol: str) -> dict[str, Any]:
    """Merge once over W ranks; return what a rank sent for a row, and what the first message left open."""

    def rank(group: Group) -> tuple[int, Tensor, Tensor]:
        dcp = DCP(world=world, rank=group.rank(), interleave=interleave)
        spec = TopKMergeSpec(
            dcp=dcp, topk=K, score="bfloat16", protocol=protocol, return_global=protocol != "scores_only"
        )
        index, chosen = candidates(scores, row_len, dcp)
        reference.topk_merge(spec, chosen, index, row_len, group=group)
        sent = group.bytes_sent
        return sent, *first_message(spec, chosen, index, row_len, group)

    sent, again, needed = LoopbackGroup.run(world, rank)[0]
    rows = len(row_len)
    return {
        "protocol": protocol,
        "world": world,
        "interleave": interleave,
        "rows": rows,
        "bytes_a_row": round(sent / rows, 1),
        "second_message_rows": int(again.sum()),
        "second_message_rate": round(float(again.float().mean()), 4),
        "most_tied_positions": int(needed.max()) if needed.numel() else 0,
    }


def first_message(
    spec: TopKMergeSpec, chosen: Tensor, index: Tensor, row_len: Tensor, group: Group
) -> tuple[Tensor, Tensor]:
    """Return the rows that a first message does not decide, and how many tied positions each of them needs."""
    ordinals, local = reference.candidates(spec, chosen, index, row_len.long())
    none = torch.zeros(len(row_len), dtype=torch.bool)
    if spec.protocol == "full":
        return none, torch.zeros(0)
    if spec.protocol == "compact":
        return protocols.best_few(spec, ordinals, local, row_len.long(), group)[1], torch.zeros(0)
    cut = protocols.threshold(spec, ordinals, local, group)
    return cut.split, cut.needed[cut.split]


def distinct(rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Return rows without a tie at the cut, whose best are spread evenly: nothing is sent twice."""
    order = torch.arange(width).flip(0).float()
    order = torch.where(torch.arange(width) < K, order + 2 * width, order)
    high = torch.where(torch.arange(width) < K, 1.0, 0.0)
    return high.bfloat16().expand(rows, -1).clone(), torch.full((rows,), width, dtype=torch.int32)


def random_rows(rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Return normal scores."""
    generator = torch.Generator().manual_seed(width)
    scores = torch.randn(rows, width, generator=generator).bfloat16()
    return scores, torch.full((rows,), width, dtype=torch.int32)


def real_rows(rows: int) -> tuple[Tensor, Tensor]:
    """Return index scores of the real-text workload for rows spread over the second half of its text."""
    text = workload.load()
    fmt = formats.index(INDEX)
    pages = -(-text.context // fmt.page)
    cache = torch.zeros(pages, fmt.page_bytes, dtype=torch.uint8)
    fmt.write(cache, torch.arange(text.context), text.index_keys())
    at = torch.linspace(text.context // 2, text.context - 1, rows).long()
    query = indexer.quantize_index_query(IndexQuerySpec(index=INDEX), *text.index_query(at))
    table = torch.arange(pages, dtype=torch.int32)[None]
    lengths = (at + 1).int()
    spec = IndexerSpec(index=INDEX, score="bfloat16")
    requests = torch.zeros(rows, dtype=torch.int32)
    logits = indexer.indexer_logits(spec, *query, cache, table, requests, lengths)
    return logits.bfloat16(), lengths


def traffic() -> Iterator[dict[str, Any]]:
    """Yield what each protocol sends where the first message decides every row."""
    for world in (2, 4, 8, 16, 32):
        full = merged(*distinct(8, 8 * K), world, 1, "full")
        for protocol in ("full", "compact", "scores_only"):
            row = merged(*distinct(8, 8 * K), world, 1, protocol)
            yield row | {"of_full": round(row["bytes_a_row"] / full["bytes_a_row"], 4)}


def second_messages(scores: Tensor, row_len: Tensor) -> Iterator[dict[str, Any]]:
    """Yield how often the first message does not decide."""
    for world in (2, 8, 32):
        for interleave in (1, 64, 1024):
            for protocol in ("compact", "scores_only"):
                yield merged(scores, row_len, world, interleave, protocol)


def measure() -> dict[str, Any]:
    """Measure everything."""
    fields: dict[str, Any] = {"dcp": DCP(world=8), "topk": K, "score": "bfloat16", "return_global": False}
    specs = [TopKMergeSpec(protocol=protocol, **fields) for protocol in ("compact", "scores_only")]
    try:
        text = {"sha256": workload.load().sha256, "rows": list(second_messages(*real_rows(REAL_ROWS)))}
    except KimiHalError as error:
        text = {"missing": str(error), "rows": []}
    return {
        "k": K,
        "captured, default second exchange of 64 rows, bytes": {
            spec.protocol: Capacity.default(spec, 64).bytes(spec) for spec in specs
        },
        "traffic": list(traffic()),
        "random": {str(n): list(second_messages(*random_rows(ROWS, n))) for n in CONTEXTS},
        "real text": text,
    }


def show(result: dict[str, Any]) -> None:
    """Print the figures."""
    print(f"bytes a row and rank, k = {K}, nothing sent twice")
    for row in result["traffic"]:
        print(
            f"  W={row['world']:<3} {row['protocol']:<12} {row['bytes_a_row']:>9} {row['of_full']:>7.4f} of full"
        )
    kinds = {f"random, {n} keys": rows for n, rows in result["random"].items()}
    kinds |= {"real text": result["real text"]["rows"]}
    for name, rows in kinds.items():
        print(f"rows that the first message does not decide: {name}")
        for row in rows:
            place = f"W={row['world']:<3} I={row['interleave']:<5} {row['protocol']:<12}"
            rate, ties = row["second_message_rate"], row["most_tied_positions"]
            print(
                f"  {place} {rate:>7.2%}  {row['bytes_a_row']:>9} bytes a row, at most {ties} tied positions"
            )


def main() -> None:
    """Measure, print and keep."""
    figures = measure()
    show(figures)
    keep("merge_traffic", figures)


if __name__ == "__main__":
    main()
