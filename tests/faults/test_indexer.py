"""Faults met in the field, on the indexer. Numbers are the classes of ``docs/faults.md``."""

from __future__ import annotations

import math

import pytest
import torch
from index_cases import MXFP4, POW2, Index, Oracle, filled, int32, planned
from torch import Tensor

from kimi_hal import formats
from kimi_hal.ops import indexer_logits, indexer_topk, store_index_keys
from kimi_hal.ops.check import problems
from kimi_hal.ops.indexer import IndexerSpec, IndexQuerySpec, StoreIndexSpec
from kimi_hal.ops.spec import DCP
from kimi_hal.reference import indexer as reference

NAN, INF = math.nan, math.inf


def ranked(order: list[float], heads: int = 1) -> tuple[Index, tuple[Tensor, Tensor, Tensor]]:
    """Return keys whose scores have the order of ``order`` (small integers), and the query that says so."""
    index = Index([len(order)], heads=heads)
    keys = torch.zeros(len(order), 128)
    keys[:, 0] = torch.tensor(order)
    index.put(0, keys)
    q = torch.zeros(1, heads, 128)
    q[:, :, 0] = 1.0
    spec = IndexQuerySpec(index=POW2, num_heads=heads, weight_scale=1.0)
    return index, reference.quantize_index_query(spec, q, torch.ones(1, heads))


def repeat(query: tuple[Tensor, Tensor, Tensor], rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Give every row the query of the first."""
    q, scale, weights = query
    same = q.view(torch.uint8).repeat(rows, 1, 1).view(q.dtype)
    return same, scale.repeat(rows, 1, 1), weights.repeat(rows, 1)


# --- class 3: padding rows and slots --------------------------------------------------------------------


@pytest.mark.parametrize("rows_per_req", [1, 2, 3, 4])
def test_fault_03_padded_requests_of_a_speculative_batch(rows_per_req: int) -> None:
    index = Index([90, 40, 65])
    query = index.query(4 * rows_per_req)
    lengths = [n - rows_per_req + j + 1 for n in (90, 40, 65) for j in range(rows_per_req)]
    requests = [r for r in range(3) for _ in range(rows_per_req)]
    padded = index.topk(
        query, int32(requests + [1 << 30] * rows_per_req), int32(lengths + [0] * rows_per_req), 16
    )[0]
    alone = index.topk(tuple(x[: 3 * rows_per_req] for x in query), int32(requests), int32(lengths), 16)[0]
    assert torch.equal(padded[: 3 * rows_per_req], alone)
    assert (padded[3 * rows_per_req :] == -1).all()


@pytest.mark.parametrize("name", formats.names("index"))
def test_fault_03_slot_minus_one_is_not_the_last_slot(name: str) -> None:
    keys = torch.randn(2, 128)
    cache = torch.full((2, formats.index(name).page_bytes), 0xC7, dtype=torch.uint8)
    alone = cache.clone()
    spec = StoreIndexSpec(index=name)
    reference.store_index_keys(spec, keys, torch.tensor([3, -1]), cache)
    reference.store_index_keys(spec, keys[:1], torch.tensor([3]), alone)
    assert torch.equal(cache, alone)


def test_fault_03_more_key_rows_than_slots() -> None:
    keys = torch.randn(8, 128)
    keys[5:] = NAN
    cache, expected = (torch.full((1, 8448), 0xC7, dtype=torch.uint8) for _ in range(2))
    spec = StoreIndexSpec(index=POW2)
    reference.store_index_keys(spec, keys, torch.tensor([9, 1, 60, 2, 33]), cache)
    for row, slot in enumerate([9, 1, 60, 2, 33]):
        reference.store_index_keys(spec, keys[row : row + 1], torch.tensor([slot]), expected)
    assert torch.equal(cache, expected)


def test_fault_03_a_padding_slot_of_0_writes_slot_0_and_no_other() -> None:
    keys = torch.randn(3, 128)
    cache = torch.full((2, 8448), 0xC7, dtype=torch.uint8)
    spec = StoreIndexSpec(index=POW2, dump_slot=0)
    reference.store_index_keys(spec, keys, torch.tensor([4, 0, 0]), cache)
    fmt = formats.index(POW2)
    written = {fmt.element_offset(t, d) for t in (0, 4) for d in range(128)}
    written |= {fmt.scale_offset(t, b) for t in (0, 4) for b in range(4)}
    changed = set((cache[0] != 0xC7).nonzero().flatten().tolist())
    assert changed <= written
    assert (cache[1] == 0xC7).all()
    assert (fmt.read(cache, torch.tensor([4])) - keys[0]).abs().max() < 0.3


def test_fault_03_a_batch_of_padding_touches_nothing() -> None:
    index = Index([64])
    before = index.cache.clone()
    reference.store_index_keys(
        StoreIndexSpec(index=POW2), torch.randn(4, 128), torch.tensor([-1] * 4), index.cache
    )
    picked, scores = index.topk(index.query(4), int32([-1] * 4), int32([0] * 4), 8, return_selected=True)
    assert torch.equal(index.cache, before)
    assert (picked == -1).all()
    assert (scores == -INF).all()


# --- class 4: stale and uninitialised tails -------------------------------------------------------------


@pytest.mark.parametrize("name", formats.names("index"))
def test_fault_04_stale_bytes_behind_the_keys_do_not_matter(name: str) -> None:
    dirty, clean = Index([70, 1], name), Index([70, 1], name)  # bytes that hold no key are 0xFF, a NaN
    stale = torch.ones(clean.cache.shape[0] * 64, dtype=torch.bool)
    stale[torch.cat([clean.slots(0), clean.slots(1)])] = False
    clean.fmt.write(clean.cache, stale.nonzero()[:, 0], torch.zeros(int(stale.sum()), 128))
    query, rows = clean.query(2), (int32([0, 1]), int32([70, 1]))
    got, expected = (x.topk(query, *rows, 16, return_selected=True) for x in (dirty, clean))
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])
    assert not got[1].isnan().any()


def test_fault_04_the_tail_of_the_block_table_is_not_read() -> None:
    index = Index([5])
    assert index.table[0, 1].item() == 1 << 30
    picked, _ = index.topk(index.query(1), int32([0]), int32([5]), 8)
    assert picked.tolist() == [[0, 1, 2, 3, 4, -1, -1, -1]]


def test_fault_04_buffers_filled_with_garbage_are_overwritten() -> None:
    index = Index([5])
    out = torch.full((1, 8), 1 << 30, dtype=torch.int32)
    scores = torch.full((1, 8), NAN)
    operands = (*index.query(1), index.cache, index.table, int32([0]), int32([5]))
    workspace = torch.full((256,), 0xFF, dtype=torch.uint8)
    run = planned(indexer_topk, index.topk_spec(8, return_selected=True))
    run(*operands, out=out, scores_out=scores, workspace=workspace)
    assert out.tolist() == [[0, 1, 2, 3, 4, -1, -1, -1]]
    assert (scores[0, 5:] == -INF).all()


# --- class 5: ties --------------------------------------------------------------------------------------


def test_fault_05_ties_across_the_cut() -> None:
    order = [0.0] * 8320
    winners = list(range(17, 8320, 83))[:100]
    for place in winners:
        order[place] = 1.0
    index, query = ranked(order)
    picked, _ = index.topk(query, int32([0]), int32([8320]), 2048)
    others = [p for p in range(8320) if p not in set(winners)][:1948]
    assert picked[0].tolist() == sorted(winners + others)


def test_fault_05_infinite_scores_win() -> None:
    index, (_, scale, weights) = ranked([0.0] * 100)
    infinite = torch.tensor([INF]).view(torch.uint8)
    for place in (7, 50, 99):  # every element 1, the scale +inf
        page, token = divmod(int(index.slots(0)[place]), 64)
        index.cache[page, [index.fmt.element_offset(token, d) for d in range(128)]] = 0x38
        index.cache[page, [index.fmt.scale_offset(token, b) for b in range(4)]] = infinite
    query = torch.ones(1, 1, 128).to(torch.float8_e4m3fn), scale, weights
    picked, scores = index.topk(query, int32([0]), int32([100]), 4, return_selected=True)
    assert picked.tolist() == [[0, 7, 50, 99]]
    assert scores[0].tolist() == [0.0, INF, INF, INF]


# --- class 6: clustered, distinct scores ----------------------------------------------------------------


def test_fault_06_scores_that_share_their_upper_bits() -> None:
    # Sums of 8 products of FP8 numbers: 8192 + i / 8 for i in 0..255, all in one coarse bin of a radix.
    generator = torch.Generator().manual_seed(0)
    steps = torch.randperm(256, generator=generator)
    keys = torch.zeros(256, 128)
    keys[:, 0] = 64.0
    keys[:, 1:9] = ((steps[:, None] >> torch.arange(8)) & 1).float()
    index = Index([256], heads=1)
    index.put(0, keys)
    q = torch.zeros(1, 1, 128)
    q[0, 0, 0] = 128.0
    q[0, 0, 1:9] = 2.0 ** (torch.arange(8) - 3)
    spec = IndexQuerySpec(index=POW2, num_heads=1, weight_scale=1.0)
    query = reference.quantize_index_query(spec, q, torch.ones(1, 1))
    scores = index.logits(query, int32([0]), int32([256]))[0, :256]
    assert torch.equal(scores, 8192 + steps / 8.0)
    picked, _ = index.topk(query, int32([0]), int32([256]), 64)
    assert picked[0].tolist() == (steps >= 192).nonzero().flatten().tolist()


# --- class 7: lengths around k --------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 2047, 2048, 2049])
def test_fault_07_lengths_around_k(length: int) -> None:
    index, query = ranked([float(i % 7) for i in range(2049)])
    picked, _ = index.topk(query, int32([0]), int32([length]), 2048)
    if length <= 2048:
        assert picked[0].tolist() == filled(range(length), 2048)
    else:  # the last of the smallest goes
        worst = max(i for i in range(2049) if i % 7 == 0)
        assert picked[0].tolist() == [i for i in range(2049) if i != worst]


# --- class 8: offsets beyond 2^31 -----------------------------------------------------------------------


def test_fault_08_a_page_beyond_two_gigabytes() -> None:
    page, fmt = 254_250, formats.index(POW2)
    assert page * fmt.page_bytes > 1 << 31
    cache = torch.empty(254_300, fmt.page_bytes, dtype=torch.uint8)  # only the pages in use take memory
    keys = torch.randn(70, 128)
    slots = torch.cat([torch.arange(64) + page * 64, torch.arange(6) + 3 * 64])
    reference.store_index_keys(StoreIndexSpec(index=POW2), keys, slots, cache)
    small = Index([70])
    small.put(0, keys)
    query = small.query(1)
    operands = (cache, int32([[page, 3]]), int32([0]), int32([70]))
    scores = reference.indexer_logits(small.spec(), *query, *operands)
    assert torch.equal(scores[0, :70], small.logits(query, int32([0]), int32([70]))[0, :70])


def test_fault_08_a_row_of_logits_beyond_two_gigabytes() -> None:
    index, query = ranked([float(i) for i in range(64)])
    rows = 600
    out = torch.empty(rows, 1 << 20)  # 2.3 GiB of addresses; only the first columns take memory
    out[:, :128] = 12345.0
    operands = (index.cache, index.table, int32([0] * rows), int32([64] * rows))
    planned(indexer_logits, index.spec())(*repeat(query, rows), *operands, out=out)
    expected = index.logits(query, int32([0]), int32([64]))[0, :64]
    assert expected.count_nonzero() == 63
    assert (out[:, :64] == expected).all()
    assert (out[:, 64:128] == 12345.0).all()


# --- class 11: global bounds and interleave -------------------------------------------------------------


@pytest.mark.parametrize(("bound", "counts"), [(9, [3, 2, 2, 2]), (10, [3, 3, 2, 2])])
def test_fault_11_the_causal_bound_is_global(bound: int, counts: list[int]) -> None:
    for rank, count in enumerate(counts):
        index = Index([10], dcp=DCP(world=4, rank=rank))
        picked, _ = index.topk(index.query(1), int32([0]), int32([bound]), 8)
        assert picked[0].tolist() == filled(range(count), 8)


@pytest.mark.parametrize(("tokens", "counts"), [(6, [4, 2]), (5, [4, 1]), (16, [8, 8])])
def test_fault_11_the_interleave_is_not_one(tokens: int, counts: list[int]) -> None:
    for rank, count in enumerate(counts):
        index = Index([16], dcp=DCP(world=2, rank=rank, interleave=4))
        picked, _ = index.topk(index.query(1), int32([0]), int32([tokens]), 16)
        assert picked[0].tolist() == filled(range(count), 16)


@pytest.mark.parametrize("tokens", [127, 128, 129, 255, 257])
def test_fault_11_sharded_scores_are_those_of_one_rank(tokens: int) -> None:
    whole = Index([tokens])
    query, rows = whole.query(1), (int32([0]), int32([tokens]))
    scores = whole.logits(query, *rows)
    seen = torch.full((tokens,), NAN)
    for rank in range(2):
        shard = Index([tokens], dcp=DCP(world=2, rank=rank))
        count = shard.lengths[0]
        seen[shard.positions(count)] = shard.logits(query, *rows)[0, :count]
    assert torch.equal(seen, scores[0, :tokens])


# --- classes 14, 15, 17: sizes that are no power of two, heads, rows ------------------------------------


def test_fault_14_guard_bytes_around_heads_and_columns() -> None:
    index = Index([130], heads=24, padding=48)
    q, scale, weights = index.query(2)
    wide_q = torch.full((2, 25, 160), 448.0).to(torch.float8_e4m3fn)
    wide_q[:, :24, :128] = q
    wide_w = torch.full((2, 32), 1e4)
    wide_w[:, :24] = weights
    rows = int32([0, 0]), int32([130, 67])
    got = index.logits((wide_q[:, :24, :128], scale, wide_w[:, :24]), *rows)
    assert torch.equal(got, index.logits((q, scale, weights), *rows))


@pytest.mark.parametrize("name", [POW2, MXFP4])
@pytest.mark.parametrize("heads", [1, 4, 6, 8, 12, 16, 20, 24, 32, 40, 64, 128])
def test_fault_15_any_number_of_index_heads(heads: int, name: str) -> None:
    index = Index([70], name, heads=heads)
    query = index.query(2)
    logits = index.logits(query, int32([0, 0]), int32([70, 33]), Oracle)
    for row, count in enumerate([70, 33]):
        torch.testing.assert_close(
            logits[row, :count], index.plain(query, row, 0)[:count], rtol=1e-12, atol=1e-12
        )


def test_fault_15_heads_padded_with_zero_weight_change_no_score() -> None:
    narrow, wide = Index([64], heads=24), Index([64], heads=32)
    q, scale, weights = narrow.query(1)
    wide_q = torch.zeros(1, 32, 128).to(torch.float8_e4m3fn)
    wide_q[:, :24] = q
    wide_w = torch.zeros(1, 32)
    wide_w[:, :24] = weights
    rows = int32([0]), int32([64])
    got = wide.logits((wide_q, torch.empty(1, 32, 0, dtype=torch.uint8), wide_w), *rows, Oracle)
    torch.testing.assert_close(got, narrow.logits((q, scale, weights), *rows, Oracle), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rows", [17, 65, 130])
def test_fault_17_rows_beyond_one_block(rows: int) -> None:
    index, query = ranked([float(i % 11) for i in range(40)])
    picked, _ = index.topk(repeat(query, rows), int32([0] * rows), int32([40] * rows), 8)
    assert (picked == picked[0]).all()
    assert sorted(p % 11 for p in picked[0].tolist()) == [8, 8, 9, 9, 9, 10, 10, 10]


def test_fault_17_a_selection_does_not_depend_on_its_slice() -> None:
    index = Index([200, 90])
    query = index.query(10)
    requests, lengths = int32([0, 1] * 5), int32([200, 90, 150, 10, 200, 64, 65, 90, 1, 33])
    whole = index.topk(query, requests, lengths, 16)[0]
    parts = [slice(0, 4), slice(4, 7), slice(7, 10)]
    pieces = [index.topk(tuple(x[p] for x in query), requests[p], lengths[p], 16)[0] for p in parts]
    assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.parametrize(("place", "rows"), [(0, 1), (43, 44), (63, 64)])
def test_fault_17_a_row_is_the_same_wherever_it_stands(place: int, rows: int) -> None:
    index = Index([300])
    alone = index.query(1)
    query = list(index.query(rows, seed=9))
    for whole, one in zip(query, alone, strict=True):
        whole[place] = one[0]
    lengths = torch.full((rows,), 300, dtype=torch.int32)
    got = index.logits((query[0], query[1], query[2]), int32([0] * rows), lengths)[place]
    assert torch.equal(got, index.logits(alone, int32([0]), int32([300]))[0])


# --- class 19: NaN, infinities and zeros ----------------------------------------------------------------


def test_fault_19_nan_keys_are_chosen_last() -> None:
    index, query = ranked([float(i) for i in range(16)])
    for place, byte in ((3, 0x7F), (9, 0xFF)):  # NaN and −NaN
        slot = int(index.slots(0)[place])
        index.cache[slot // 64, index.fmt.element_offset(slot % 64, 0)] = byte
    assert index.topk(query, int32([0]), int32([16]), 4)[0].tolist() == [[12, 13, 14, 15]]
    picked, scores = index.topk(query, int32([0]), int32([16]), 15, return_selected=True)
    assert picked[0].tolist() == [i for i in range(16) if i != 9]
    assert scores[0].isnan().nonzero().flatten().tolist() == [3]


def test_fault_19_a_nan_query_selects_the_first_positions() -> None:
    index, query = ranked([float(i) for i in range(16)])
    query[2][:] = NAN
    picked, scores = index.topk(query, int32([0]), int32([16]), 4, return_selected=True)
    assert picked.tolist() == [[0, 1, 2, 3]]
    assert scores.isnan().all()


def test_fault_19_zeros_of_both_signs_tie() -> None:
    index, query = ranked([0.0, -1.0, 0.0, -1.0])  # ReLU gives 0, a negative weight −0
    query[2][:] = -1.0
    scores = index.logits(query, int32([0]), int32([4]))[0, :4]
    assert scores.count_nonzero() == 0
    assert index.topk(query, int32([0]), int32([4]), 3)[0].tolist() == [[0, 1, 2]]


# --- class 22: the dialect is the cache's ---------------------------------------------------------------


@pytest.mark.parametrize(("name", "value"), [(POW2, 1.0), ("index.fp8.e4m3fnuz.f32.page64", 0.5)])
def test_fault_22_the_dialect_is_the_caches(name: str, value: float) -> None:
    fmt = formats.index(name)
    cache = torch.zeros(1, fmt.page_bytes, dtype=torch.uint8)
    cache[0, fmt.element_offset(0, 0)] = 0x38
    start = fmt.scale_offset(0)
    cache[0, start : start + 4] = torch.tensor([1.0]).view(torch.uint8)
    q = torch.zeros(1, 1, 128)
    q[0, 0, 0] = 1.0
    query = reference.quantize_index_query(
        IndexQuerySpec(index=name, num_heads=1, weight_scale=1.0), q, torch.ones(1, 1)
    )
    operands = (*query, cache, int32([[0]]), int32([0]), int32([1]))
    assert reference.indexer_logits(IndexerSpec(index=name, num_heads=1), *operands)[0, 0].item() == value


# --- class 23: page units, index dtype, strides ---------------------------------------------------------


def test_fault_23_a_page_is_64_keys() -> None:
    index = Index([192])
    index.table = int32([[3, 1, 2]])
    index.put(0, torch.randn(192, 128))
    picked, _ = index.topk(index.query(1), int32([0]), int32([192]), 192, emit="slot")
    assert picked[0].tolist() == [*range(192, 256), *range(64, 128), *range(128, 192)]


def test_fault_23_index_dtypes_are_not_reinterpreted() -> None:
    index = Index([64])
    given = dict(zip(("q", "q_scale", "weights"), index.query(1), strict=True))
    given |= {"cache": index.cache, "block_table": index.table.long(), "row_req": torch.tensor([0])}
    given["row_len"] = int32([64])
    assert problems(indexer_logits, index.spec(), given) == [
        "block_table must be int32, got int64",
        "row_req must be int32, got int64",
    ]
    slots = {"k": torch.zeros(4, 128), "slots": int32([1, 2, 3, 4]), "cache": index.cache}
    assert problems(store_index_keys, StoreIndexSpec(index=POW2), slots) == ["slots must be int64, got int32"]


def test_fault_23_columns_of_a_wider_tensor_are_honoured() -> None:
    index = Index([100, 50])
    metadata = int32([[9, 0, 100], [9, 1, 50], [9, 0, 7]])
    query = index.query(3)
    got = index.topk(query, metadata[:, 1], metadata[:, 2], 8)[0]
    assert torch.equal(got, index.topk(query, int32([0, 1, 0]), int32([100, 50, 7]), 8)[0])
    table = torch.full((2, 7), 1 << 30, dtype=torch.int32)
    table[:, 2 : 2 + index.table.shape[1]] = index.table
    index.table = table[:, 2 : 2 + index.table.shape[1]]
    assert torch.equal(index.topk(query, metadata[:, 1], metadata[:, 2], 8)[0], got)


def test_fault_23_every_other_slot_of_a_tensor() -> None:
    cache, expected = (torch.zeros(1, 8448, dtype=torch.uint8) for _ in range(2))
    keys, slots = torch.randn(3, 128), torch.tensor([5, 99, 7, 99, 11])
    reference.store_index_keys(StoreIndexSpec(index=POW2), keys, slots[::2], cache)
    reference.store_index_keys(StoreIndexSpec(index=POW2), keys, torch.tensor([5, 7, 11]), expected)
    assert torch.equal(cache, expected)
