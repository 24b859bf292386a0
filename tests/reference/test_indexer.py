from __future__ import annotations

import math

import pytest
import torch
from index_cases import MXFP4, POW2, Index, Oracle, filled, int32, plain_selection, planned
from torch import Tensor

from kimi_hal import formats
from kimi_hal.ops import indexer_logits, indexer_topk, quantize_index_query
from kimi_hal.ops.indexer import IndexQuerySpec, StoreIndexSpec
from kimi_hal.ops.spec import DCP, Limits
from kimi_hal.reference import indexer as reference
from kimi_hal.reference import selection

INF = math.inf
INDEX = formats.names("index")
FP8 = [name for name in INDEX if ".fp8." in name]


# --- quantize_index_query -------------------------------------------------------------------------------


def quantize(q: Tensor, weights: Tensor, name: str = POW2, **fields: object) -> tuple[Tensor, Tensor, Tensor]:
    spec = IndexQuerySpec(index=name, num_heads=q.shape[1], **fields)
    return reference.quantize_index_query(spec, q, weights)


@pytest.mark.parametrize("name", FP8)
def test_fp8_folds_its_power_of_two_into_the_weights(name: str) -> None:
    value = 512.0 if "e4m3fnuz" not in name else 256.0  # beyond the largest by less than 2: the scale is 2
    q = torch.zeros(1, 1, 128)
    q[0, 0, 3] = value
    quantised, scale, weights = quantize(q, torch.tensor([[3.0]]), name)
    assert str(quantised.dtype) == f"torch.{formats.index(name).query_dtype}"
    assert quantised[0, 0, 3].float().item() == value / 2
    assert scale.shape == (1, 1, 0)
    assert weights.item() == pytest.approx(3.0 * 2 * 128**-0.5, rel=1e-6)


def test_mxfp4_keeps_its_scales_apart() -> None:
    q = torch.zeros(2, 3, 128)
    q[1, 2, 96] = -6.0
    packed, scale, weights = quantize(q, torch.ones(2, 3), MXFP4)
    assert packed.dtype == scale.dtype == torch.uint8
    assert (packed.shape, scale.shape) == ((2, 3, 64), (2, 3, 4))
    assert packed[1, 2, 48].item() == 0xF  # the even element is the low nibble: −6 is 0b1111
    assert scale[1, 2].tolist() == [1, 1, 1, 127]
    torch.testing.assert_close(weights, torch.full((2, 3), (128 * 3) ** -0.5))


@pytest.mark.parametrize("heads", [1, 24, 32])
def test_the_default_weight_scale_counts_the_true_heads(heads: int) -> None:
    *_, weights = quantize(torch.full((1, heads, 128), 448.0), torch.ones(1, heads))
    assert weights[0, 0].item() == pytest.approx((128 * heads) ** -0.5, rel=1e-6)


def test_a_given_weight_scale_replaces_the_default() -> None:
    *_, weights = quantize(torch.full((1, 2, 128), 448.0), torch.tensor([[1.0, -2.0]]), weight_scale=0.5)
    assert weights.tolist() == [[0.5, -1.0]]


def test_a_zero_query_has_a_finite_scale() -> None:
    quantised, _, weights = quantize(torch.zeros(1, 1, 128), torch.ones(1, 1))
    assert quantised.float().count_nonzero() == 0
    assert weights.item() == pytest.approx(2.0**-22 * 128**-0.5)


def test_head_strided_queries_are_read_where_they_are() -> None:
    wide = torch.randn(4, 3, 256)
    got = quantize(wide[:, :, 64:192], torch.ones(4, 3))
    want = quantize(wide[:, :, 64:192].contiguous(), torch.ones(4, 3))
    assert torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8))
    assert torch.equal(got[2], want[2])


def sylvester(size: int) -> Tensor:
    matrix = torch.ones(1, 1, dtype=Oracle)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix * size**-0.5


def test_hadamard_is_sylvesters_orthonormal_matrix() -> None:
    x = torch.randn(5, 128, dtype=Oracle)
    torch.testing.assert_close(reference.hadamard(x), x @ sylvester(128), rtol=1e-12, atol=1e-12)


def test_hadamard_turns_the_query_before_it_is_quantised() -> None:
    q = torch.randn(2, 2, 128)
    got = quantize(q, torch.ones(2, 2), hadamard=True)
    want = quantize((q.double() @ sylvester(128)).float(), torch.ones(2, 2))
    codes = [x[0].view(torch.uint8) for x in (got, want)]
    assert (codes[0] != codes[1]).sum() <= 2  # float32 may fall on the other side of a rounding boundary
    torch.testing.assert_close(got[2], want[2])


def test_turning_query_and_keys_leaves_the_scores() -> None:
    index = Index([64])
    q, keys = torch.randn(1, 4, 128), torch.randn(64, 128)
    rows = int32([0]), int32([64])
    spec = IndexQuerySpec(index=POW2, num_heads=4)
    index.put(0, keys)
    plain = index.logits(reference.quantize_index_query(spec, q, torch.ones(1, 4)), *rows)
    index.put(0, reference.hadamard(keys))
    turned = IndexQuerySpec(index=POW2, num_heads=4, hadamard=True)
    rotated = index.logits(reference.quantize_index_query(turned, q, torch.ones(1, 4)), *rows)
    difference = (plain[:, :64] - rotated[:, :64]).norm() / plain[:, :64].norm()
    assert 0 < difference < 0.1  # two roundings of e4m3, whose step is 1/8 of the value


def test_the_run_function_gives_the_weights_in_the_asked_dtype() -> None:
    spec = IndexQuerySpec(index=POW2, num_heads=2, weights_dtype="bfloat16")
    *_, weights = planned(quantize_index_query, spec)(torch.randn(3, 2, 128).bfloat16(), torch.randn(3, 2))
    assert weights.dtype == torch.bfloat16


# --- store_index_keys -----------------------------------------------------------------------------------


def store(name: str, k: Tensor, slots: list[int], pages: int = 2) -> Tensor:
    cache = torch.full((pages, formats.index(name).page_bytes), 0xA5, dtype=torch.uint8)
    reference.store_index_keys(StoreIndexSpec(index=name), k, torch.tensor(slots), cache)
    return cache


@pytest.mark.parametrize("name", INDEX)
def test_stored_keys_are_read_back(name: str) -> None:
    keys = torch.randn(3, 128)
    cache = store(name, keys, [0, 127, 70])
    decoded = formats.index(name).read(cache, torch.tensor([0, 127, 70]))
    assert (decoded - keys).abs().max() < (0.3 if ".fp8." in name else 1.2)


@pytest.mark.parametrize("name", INDEX)
def test_only_the_bytes_of_the_named_slots_change(name: str) -> None:
    fmt = formats.index(name)
    cache = store(name, torch.randn(2, 128), [5, 64])
    expected = torch.full_like(cache, 0xA5)
    for page, token in ((0, 5), (1, 0)):
        where = {fmt.element_offset(token, d) for d in range(128)} | {
            fmt.scale_offset(token, b) for b in range(4)
        }
        expected[page, sorted(where)] = cache[page, sorted(where)]
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("slot", [-1, -7, 128, 1 << 33])
def test_a_slot_outside_the_cache_writes_nothing(slot: int) -> None:
    assert (store(POW2, torch.randn(1, 128), [slot]) == 0xA5).all()


def test_rows_beyond_the_slots_are_ignored() -> None:
    k = torch.randn(8, 128)
    k[5:] = math.nan
    assert torch.equal(store(POW2, k, [1, 2, 3, 4, 5]), store(POW2, k[:5], [1, 2, 3, 4, 5]))


def test_a_page_stride_is_honoured() -> None:
    fmt = formats.index(POW2)
    pool = torch.full((3, fmt.page_bytes + 96), 0xA5, dtype=torch.uint8)
    view = pool[:, : fmt.page_bytes]
    keys = torch.randn(2, 128)
    reference.store_index_keys(StoreIndexSpec(index=POW2), keys, torch.tensor([64, 191]), view)
    assert torch.equal(view, store(POW2, keys, [64, 191], pages=3))
    assert (pool[:, fmt.page_bytes :] == 0xA5).all()


# --- indexer_logits -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", INDEX)
def test_scores_follow_the_formula_in_every_format(name: str) -> None:
    index = Index([100, 65], name, padding=32)
    query = index.query(3)
    logits = index.logits(query, int32([0, 1, 0]), int32([100, 65, 7]), Oracle)
    for row, (request, count) in enumerate([(0, 100), (1, 65), (0, 7)]):
        expected = index.plain(query, row, request)[:count]
        torch.testing.assert_close(logits[row, :count], expected, rtol=1e-13, atol=1e-13)
        assert (logits[row, count:] == -INF).all()


def test_float32_scores_are_near_the_oracle() -> None:
    index = Index([500], heads=32)
    rows = int32([0]), int32([500])
    query = index.query(1)
    got, oracle = index.logits(query, *rows), index.logits(query, *rows, Oracle)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got[:, :500].double(), oracle[:, :500], rtol=0, atol=3e-6)


def test_weights_may_be_negative_and_relu_comes_before_them() -> None:
    index = Index([1], heads=2)
    index.put(0, torch.ones(1, 128))
    q = torch.ones(1, 2, 128)
    q[0, 1] = -1
    spec = IndexQuerySpec(index=POW2, num_heads=2, weight_scale=1.0)
    query = reference.quantize_index_query(spec, q, torch.tensor([[-0.5, 100.0]]))
    assert index.logits(query, int32([0]), int32([1]))[0, 0].item() == -64.0


def test_a_length_beyond_the_block_table_is_clamped() -> None:
    index = Index([64])
    index.table = index.table[:, :1]
    query = index.query(1)
    got = index.logits(query, int32([0]), int32([1 << 30]))
    assert torch.equal(got, index.logits(query, int32([0]), int32([64])))


@pytest.mark.parametrize("request_id", [-1, 5, 1 << 30])
def test_a_row_of_no_request_has_no_keys(request_id: int) -> None:
    index = Index([64])
    index_out, _ = index.topk(index.query(1), int32([request_id]), int32([64]), 4)
    assert index_out.tolist() == [[-1] * 4]


@pytest.mark.parametrize("page", [-1, 99])
def test_a_table_entry_that_names_no_page_scores_minus_infinity(page: int) -> None:
    index = Index([130])
    whole = index.logits(index.query(1), int32([0]), int32([130]))
    index.table[0, 1] = page
    got = index.logits(index.query(1), int32([0]), int32([130]))
    assert (got[0, 64:128] == -INF).all()
    assert torch.equal(got[0, :64], whole[0, :64])
    assert torch.equal(got[0, 128:130], whole[0, 128:130])


def test_a_nan_in_a_key_makes_its_score_nan_and_no_other() -> None:
    index = Index([70])
    slot = int(index.slots(0)[66])
    index.cache[slot // 64, index.fmt.element_offset(slot % 64, 9)] = 0x7F
    scores = index.logits(index.query(2), int32([0, 0]), int32([70, 66]))
    assert scores[0].isnan().nonzero().flatten().tolist() == [66]
    assert not scores[1].isnan().any()


def test_a_callers_bytes_behind_the_keys_stay() -> None:
    index = Index([70, 3])
    out = torch.full((3, 200), 12345.0)[:, :150]
    run = planned(indexer_logits, index.spec())
    operands = (*index.query(3), index.cache, index.table, int32([0, 1, 0]), int32([70, 3, 0]))
    assert run(*operands, out=out) is out
    for row, count in enumerate([70, 3, 0]):
        assert (out[row, count:] == 12345.0).all()
    assert torch.equal(out[:, :128][out[:, :128] != 12345.0], run(*operands)[run(*operands) != -INF])


def test_a_narrow_out_clamps_the_lengths() -> None:
    index = Index([128])
    out = torch.full((1, 40), 0.0)
    operands = (*index.query(1), index.cache, index.table, int32([0]), int32([128]))
    planned(indexer_logits, index.spec())(*operands, out=out)
    assert torch.equal(out[0], index.logits(operands[:3], int32([0]), int32([128]))[0, :40])


def test_bfloat16_scores_are_the_float32_sum_rounded_once() -> None:
    index = Index([100])
    operands = (*index.query(1), index.cache, index.table, int32([0]), int32([100]))
    wide = planned(indexer_logits, index.spec())(*operands)
    short = planned(indexer_logits, index.spec(score="bfloat16"))(*operands)
    assert short.dtype == torch.bfloat16
    assert torch.equal(short[0, :100], wide[0, :100].bfloat16())


@pytest.mark.parametrize(
    ("fields", "limits", "width"),
    [
        ({}, Limits(max_rows=1, max_reqs=1, max_context=1000), 1024),
        ({"score": "bfloat16"}, Limits(max_rows=1, max_reqs=1, max_context=1025), 1536),
        ({}, Limits(max_rows=1, max_reqs=1, max_context=1000, logits_align=4), 1000),
        ({}, None, 256),
    ],
)
def test_the_width_follows_the_limits(fields: dict[str, str], limits: Limits | None, width: int) -> None:
    index = Index([64])
    operands = (*index.query(1), index.cache, index.table, int32([0]), int32([64]))
    logits = planned(indexer_logits, index.spec(**fields), limits)(*operands)
    assert logits.shape == (1, width)
    assert (logits[0, 64:] == -INF).all()


def test_under_dcp_the_width_is_one_ranks_in_whole_interleaves() -> None:
    index = Index([64], dcp=DCP(world=4, rank=3, interleave=16))
    limits = Limits(max_rows=1, max_reqs=1, max_context=1000, logits_align=4)
    operands = (*index.query(1), index.cache, index.table, int32([0]), int32([64]))
    assert planned(indexer_logits, index.spec(), limits)(*operands).shape == (1, 256)


def test_a_score_depends_on_its_row_and_key_alone() -> None:
    index = Index([300, 40], name="index.fp8.e4m3fn.f32.page64", heads=6)
    query = index.query(9)
    requests, lengths = int32([0, 1, 0, 0, 1, 0, 0, 0, 0]), int32([300, 40, 299, 12, 3, 300, 65, 0, 300])
    whole = index.logits(query, requests, lengths)
    for row in range(9):
        part = [x[row : row + 1] for x in query]
        alone = index.logits((part[0], part[1], part[2]), requests[row : row + 1], lengths[row : row + 1])
        assert torch.equal(alone[0], whole[row])


@pytest.mark.parametrize("name", ["index.fp8.e4m3fn.f32.page64", MXFP4])
@pytest.mark.parametrize(("world", "interleave"), [(2, 1), (4, 64), (3, 5)])
def test_a_score_does_not_depend_on_the_shard(name: str, world: int, interleave: int) -> None:
    whole = Index([500], name, heads=8)
    query, rows = whole.query(2), (int32([0, 0]), int32([500, 333]))
    scores = whole.logits(query, *rows)
    for rank in range(world):
        shard = Index([500], name, heads=8, dcp=DCP(world=world, rank=rank, interleave=interleave))
        count = shard.lengths[0]
        expected = scores[:, shard.positions(count)]
        assert torch.equal(shard.logits(query, *rows)[:, :count], expected)


# --- indexer_topk ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("score", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", INDEX)
def test_the_selection_is_that_of_the_scores(name: str, score: str) -> None:
    index = Index([300, 30], name)
    query, rows = index.query(4), (int32([0, 1, 0, 0]), int32([300, 30, 70, 64]))
    picked, scores = index.topk(query, *rows, 64, score=score, return_selected=True)
    logits = selection.as_score(index.logits(query, *rows), getattr(torch, score)).float()
    for row, count in enumerate(rows[1].tolist()):
        expected = plain_selection(logits[row, :count].tolist(), 64)
        assert picked[row].tolist() == filled(expected, 64)
        assert scores[row, : len(expected)].tolist() == logits[row, expected].tolist()
        assert (scores[row, len(expected) :] == -INF).all()


def test_the_oracle_selects_over_float32_scores() -> None:
    index = Index([200])
    operands = (*index.query(1), index.cache, index.table, int32([0]), int32([200]))
    oracle = reference.indexer_topk(index.topk_spec(32, return_selected=True), *operands, dtype=Oracle)
    logits = index.logits(operands[:3], *operands[5:], Oracle).float()
    assert torch.equal(oracle[0].long(), selection.select_positions(logits, torch.tensor([200]), 32))
    assert oracle[1].dtype == Oracle
    assert torch.equal(oracle[1].float().double(), oracle[1])


def test_without_return_selected_the_scores_have_no_columns() -> None:
    index = Index([8])
    _, scores = index.topk(index.query(2), int32([0, 0]), int32([8, 8]), 4)
    assert scores.shape == (2, 0)


def test_slots_are_those_of_the_selected_positions() -> None:
    index = Index([200])
    query, rows = index.query(2), (int32([0, 0]), int32([200, 9]))
    local, scores = index.topk(query, *rows, 32, return_selected=True)
    slots, slot_scores = index.topk(query, *rows, 32, return_selected=True, emit="slot")
    expected = torch.where(local >= 0, index.slots(0)[local.long().clamp(min=0)], -1)
    assert torch.equal(slots.long(), expected)
    assert torch.equal(slot_scores, scores)


def test_slots_without_a_page_close_up() -> None:
    index = Index([192])
    index.table[0, 1] = -1
    slots, scores = index.topk(
        index.query(1), int32([0]), int32([192]), 192, return_selected=True, emit="slot"
    )
    whole = torch.cat((index.slots(0)[:64], index.slots(0)[128:]))
    assert slots[0].tolist() == filled(whole.tolist(), 192)
    assert (scores[0, :128] > -INF).all()
    assert (scores[0, 128:] == -INF).all()


def test_a_column_slice_is_written_where_it_is() -> None:
    index = Index([40])
    wide = torch.full((2, 12), 77, dtype=torch.int32)
    operands = (*index.query(2), index.cache, index.table, int32([0, 0]), int32([40, 2]))
    planned(indexer_topk, index.topk_spec(8))(*operands, out=wide[:, 2:10])
    assert torch.equal(wide[:, 2:10], index.topk(operands[:3], *operands[5:], 8)[0])
    assert (wide[:, [0, 1, 10, 11]] == 77).all()


def test_the_test_entry_gives_all_scores_and_the_same_selection() -> None:
    index = Index([100, 20])
    operands = (*index.query(2), index.cache, index.table, int32([0, 1]), int32([100, 20]))
    run = planned(indexer_topk, index.topk_spec(16, return_selected=True))
    every = torch.full((2, 128), 5.0)
    picked, scores, returned = run.return_scores(*operands, all_scores_out=every)
    assert returned is every
    assert all(torch.equal(a, b) for a, b in zip(run(*operands), (picked, scores), strict=True))
    logits = index.logits(operands[:3], *operands[5:])
    for row, count in enumerate([100, 20]):
        assert torch.equal(every[row, :count], logits[row, :count])
        assert (every[row, count:] == 5.0).all()


def test_replicated_keys_are_selected_globally() -> None:
    rows = int32([0]), int32([150])
    alone = Index([150])
    shared = Index([150], dcp=DCP(world=4, rank=2, index="replicated"))
    query = alone.query(1)
    assert torch.equal(alone.topk(query, *rows, 32)[0], shared.topk(query, *rows, 32)[0])


def test_no_rows_are_legal() -> None:
    index = Index([10])
    nothing = int32([])
    picked, scores = index.topk(index.query(0), nothing, nothing, 8, return_selected=True)
    assert picked.shape == scores.shape == (0, 8)
    assert index.logits(index.query(0), nothing, nothing).shape == (0, 128)


def test_rows_cut_into_pieces_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    index = Index([300])
    query, rows = index.query(5), (int32([0] * 5), int32([300, 1, 64, 200, 300]))
    whole = index.topk(query, *rows, 32, return_selected=True)
    monkeypatch.setattr(reference, "SCORES", 400)
    monkeypatch.setattr(reference, "KEYS", 128)
    pieces = index.topk(query, *rows, 32, return_selected=True)
    assert all(torch.equal(a, b) for a, b in zip(whole, pieces, strict=True))


def test_a_million_keys_stay_below_a_gibibyte() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        nbytes = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for value in result if isinstance(result, list | tuple) else (result,):
                if isinstance(value, Tensor):
                    self.nbytes = max(self.nbytes, value.nbytes)
            return result

    tokens = 1 << 20
    index = Index([64])
    index.cache = index.cache[index.table[0, 0].item()].repeat(tokens // 64, 1)
    index.table = torch.arange(tokens // 64, dtype=torch.int32)[None]
    query = index.query(2)
    with Largest() as largest:
        picked, _ = index.topk(query, int32([0, 0]), int32([tokens, tokens - 1]), 2048)
    assert (picked >= 0).all()
    assert largest.nbytes <= index.cache.nbytes  # nothing as large as the cache itself
    assert largest.nbytes < 1 << 30
