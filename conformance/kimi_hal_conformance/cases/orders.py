"""Selections whose right answer is known by hand: ties, clusters, windows, numbers that are no ordinary score."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from kimi_hal import formats
from kimi_hal.ops.indexer import IndexerTopKSpec
from kimi_hal.ops.spec import DCP, Limits
from kimi_hal.ops.topk_merge import TopKMergeSpec, TopKSpec
from kimi_hal_conformance.case import INTERP, QUICK, STANDARD, Case, Make, Operands, add
from kimi_hal_conformance.cases.topk_merge import merge_operands, spread, ties
from kimi_hal_conformance.draws import column, normal

LIMITS = Limits(max_rows=256, max_reqs=64, max_context=1 << 20)
FP8 = "index.fp8.e4m3fn.pow2.page64"
WIDE = TopKSpec(return_selected=True)

Rows = Callable[[torch.Generator], Tensor]


def selects(spec: TopKSpec, rows: Rows, lengths: Sequence[int], starts: Sequence[int] = ()) -> Make:
    """Return rows of scores with their lengths as a column of a table, and windows where some begin late."""

    def make(g: torch.Generator) -> Operands:
        given = {"scores": rows(g).to(getattr(torch, spec.scores_dtype)), "row_len": column(lengths)}
        return given | ({"row_start": column(starts)} if starts else {})

    return make


def winners_among_zeros(infinite: int) -> Rows:
    """Return 100 winners among 8,220 equal scores, the first few of them infinite."""

    def rows(g: torch.Generator) -> Tensor:
        row = torch.zeros(8320)
        at = torch.randperm(8320, generator=g)[:100]
        row[at] = torch.rand(100, generator=g) + 0.5
        row[at[:infinite]] = math.inf
        return row[None]

    return rows


def cluster(first: float, step: float, width: int) -> Rows:
    """Return distinct scores ``first + i · step``, shuffled."""

    def rows(g: torch.Generator) -> Tensor:
        scores = first + torch.arange(width, dtype=torch.float64) * step
        return scores[torch.randperm(width, generator=g)].float()[None]

    return rows


def by_bits(first: int, width: int) -> Rows:
    """Return scores of ``width`` neighbouring bit patterns from ``first`` on, shuffled."""

    def rows(g: torch.Generator) -> Tensor:
        bits = torch.arange(first, first + width, dtype=torch.int64).to(torch.int32)
        return bits[torch.randperm(width, generator=g)].view(torch.float32)[None]

    return rows


def nan_of_both_signs(g: torch.Generator) -> Tensor:
    """Return 0 to 15 with NaN at 3 and −NaN at 9; then rows of one value each."""
    rows = torch.arange(16.0).repeat(7, 1)
    rows[0, 3], rows[0, 9] = math.nan, -math.nan
    for row, value in enumerate((math.nan, -math.inf, math.inf, -0.0, 3e38), start=1):
        rows[row] = value
    rows[6] = torch.tensor([math.nan, -math.inf] * 8)
    return rows


def zeros_of_both_signs(g: torch.Generator) -> Tensor:
    """Return zeros of both signs, subnormals of both signs among them."""
    rows = torch.where(torch.arange(700) % 3 == 0, -0.0, 0.0).repeat(2, 1)
    rows[0, 400:404] = torch.tensor([1e-45, -1e-45, 1e-40, -1e-40])
    return rows


def nan_payloads(g: torch.Generator) -> Tensor:
    """Return 0 to 15 with NaN of any sign and payload among them, first at the front, then all but one."""
    bits = (0x7FFFFFFF, -1, 0x7FC00001, -0x3FEDCC, 0x7FFF0000, -0x10000, 0x7FE10000, -0x3A0000)
    nan = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    rows = torch.arange(16.0).repeat(4, 1)
    rows[0, :8], rows[1, ::2], rows[2] = nan, nan, nan.repeat(2)
    rows[2, 11] = -math.inf
    return rows


def one_row_after_another(g: torch.Generator) -> Tensor:
    """Return rows of very different kinds: spread, equal, short, clustered, and so on."""
    kinds = (
        normal(g, 1, 2000),
        torch.zeros(1, 2000),
        cluster(1.0, 2.0**-20, 2000)(g),
        -normal(g, 1, 2000).abs(),
    )
    return torch.cat([kinds[row % 4] for row in range(9)])


def clusters() -> Iterator[Case]:
    """Classes 5 and 6 on ``topk_select``: many equal scores, and many in one bin."""
    for infinite in (0, 3):
        make = selects(WIDE, winners_among_zeros(infinite), [8320])
        yield select(f"winners-among-zeros/inf{infinite}", WIDE, make, 5, QUICK)
    drawn = {
        "from-1": cluster(1.0, 2.0**-23, 8192),
        "negative": cluster(-1.0, -(2.0**-23), 8192),
        "largest": by_bits(0x7F7FFFFF - 8191, 8192),
        "subnormal": by_bits(1, 8192),
        "across-zero": cluster(-4096 * 2.0**-149, 2.0**-149, 8192),
    }
    for label, rows in drawn.items():
        yield select(f"cluster-{label}", WIDE, selects(WIDE, rows, [8192]), 6, QUICK)
        narrow = TopKSpec(topk=48, return_selected=True)
        small = cut(rows, 300)
        yield select(f"cluster-{label}/k48", narrow, selects(narrow, small, [300]), 6)
    rounded = TopKSpec(topk=48, score="bfloat16", return_selected=True)
    half = selects(rounded, cut(cluster(1.0, 2.0**-10, 300), 300), [300])
    yield select("cluster-halves-rounded", rounded, half, 5)


def windows() -> Iterator[Case]:
    """Class 7 on ``topk_select``: lengths and starts."""
    around = selects(WIDE, lambda g: normal(g, 6, 2049), (0, 1, 2047, 2048, 2049, -1))
    yield select("lengths-around-2048", WIDE, around, 7, QUICK)
    window = TopKSpec(topk=4, has_row_start=True)
    late = selects(window, lambda g: normal(g, 5, 10), (9, -1, 3, 4, 2**31 - 1), (7, 0, -5, 10, 2))
    yield select("window-7-of-10", window, late, 7)
    starts = (-5, -1, -(2**31), 3, -10)
    outside = TopKSpec(topk=4, has_row_start=True, return_selected=True)
    early = selects(outside, lambda g: normal(g, 5, 10), (9, 10, 3, 7, 2**31 - 1), starts)
    yield select("starts-before-the-row", outside, early, 7)


def no_numbers() -> Iterator[Case]:
    """Class 19 on ``topk_select``: NaN, and zeros of both signs."""
    for k in (1, 5, 12):
        of = TopKSpec(topk=k, return_selected=True)
        yield select(f"nan-payloads/k{k}", of, selects(of, nan_payloads, [16, 15, 16, 16]), 19)
    few = TopKSpec(topk=4, return_selected=True)
    yield select("nan-of-both-signs", few, selects(few, nan_of_both_signs, [16] * 7), 19)
    zeros = TopKSpec(topk=32, return_selected=True)
    yield select("zeros-of-both-signs", zeros, selects(zeros, zeros_of_both_signs, [700, 699]), 19)


def sizes() -> Iterator[Case]:
    """Classes 5, 6, 7, 11 and 17 on ``topk_select``: numbers of rows, of winners, of columns and of ranks."""
    mixed = TopKSpec(topk=100)
    lengths = (2000, 7, 1999, 2000, 0, 100, 101, 2000, 1)
    yield select("one-row-after-another", mixed, selects(mixed, one_row_after_another, lengths), 6)
    many = TopKSpec(topk=3)
    rows = selects(many, lambda g: normal(g, 130, 70), [70 - r % 71 for r in range(130)])
    yield select("rows-130", many, rows, 17)
    for k in (1, 33):
        one = TopKSpec(topk=k, ordered=True)
        yield select(f"k{k}", one, selects(one, lambda g: normal(g, 3, 65), (65, 2, 33)), 7)
    empty = TopKSpec(topk=4, return_selected=True)
    yield select("width-0", empty, selects(empty, lambda g: normal(g, 3, 0), (5, 0, -1)), 7)
    for rank in range(4):
        shard = TopKSpec(topk=16, dcp=DCP(world=4, rank=rank))
        make = selects(shard, lambda g: normal(g, 5, 3), (9, 10, 2, 1, 12))
        yield select(f"bounds-of-4-ranks/rank{rank}", shard, make, 11)
    long = selects(WIDE, lambda g: normal(g, 1, 1 << 20), [1 << 20])
    yield select("row-of-a-million", WIDE, long, 6, STANDARD)
    tied = selects(WIDE, lambda g: normal(g, 1, 1 << 20).round(decimals=1), [(1 << 20) - 1])
    yield select("ties-of-a-million", WIDE, tied, 5, STANDARD)


def cut(rows: Rows, width: int) -> Rows:
    """Return the first columns of drawn rows."""
    return lambda g: rows(g)[:, :width].contiguous()


def select(label: str, spec: TopKSpec, make: Make, fault: int, since: str = INTERP) -> Case:
    """Return a case of ``topk_select``."""
    name = f"topk_select/edges/{label}"
    return Case(name, "topk_select", spec, LIMITS, make, since=since, fault=fault)


# --- topk_merge -----------------------------------------------------------------------------------------


def all_equal(g: torch.Generator, rows: int, width: int) -> Tensor:
    """Return rows of one value."""
    return torch.full((rows, width), 0.5)


def merges() -> Iterator[Case]:
    """Classes 5, 7 and 11 on ``topk_merge``: every score equal, other numbers of ranks, no rows, replicated keys."""
    for protocol in ("full", "compact", "scores_only"):
        equal = merge_spec(4, protocol, topk=16)
        yield merge(f"all-equal/{protocol}", equal, merge_operands(equal, all_equal, (64, 63, 16, 9, 10)), 5)
        none = merge_spec(2, protocol, topk=16)
        yield merge(f"no-rows/{protocol}", none, merge_operands(none, spread, ()), 7)
        five = merge_spec(5, protocol, topk=33, interleave=3)
        lengths = (0, -2, 4, 15, 16, 165, 166, 1000)
        yield merge(f"five-ranks/{protocol}", five, merge_operands(five, ties, lengths), 11)
        model = merge_spec(8, protocol, topk=2048)
        yield merge(
            f"k2048/{protocol}", model, merge_operands(model, spread, (2047, 2049, 20_000)), 7, STANDARD
        )


def merge_spec(world: int, protocol: str, topk: int, interleave: int = 1) -> TopKMergeSpec:
    """Return rank 0's Spec."""
    return TopKMergeSpec(
        dcp=DCP(world=world, interleave=interleave),
        topk=topk,
        protocol=protocol,
        score="bfloat16" if protocol == "compact" else "float32",
        return_global=protocol != "scores_only",
    )


def merge(label: str, spec: TopKMergeSpec, make: Make, fault: int, since: str = INTERP) -> Case:
    """Return a case of ``topk_merge``."""
    ranks = spec.dcp.world
    since = QUICK if since == INTERP and ranks > 2 else since
    name = f"topk_merge/edges/{label}"
    return Case(name, "topk_merge", spec, LIMITS, make, since=since, fault=fault, ranks=ranks)


# --- indexer_topk ---------------------------------------------------------------------------------------


def keyed(spec: IndexerTopKSpec, keys: Rows, lengths: Sequence[int], positive: bool = True) -> Make:
    """Return queries over the given keys of one request; weights are all positive, or of both signs."""

    def make(g: torch.Generator) -> Operands:
        fmt = formats.index(spec.index)
        own = keys(g)
        pages = -(-own.shape[0] // fmt.page)
        cache = torch.full((pages, fmt.page_bytes), 0xFF, dtype=torch.uint8)
        order = torch.randperm(pages, generator=g)
        position = torch.arange(own.shape[0])
        fmt.write(cache, order[position // fmt.page] * fmt.page + position % fmt.page, own)
        q, _ = fmt.encode_query(normal(g, len(lengths), spec.num_heads, 128).bfloat16())
        weights = normal(g, len(lengths), spec.num_heads, spread=0.02)
        return {
            "q": q,
            "q_scale": torch.empty(len(lengths), spec.num_heads, 0, dtype=torch.uint8),
            "weights": weights.abs() if positive else weights,
            "cache": cache,
            "block_table": order.int()[None],
            "row_req": column([0] * len(lengths)),
            "row_len": column(lengths),
        }

    return make


def alike(count: int) -> Rows:
    """Return one key, so many times."""
    return lambda g: normal(g, 1, 128).repeat(count, 1)


def mostly_opposed(count: int) -> Rows:
    """Return keys of which most have a score of exactly 0: all their products with the query are negative."""

    def rows(g: torch.Generator) -> Tensor:
        keys = torch.zeros(count, 128)
        live = torch.randperm(count, generator=g)[: count // 4]
        keys[live] = normal(g, len(live), 128)
        return keys

    return rows


def broken(count: int) -> Rows:
    """Return keys of which one is NaN."""

    def rows(g: torch.Generator) -> Tensor:
        keys = normal(g, count, 128)
        keys[9, 17] = math.nan
        return keys

    return rows


def a_hair_apart(spec: IndexerTopKSpec) -> Make:
    """Return keys whose scores are 127 and between nothing and 2^-9 more: one float32 number after another."""

    def keys(g: torch.Generator) -> Tensor:
        own = torch.ones(64, 128)
        own[:, 0] = torch.ldexp(torch.randperm(64, generator=g).float(), torch.tensor(-17))
        return own

    def make(g: torch.Generator) -> Operands:
        operands = dict(keyed(spec, keys, (64, 63, 40))(g))
        ones = torch.ones(3, spec.num_heads, 128)
        return operands | {
            "q": formats.index(spec.index).encode_query(ones)[0],
            "weights": torch.full((3, spec.num_heads), 1 / (spec.num_heads * 256)),
        }

    return make


def fused() -> Iterator[Case]:
    """Classes 5, 7, 10 of padding, 17, 19 on ``indexer_topk``."""
    spec = IndexerTopKSpec(index=FP8, num_heads=8, topk=16, return_selected=True, ordered=True)
    yield fuse("all-keys-alike", spec, keyed(spec, alike(64), (64, 63, 16, 17, 15, 0)), 5)
    yield fuse(
        "scores-of-exactly-0", spec, keyed(spec, mostly_opposed(300), (300, 299, 64), positive=False), 5
    )
    yield fuse("a-key-is-nan", spec, keyed(spec, broken(80), (17, 16, 80, 10)), 19)
    slots = IndexerTopKSpec(index=FP8, num_heads=8, topk=16, emit="slot")
    yield fuse("slots-of-short-rows", slots, keyed(slots, alike(70), (0, 1, 15, 70, -7)), 7)
    single = IndexerTopKSpec(index=FP8, num_heads=8, topk=16, ordered=True)
    yield fuse("a-hair-apart", single, a_hair_apart(single), 6)
    many = IndexerTopKSpec(index=FP8, num_heads=3, topk=5)
    drafts = [max(0, 130 - row) for row in range(70)]
    yield fuse("rows-70", many, keyed(many, lambda g: normal(g, 130, 128), drafts), 17, QUICK)
    model = IndexerTopKSpec(index=FP8, ordered=True)
    around = keyed(model, lambda g: normal(g, 2049, 128), (2047, 2048, 2049, 0))
    yield fuse("lengths-around-2048", model, around, 7, QUICK)


def fuse(label: str, spec: IndexerTopKSpec, make: Make, fault: int, since: str = INTERP) -> Case:
    """Return a case of ``indexer_topk``."""
    name = f"indexer_topk/edges/{label}"
    return Case(name, "indexer_topk", spec, LIMITS, make, since=since, fault=fault)


WHY = {
    "topk_select/edges/winners-among-zeros": "100 winners, 8,220 equal scores: the smallest tied positions follow.",
    "topk_select/edges/cluster-": "Distinct scores in one bin of a radix selection, at every place of the number line.",
    "topk_select/edges/cluster-halves-rounded": "Scores half way between two bfloat16 numbers: rounded to even, once.",
    "topk_select/edges/lengths-around-2048": "No key, one, one fewer than k, k, one more, and a negative length.",
    "topk_select/edges/window-7-of-10": "A window that reaches behind its row: {0, 1, 2} and −1; starts out of range.",
    "topk_select/edges/starts-before-the-row": "Starts below 0 count as 0, and from no end.",
    "topk_select/edges/nan-payloads": "NaN of any sign and payload ranks below −inf, also where one is selected.",
    "topk_select/edges/nan-of-both-signs": "NaN of both signs ranks below −inf; rows of one value only.",
    "topk_select/edges/zeros-of-both-signs": "−0 equals +0, subnormals do not: position decides among zeros.",
    "topk_select/edges/one-row-after-another": "Rows of different kinds in one launch: nothing stays from row to row.",
    "topk_select/edges/rows-130": "More rows than a block has, each of another length.",
    "topk_select/edges/k": "One winner, and a k that is no multiple of anything.",
    "topk_select/edges/width-0": "Rows without a column.",
    "topk_select/edges/bounds-of-4-ranks": "9 and 10 keys on four ranks: 3, 2, 2, 2 and 3, 3, 2, 2 local ones.",
    "topk_select/edges/row-of-a-million": "A row of 2^20 scores: what fits a buffer at 64K does not here.",
    "topk_select/edges/ties-of-a-million": "A row of 2^20 scores of which many are equal, also at the cut.",
    "topk_merge/edges/all-equal": "All scores equal: every rank must keep the same smallest positions.",
    "topk_merge/edges/no-rows": "No rows: nothing is sent.",
    "topk_merge/edges/five-ranks": "Five ranks, a k of 33, an interleave of 3: nothing divides anything.",
    "topk_merge/edges/k2048": "The model's k over eight ranks.",
    "indexer_topk/edges/all-keys-alike": "Every key has the same score: the smallest positions are selected.",
    "indexer_topk/edges/scores-of-exactly-0": "Most scores are exactly 0, as in real text: ties at the cut.",
    "indexer_topk/edges/a-key-is-nan": "A key that is NaN ranks below all others and is selected only where all are.",
    "indexer_topk/edges/slots-of-short-rows": "Slots of rows with fewer keys than k: −1 behind them.",
    "indexer_topk/edges/a-hair-apart": "Scores that differ in their last bits alone, which a radix selection must see.",
    "indexer_topk/edges/rows-70": "More rows than a block has, each one key shorter than the one before.",
    "indexer_topk/edges/lengths-around-2048": "The model's k with one key fewer, as many, one more, and none.",
}

for group in (clusters, windows, no_numbers, sizes, merges, fused):
    add(group(), WHY)
