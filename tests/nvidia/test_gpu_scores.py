"""``indexer_logits`` by the CUDA kernels beside the formula in float64: formats, heads, rows, broken pages, scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kimi_hal as hal
from kimi_hal import formats
from kimi_hal.ops.indexer import IndexerSpec
from kimi_hal.ops.spec import DCP, Limits
from kimi_hal.parallel import ownership
from kimi_hal.reference import indexer as reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

POW2, MXFP4 = "index.fp8.e4m3fn.pow2.page64", "index.mxfp4.page64"
FORMATS = ("index.fp8.e4m3fn.f32.page64", POW2, "index.fp8.e4m3fn.ue8m0x4.page64", MXFP4)
Operands = dict[str, Tensor]


def drawn(spec: IndexerSpec, lengths: tuple[int, ...], rows: int) -> Operands:
    """Return queries and shuffled pages of requests of these lengths."""
    g, fmt = torch.Generator().manual_seed(1), formats.index(spec.index)
    pages = [-(-n // 64) for n in lengths]
    cache = torch.zeros(sum(pages) + 3, fmt.page_bytes, dtype=torch.uint8)
    tokens = len(cache) * 64
    fmt.write(cache, torch.arange(tokens), torch.randn(tokens, 128, generator=g))
    table = torch.full((len(lengths), max(pages) + 1), -1, dtype=torch.int32)
    shuffled = torch.randperm(len(cache), generator=g).int().split([*pages, 3])
    for row, mine in zip(table, shuffled, strict=False):
        row[: len(mine)] = mine
    total = len(lengths) * rows
    q, scale = fmt.encode_query(torch.randn(total, spec.num_heads, 128, generator=g).bfloat16())
    weights = torch.randn(total, spec.num_heads, generator=g) * 0.02
    return {
        "q": q,
        "q_scale": scale
        if fmt.element == "e2m1"
        else torch.empty(total, spec.num_heads, 0, dtype=torch.uint8),
        "weights": weights.to(getattr(torch, spec.weights_dtype)),
        "cache": cache,
        "block_table": table,
        "row_req": torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(rows),
        "row_len": torch.tensor([max(0, n - rows + 1 + i) for n in lengths for i in range(rows)]).int(),
    }


#: Implementations, each with its largest error relative to a row's mean score: FP8 products are added with few bits.
EXACT, SUM = ("nvidia.cuda", 2e-5), ("nvidia.cuda_fp8_sum", 2e-2)
OF_FORMAT = [(name, EXACT) for name in FORMATS] + [(name, SUM) for name in FORMATS[:3]]
BOTH = [(POW2, EXACT), (POW2, SUM), (MXFP4, EXACT)]


def right(
    spec: IndexerSpec,
    lengths: tuple[int, ...],
    rows: int = 1,
    broken: Callable[[Operands], None] | None = None,
    by: tuple[str, float] = EXACT,
) -> None:
    """Score twice, and compare the runs with each other in bits and with float64."""
    operands = drawn(spec, lengths, rows)
    if broken:
        broken(operands)
    given = {name: tensor.cuda() for name, tensor in operands.items()}
    limits = Limits(
        max_rows=len(given["q"]), max_reqs=len(lengths), max_context=max(lengths) + 64, rows_per_req=rows
    )
    plan = hal.plan("indexer_logits", spec, limits, device="cuda", implementation=by[0])
    first, again = (plan.run(**given).float() for _ in range(2))
    exact = reference.indexer_logits(spec, **given, dtype=torch.float64)
    keys = ownership.local_length(given["row_len"].long(), ownership.of_keys(spec.dcp)).tolist()
    for row, n in enumerate(keys):
        got, wanted = first[row, :n].double(), exact[row, :n]
        assert torch.equal(first[row, :n].nan_to_num(3e9), again[row, :n].nan_to_num(3e9))
        assert torch.equal(got.isnan(), wanted.isnan())
        assert torch.equal(got.isinf(), wanted.isinf())
        finite = wanted.isfinite()
        if finite.any():
            error = (got - wanted)[finite].abs().max() / wanted[finite].abs().mean()
            assert error < (2e-2 if spec.score == "bfloat16" else by[1])


def nothing_there(o: Operands) -> None:
    """NaN in keys, and table entries that name no page."""
    o["cache"][0, 5], o["cache"][1, 2400] = 0x7F, 0xFF
    o["block_table"][0, 0], o["block_table"][-1, 0] = -1, 10**6


def wild_keys(o: Operands) -> None:
    """Scales of one key further apart than floats are added by, and one that is NaN."""
    o["cache"][:, 4096:] = torch.randint(60, 200, (len(o["cache"]), 256), dtype=torch.uint8)
    o["cache"][2, 4103] = 255


def wild_queries(o: Operands) -> None:
    o["q_scale"] = torch.randint(100, 150, o["q_scale"].shape, dtype=torch.uint8)


def apart_keys(o: Operands) -> None:
    """Scales of one key further apart than integers reach, of most keys."""
    o["cache"][:, 4096:] = torch.randint(115, 130, (len(o["cache"]), 256), dtype=torch.uint8)


def apart_queries(o: Operands) -> None:
    o["q_scale"] = torch.randint(114, 128, o["q_scale"].shape, dtype=torch.uint8)


def apart(o: Operands) -> None:
    apart_keys(o)
    apart_queries(o)


def nearly_apart(o: Operands) -> None:
    """Scales as far apart as integers reach."""
    o["cache"][:, 4096:] = torch.randint(120, 124, (len(o["cache"]), 256), dtype=torch.uint8)
    o["q_scale"] = torch.randint(120, 124, o["q_scale"].shape, dtype=torch.uint8)


def zero_blocks(o: Operands) -> None:
    o["cache"][:, :1024] = 0
    o["cache"][:, 4096:4136:4] = 0


@pytest.mark.parametrize(("name", "by"), OF_FORMAT)
@pytest.mark.parametrize("broken", [None, nothing_there])
def test_every_format(name: str, by: tuple[str, float], broken: Any) -> None:
    right(IndexerSpec(index=name), (65, 1, 200, 64, 63, 1000), broken=broken, by=by)


@pytest.mark.parametrize("heads", [1, 24, 32, 40, 64])
@pytest.mark.parametrize("rows", [1, 2, 4, 5, 8])
@pytest.mark.parametrize(("name", "by"), BOTH)
def test_every_number_of_heads_and_of_rows_that_share_keys(
    name: str, by: tuple[str, float], rows: int, heads: int
) -> None:
    right(IndexerSpec(index=name, num_heads=heads), (65, 129, 500), rows=rows, by=by)


@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("rows", [15, 16, 17, 40, 300])
@pytest.mark.parametrize("by", [EXACT, SUM])
def test_many_rows_share_keys_in_blocks(by: tuple[str, float], rows: int, heads: int) -> None:
    right(IndexerSpec(index=POW2, num_heads=heads), (320, 1000, 305), rows=rows, broken=nothing_there, by=by)


@pytest.mark.parametrize("length", [0, 1, 64, 3000, 20000])
@pytest.mark.parametrize("rows", [1, 2, 3, 8])
@pytest.mark.parametrize(("name", "by"), BOTH)
def test_pages_of_one_request_are_dealt_out_in_turn(
    name: str, by: tuple[str, float], rows: int, length: int
) -> None:
    right(IndexerSpec(index=name), (length,), rows=rows, by=by)


def strangers(o: Operands) -> None:
    """Rows of requests that do not exist, before and among others."""
    o["row_req"][0], o["row_req"][3] = -1, 99


@pytest.mark.parametrize("lengths", [(300,), (300, 200)])
@pytest.mark.parametrize("by", [EXACT, SUM])
def test_a_row_of_no_request_has_no_keys(lengths: tuple[int, ...], by: tuple[str, float]) -> None:
    spec = IndexerSpec(index=POW2)
    operands = drawn(spec, lengths, 4)
    strangers(operands)
    given = {name: tensor.cuda() for name, tensor in operands.items()}
    limits = Limits(max_rows=len(given["q"]), max_reqs=len(lengths), max_context=512, rows_per_req=4)
    plan = hal.plan("indexer_logits", spec, limits, device="cuda", implementation=by[0])
    out = torch.full((len(given["q"]), 300), 7.0, device="cuda")
    plan.run(**given, out=out)
    exact = reference.indexer_logits(spec, **given, dtype=torch.float64)
    for row, n in enumerate(given["row_len"].tolist()):
        if 0 <= int(given["row_req"][row]) < len(lengths):
            wanted = exact[row, :n]
            assert (out[row, :n].double() - wanted).abs().max() < by[1] * wanted.abs().mean()
        assert bool((out[row, n:] == 7).all())


@pytest.mark.parametrize(
    "broken", [wild_keys, wild_queries, zero_blocks, apart_keys, apart_queries, apart, nearly_apart]
)
@pytest.mark.parametrize(("heads", "rows"), [(32, 1), (32, 2), (32, 4), (32, 8), (64, 1), (64, 4), (24, 3)])
@pytest.mark.parametrize("lengths", [(200, 70), (333,)])
def test_scales_that_integers_do_not_reach(
    broken: Any, heads: int, rows: int, lengths: tuple[int, ...]
) -> None:
    right(IndexerSpec(index=MXFP4, num_heads=heads), lengths, rows=rows, broken=broken)


@pytest.mark.parametrize("by", [EXACT, SUM])
def test_scores_and_weights_in_bfloat16(by: tuple[str, float]) -> None:
    right(IndexerSpec(index=POW2, score="bfloat16", weights_dtype="bfloat16"), (300, 63), rows=20, by=by)


@pytest.mark.parametrize("index", ["sharded", "replicated"])
@pytest.mark.parametrize("by", [EXACT, SUM])
def test_a_rank_scores_its_share(index: str, by: tuple[str, float]) -> None:
    dcp = DCP(world=4, rank=2, interleave=4, index=index)
    right(IndexerSpec(index=POW2, dcp=dcp), (65, 3, 200), by=by)


#: Requests with room for a million keys in all, the last of which are dealt out to blocks that are early.
DEALT = [((40000, 100, 20000, *range(100, 129)), rows) for rows in (1, 2)]


@pytest.mark.parametrize(
    ("lengths", "rows"),
    [(tuple(range(1, 700)), 1), (tuple(range(8, 300)), 4), ((40000, 100, 20000), 1), ((0, 70), 1), *DEALT],
)
@pytest.mark.parametrize("by", [EXACT, SUM])
def test_shares_end_anywhere(lengths: tuple[int, ...], rows: int, by: tuple[str, float]) -> None:
    right(IndexerSpec(index=POW2), lengths, rows=rows, by=by)


@pytest.mark.parametrize("lengths", [(4000,) * 100, (5003,) * 33, (9000, 70) * 16, (2500,) * 128, (1,) * 129])
@pytest.mark.parametrize("name", [POW2, MXFP4])
def test_a_block_has_pages_of_several_requests(name: str, lengths: tuple[int, ...]) -> None:
    right(IndexerSpec(index=name), lengths)


@pytest.mark.parametrize("scale", [255, 200, 120, 110, 30])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("ordinary", [None, 0, 3, 6])  # scores that float32 rounds as small as they are
def test_what_is_done_for_one_key_leaves_the_bits_of_its_neighbours(
    rows: int, scale: int, ordinary: int | None
) -> None:
    spec = IndexerSpec(index=MXFP4)
    operands = drawn(spec, (500, 90), rows)
    if ordinary is not None:
        operands["cache"][:, 4096:] = ordinary
        operands["weights"] *= 1e-3
    given = {name: tensor.cuda() for name, tensor in operands.items()}
    limits = Limits(max_rows=2 * rows, max_reqs=2, max_context=512, rows_per_req=rows)
    plan = hal.plan("indexer_logits", spec, limits, device="cuda", implementation="nvidia.cuda")
    before = plan.run(**given)
    given["cache"][int(given["block_table"][0, 1]), 4096 + 4 * 7] = scale
    after = plan.run(**given)
    assert not torch.equal(before[0, 71], after[0, 71])
    before[:rows, 71] = after[:rows, 71]
    for row, n in enumerate(given["row_len"].tolist()):
        assert torch.equal(before[row, :n].nan_to_num(3e9), after[row, :n].nan_to_num(3e9))


@pytest.mark.parametrize("ordinary", [None, 3])
def test_an_odd_row_leaves_the_bits_of_the_row_beside_it(ordinary: int | None) -> None:
    spec, limits = IndexerSpec(index=MXFP4), Limits(max_rows=2, max_reqs=1, max_context=512, rows_per_req=2)
    operands = drawn(spec, (500,), 2)
    if ordinary is not None:
        operands["cache"][:, 4096:] = ordinary
        operands["weights"] *= 1e-3
    given = {name: tensor.cuda() for name, tensor in operands.items()}
    plan = hal.plan("indexer_logits", spec, limits, device="cuda", implementation="nvidia.cuda")
    before = plan.run(**given)
    given["q_scale"][1, :, 1] = given["q_scale"][1, :, 1] - 7
    after, n = plan.run(**given), int(given["row_len"][0])
    assert torch.equal(before[0, :n], after[0, :n])
    assert not torch.equal(before[1, :n], after[1, :n])


def test_a_small_group_keeps_its_bits_beside_a_large_scale() -> None:
    def broken(o: Operands) -> None:
        pages = len(o["cache"])
        o["cache"][:, :4096].view(pages, 64, 64)[..., :16] = 0
        o["cache"][:, 4096:].view(pages, 64, 4)[:] = torch.tensor([191, 127, 127, 127], dtype=torch.uint8)
        o["q_scale"][:] = torch.tensor([141, 127, 127, 127], dtype=torch.uint8)
        o["weights"] *= 1e-23

    right(IndexerSpec(index=MXFP4), (200, 70), broken=broken)


def test_launches_that_overlap_share_no_pages() -> None:
    spec, lengths = IndexerSpec(index=POW2), (4000,) * 40
    given = {name: tensor.cuda() for name, tensor in drawn(spec, lengths, 1).items()}
    limits = Limits(max_rows=40, max_reqs=40, max_context=4096, rows_per_req=1)
    plan = hal.plan("indexer_logits", spec, limits, device="cuda", implementation="nvidia.cuda")
    outs = [torch.full((40, 4000), torch.nan, device="cuda") for _ in range(4)]
    wanted = plan.run(**given, out=outs[3]).clone()
    graph, streams = torch.cuda.CUDAGraph(), [torch.cuda.Stream() for _ in range(2)]
    with torch.cuda.graph(graph):
        plan.run(**given, out=outs[2])
    for _ in range(20):
        for out in outs:
            out.fill_(torch.nan)
        torch.cuda.synchronize()
        for stream, out in zip(streams, outs, strict=False):
            with torch.cuda.stream(stream):
                plan.run(**given, out=out)
        graph.replay()
        plan.run(**given, out=outs[3])
        torch.cuda.synchronize()
        assert all(torch.equal(out, wanted) for out in outs)


@pytest.mark.parametrize(("rows", "length"), [(300, 5000), (65, 2100), (64, 64)])
@pytest.mark.parametrize("by", [EXACT, SUM])
def test_a_prefill_skips_the_keys_behind_each_row(rows: int, length: int, by: tuple[str, float]) -> None:
    right(IndexerSpec(index=POW2), (length, 70), rows=rows, by=by)


def test_queries_may_stand_at_any_byte() -> None:
    operands = drawn(IndexerSpec(index=POW2), (300, 70), 20)
    given = {name: tensor.cuda() for name, tensor in operands.items()}
    limits = Limits(max_rows=40, max_reqs=2, max_context=512, rows_per_req=20)
    plan = hal.plan(
        "indexer_logits", IndexerSpec(index=POW2), limits, device="cuda", implementation="nvidia.cuda_fp8_sum"
    )
    wanted = plan.run(**given)
    room = torch.empty(given["q"].numel() + 1, dtype=torch.uint8, device="cuda")
    room[1:] = given["q"].view(torch.uint8).flatten()
    given["q"] = room[1:].view(given["q"].dtype).view(given["q"].shape)
    got = plan.run(**given)
    for row, n in enumerate(operands["row_len"].tolist()):
        assert torch.equal(got[row, :n], wanted[row, :n])
