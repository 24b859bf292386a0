"""Faults met in the field, on the attention operators. Numbers are the classes of ``docs/faults.md``."""

from __future__ import annotations

import math

import pytest
import torch
from latent_cases import FP8, Latents, flat_keys, int32, plain, queries
from torch import Tensor

from kimi_hal.ops.check import problems
from kimi_hal.ops.operator import get
from kimi_hal.ops.sparse_mla import MergeSpec, StoreLatentSpec
from kimi_hal.ops.spec import DCP
from kimi_hal.parallel import ownership
from kimi_hal.reference import sparse_mla as reference

NAN = float("nan")
INF = float("inf")
F32 = torch.float32


def merge(outs: list[float], lses: list[float], dtype: torch.dtype = F32) -> tuple[float, float]:
    """Merge parts of one row, one head, one channel."""
    spec = MergeSpec(parts=len(outs), num_heads=1, dim=1, return_lse=True)
    shape = (len(outs), 1, 1)
    out, lse = reference.merge_attn_states(
        spec, torch.tensor(outs).view(*shape, 1), torch.tensor(lses).view(shape), dtype=dtype
    )
    return out.item(), lse.item()


def cache_of(
    values: list[float], score: float = 0.0, slots: list[int] | None = None
) -> tuple[Latents, Tensor]:
    """Return a cache whose key i has all of its latent at ``values[i]`` and the logit ``score``, and q."""
    latents = Latents(FP8, k_scale=torch.tensor([1.0]))
    q, kv_c, k_pe = flat_keys(values, score)
    latents.store(torch.tensor(slots or range(len(values))), kv_c, k_pe)
    return latents, q


# --- class 1: softmax over nothing ----------------------------------------------------------------------


def test_fault_01_leading_block_without_keys() -> None:
    latents, q = cache_of([0.0, 1.0, 2.0, 3.0], score=2.0)
    indices = int32([[-1] * 16 + [0, 1, 2, 3] + [-1] * 12])
    out, lse = latents.attend(q, indices, softmax_scale=1.0)
    assert (out == 1.5).all()
    assert lse.item() == pytest.approx(2 + math.log(4))


def test_fault_01_row_without_keys() -> None:
    latents, q = cache_of([1.0])
    out, lse = latents.attend(q, int32([[-1] * 16]))
    assert out.count_nonzero() == 0
    assert lse.item() == -INF


def test_fault_01_row_before_the_pool_is_nan() -> None:
    latents = Latents(FP8, pages=2, page=4, k_scale=torch.tensor([1.0]))
    q, kv_c, k_pe = flat_keys([7.0])
    whole = torch.full((3, 4 * 576), 0x7F, dtype=torch.uint8)
    latents.cache = whole[1:]  # what index −1 would address is NaN
    latents.store(torch.tensor([2]), kv_c, k_pe)
    out, _ = latents.attend(q, int32([[2, -1, -1, -1]]))
    assert (out == 7.0).all()


def test_fault_01_masked_keys_are_no_key_at_slot_0() -> None:
    latents, q = cache_of([448.0, 1.0], slots=[0, 1])
    out, lse = latents.attend(q, int32([[-1] * 32 + [1] * 32]), softmax_scale=1.0)
    assert (out == 1.0).all()
    assert lse.item() == pytest.approx(math.log(32))


def test_fault_01_very_negative_logits_are_no_sentinel() -> None:
    latents, q = cache_of([1.0, 2.0, 3.0], score=-256.0)
    out, lse = latents.attend(q * 256, int32([[-1, 0, 1, 2]]), softmax_scale=1.0)
    assert torch.allclose(out, torch.tensor(2.0), rtol=1e-6)
    assert lse.item() == pytest.approx(-65536 + math.log(3), abs=0.004)  # one float32 step at 65,536


def test_fault_01_queries_that_share_keys() -> None:
    latents, q = cache_of([1.0, 3.0])
    out, lse = latents.attend(q.expand(3, 1, 576), int32([[0, -1], [0, 1], [-1, -1]]))
    assert out[:, 0, 0].tolist() == [1.0, 2.0, 0.0]
    assert lse[:, 0].tolist() == [0.0, pytest.approx(math.log(2)), -INF]


def test_fault_01_duplicates_count_as_often_as_given() -> None:
    latents = Latents("latent.bf16", page=16)
    q, kv_c, k_pe = flat_keys([1.0, 3.0])
    k_pe[1, 0] = 1.0
    latents.store(torch.tensor([5, 9]), kv_c, k_pe)
    scale = math.log(2)  # logits 0 and ln 2
    out, lse = latents.attend(q, int32([[5, 9, 9]]), torch.float64, softmax_scale=scale)
    assert out[0, 0, 0].item() == pytest.approx(2.6)
    assert lse.item() == pytest.approx(math.log(5))


# --- class 2: empty parts -------------------------------------------------------------------------------


@pytest.mark.parametrize("empty", [-INF, INF, NAN])
@pytest.mark.parametrize("garbage", [NAN, INF, 1e30])
def test_fault_02_parts_without_keys_weigh_nothing(empty: float, garbage: float) -> None:
    out, lse = merge([1.0, 3.0, garbage, garbage], [0.0, math.log(3), empty, empty])
    assert out == pytest.approx(2.5)
    assert lse == pytest.approx(math.log(4))


@pytest.mark.parametrize("empty", [-INF, INF, NAN])
def test_fault_02_all_parts_empty(empty: float) -> None:
    assert merge([NAN] * 4, [empty] * 4) == (0.0, -INF)


def test_fault_02_empty_prefix_given_as_plus_infinity() -> None:
    assert merge([0.0, 2.0], [INF, 0.5]) == (2.0, 0.5)


def test_fault_02_empty_with_empty_then_with_a_small_finite_lse() -> None:
    out, lse = merge([NAN, NAN], [-INF, -INF])
    assert (out, lse) == (0.0, -INF)
    assert merge([out, 2.0], [lse, -20000.0]) == (2.0, -20000.0)


def test_fault_02_rank_without_keys_when_the_row_is_shorter_than_the_group() -> None:
    """A row of two keys over four ranks: ranks 2 and 3 have none, and only NaN in their caches."""
    outs, lses = [], []
    for rank in range(4):
        dcp = DCP(world=4, rank=rank)
        latents = Latents(FP8, k_scale=torch.tensor([1.0]))
        q, kv_c, k_pe = flat_keys([4.0, 8.0])
        if rank < 2:
            latents.store(torch.tensor([0]), kv_c[rank : rank + 1], k_pe[rank : rank + 1])
        given = {"block_table": int32([[0, 0]]), "row_req": int32([0])}
        out, lse = latents.attend(q, int32([[0, 1, -1]]), index_space="position", dcp=dcp, **given)
        outs.append(out[0, 0, 0].item())
        lses.append(lse.item())
    assert lses[2:] == [-INF, -INF]
    assert merge(outs, lses) == (6.0, pytest.approx(math.log(2)))


# --- class 3: padding rows ------------------------------------------------------------------------------


def test_fault_03_skipped_slot_does_not_write_the_last_row() -> None:
    latents = Latents(FP8, pages=5, page=16)
    before = latents.cache.clone()
    latents.store(torch.tensor([3]), torch.ones(1, 512), torch.ones(1, 64))
    spec = StoreLatentSpec(latent=FP8, page=16)
    reference.store_latent(
        spec, torch.ones(2, 512), torch.ones(2, 64), torch.tensor([3, -1]), latents.cache, latents.k_scale
    )
    latents.cache[0, 3 * 576 : 4 * 576] = before[0, 3 * 576 : 4 * 576]
    assert latents.cache.equal(before)


def test_fault_03_padded_rows_of_a_captured_graph_are_zero() -> None:
    latents, q = cache_of([5.0])
    rows = q.expand(4, 1, 576).clone()
    rows[2:] = NAN
    out, lse = latents.attend(rows, int32([[0, -1], [0, -1], [-1, -1], [-1, -1]]))
    assert out[:, 0, 0].tolist() == [5.0, 5.0, 0.0, 0.0]
    assert lse[2:].tolist() == [[-INF], [-INF]]


def test_fault_03_slot_0_is_an_ordinary_slot() -> None:
    latents, q = cache_of([5.0], slots=[0])
    assert (latents.attend(q, int32([[0]]))[0] == 5.0).all()


# --- class 4: what stands around the keys ----------------------------------------------------------------


def test_fault_04_nan_in_the_page_tail() -> None:
    """Thirteen tokens in pages of four: slots 13 to 15 are NaN, as are the pages of other requests."""
    latents = Latents(FP8, pages=8, page=4)
    keys, q = latents.fill(torch.arange(13)), queries(1, 2)
    assert latents.keys(torch.tensor([13, 14, 15, 16])).isnan().all()
    given = {"block_table": int32([[0, 1, 2, 3]]), "row_req": int32([0])}
    out, lse = latents.attend(q, int32([list(range(13))]), torch.float64, index_space="local", **given)
    torch.testing.assert_close((out[0], lse[0]), plain(q[0], keys))


def test_fault_04_page_taken_over_from_another_request() -> None:
    """Three of 64 tokens are rewritten; the freed request's bytes stay NaN and stay unread."""
    latents = Latents(FP8, pages=1, page=64)
    keys, q = latents.fill(torch.arange(3)), queries(1, 2)
    out, lse = latents.attend(q, int32([[0, 1, 2] + [-1] * 61]), torch.float64)
    torch.testing.assert_close((out[0], lse[0]), plain(q[0], keys))


def test_fault_04_stale_numbers_behind_index_len() -> None:
    latents = Latents(FP8, pages=4, page=64)
    keys, q = latents.fill(torch.arange(5)), queries(1, 2)
    indices = int32([[0, 1, 2, 3, 4] + [2**30] * 3])
    given = {"block_table": int32([[0, 2**30, -5, 2**30]]), "row_req": int32([0]), "index_len": int32([5])}
    fields = {"index_space": "local", "has_index_len": True}
    out, lse = latents.attend(q, indices, torch.float64, **given, **fields)
    torch.testing.assert_close((out[0], lse[0]), plain(q[0], keys))


def test_fault_04_nan_that_is_selected_does_propagate() -> None:
    latents, q = cache_of([1.0, 2.0])
    latents.cache[0, 576] = 0x7F  # one element of key 1
    out, lse = latents.attend(q, int32([[0, 1]]))
    assert out.isnan().all()
    assert lse.isnan().all()


# --- class 8: offsets beyond 2³¹ are in tests/reference/test_sparse_mla.py -------------------------------


# --- class 11: bases, ownership, interleave -------------------------------------------------------------


def test_fault_11_lse_is_in_natural_log() -> None:
    out, lse = merge([1.0, 3.0], [0.0, math.log(3)])
    assert out == pytest.approx(2.5)
    assert lse == pytest.approx(math.log(4))
    latents, q = cache_of([1.0, 2.0, 3.0, 4.0])
    assert latents.attend(q, int32([[0, 1, 2, 3]]))[1].item() == pytest.approx(math.log(4))


@pytest.mark.parametrize(("bound", "counts"), [(9, [3, 2, 2, 2]), (10, [3, 3, 2, 2])])
def test_fault_11_causal_bound_is_global(bound: int, counts: list[int]) -> None:
    assert [ownership.local_length(bound, DCP(world=4, rank=rank)) for rank in range(4)] == counts


def test_fault_11_interleave_of_four() -> None:
    zero, one = DCP(world=2, rank=0, interleave=4), DCP(world=2, rank=1, interleave=4)
    owned = {
        rank.rank: [p for p in range(16) if ownership.owner(p, rank) == rank.rank] for rank in (zero, one)
    }
    assert owned == {0: [0, 1, 2, 3, 8, 9, 10, 11], 1: [4, 5, 6, 7, 12, 13, 14, 15]}
    assert [ownership.local(p, zero) for p in owned[0]] == list(range(8))
    assert [ownership.local(p, one) for p in owned[1]] == list(range(8))
    assert [ownership.local_length(6, dcp) for dcp in (zero, one)] == [4, 2]
    assert [ownership.local_length(5, dcp) for dcp in (zero, one)] == [4, 1]


def test_fault_11_position_9_stands_in_slot_45() -> None:
    """W = 2, I = 4, pages of 8, one block id 5 for 16 tokens."""
    latents = Latents(FP8, pages=6, page=8)
    spec = latents.spec(1, index_space="position", dcp=DCP(world=2, rank=0, interleave=4))
    slots = reference.physical_slots(
        spec, latents.cache, torch.tensor([[9, 4, 16]]), int32([[5]]), int32([0])
    )
    assert slots.tolist() == [[45, -1, -1]]  # 4 is rank 1's; 16 is beyond the table


@pytest.mark.parametrize("world", [2, 8])
@pytest.mark.parametrize("length", [1, 3, 63, 65, 130, 777])
def test_fault_11_sharded_rows_equal_one_rank_at_every_remainder(world: int, length: int) -> None:
    whole = Latents(FP8, pages=13, page=64)
    generator = torch.Generator().manual_seed(length)
    kv_c, k_pe = torch.randn(length, 512, generator=generator), torch.randn(length, 64, generator=generator)
    whole.store(torch.arange(length), kv_c, k_pe)
    q, positions, numbers = queries(1, 2), torch.randperm(length)[None].int(), torch.arange(length)
    outs, lses = [], []
    for rank in range(world):
        dcp = DCP(world=world, rank=rank)
        mine = numbers[ownership.owner(numbers, dcp) == rank]
        shard = Latents(FP8, pages=13, page=64)
        shard.store(ownership.local(mine, dcp), kv_c[mine], k_pe[mine])
        given = {"block_table": torch.arange(13).int()[None], "row_req": int32([0])}
        out, lse = shard.attend(q, positions, torch.float64, index_space="position", dcp=dcp, **given)
        outs.append(out)
        lses.append(lse)
    spec = MergeSpec(parts=world, num_heads=2, return_lse=True)
    got = reference.merge_attn_states(spec, torch.stack(outs), torch.stack(lses), dtype=torch.float64)
    torch.testing.assert_close(got, whole.attend(q, positions, torch.float64), rtol=1e-12, atol=1e-12)


def test_fault_11_cached_prefix_and_new_tokens_reach_every_rank() -> None:
    """130 tokens, of which 128 came earlier: each rank holds its positions from both stores."""
    generator = torch.Generator().manual_seed(0)
    kv_c, k_pe = torch.randn(130, 512, generator=generator), torch.randn(130, 64, generator=generator)
    for rank in range(4):
        dcp = DCP(world=4, rank=rank, interleave=64)
        shard = Latents(FP8, pages=2, page=64)
        for start, stop in ((0, 128), (128, 130)):
            numbers = torch.arange(start, stop)
            owned = ownership.owner(numbers, dcp) == rank
            slots = torch.where(owned, ownership.local(numbers, dcp), -1)
            spec = StoreLatentSpec(latent=FP8, page=64)
            rows = kv_c[start:stop], k_pe[start:stop]
            reference.store_latent(spec, *rows, slots, shard.cache, shard.k_scale)
        held = ownership.local_length(130, dcp)
        assert held == [64, 64, 2, 0][rank]
        assert shard.keys(torch.arange(held)).isfinite().all()
        assert shard.keys(torch.arange(held, 128)).isnan().all()


# --- class 15: heads per rank ---------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 4, 6, 8, 12, 16, 20, 24, 32, 40, 64, 96, 128])
def test_fault_15_any_number_of_heads(heads: int) -> None:
    latents = Latents()
    keys, q = latents.fill(torch.arange(48)), queries(2, heads)
    out, lse = latents.attend(q, torch.arange(48).int().expand(2, 48), torch.float64)
    for row in range(2):
        torch.testing.assert_close((out[row], lse[row]), plain(q[row], keys))
    assert len(out[0].unique(dim=0)) == heads  # every head has an answer of its own


@pytest.mark.parametrize("q_dtype", ["float8_e4m3fn", "bfloat16"])
def test_fault_15_32_heads_equal_64_with_half_of_them_dropped(q_dtype: str) -> None:
    latents = Latents()
    latents.fill(torch.arange(48))
    given = {} if q_dtype == "bfloat16" else {"q_scale": torch.tensor([0.5]), "q_dtype": q_dtype}
    q, indices = queries(1, 64).to(getattr(torch, q_dtype)), torch.arange(48).int()[None]
    some, all_ = latents.attend(q[:, :32], indices, **given), latents.attend(q, indices, **given)
    torch.testing.assert_close(some, (all_[0][:, :32], all_[1][:, :32]), rtol=1e-6, atol=1e-6)


# --- classes 20 to 22: scales and dialects ---------------------------------------------------------------


def test_fault_20_one_scale_serves_latent_and_shared_part() -> None:
    """|latent| <= 0.1 and |shared| <= 1: with 1/448 as the factor the shared 1.0 comes back as 1.0."""
    latents = Latents(FP8, k_scale=torch.tensor([1 / 448]))
    keys = latents.store(torch.tensor([0]), torch.full((1, 512), 0.1), torch.ones(1, 64))
    factor = torch.tensor(1 / 448, dtype=torch.float32).double()
    assert (keys[0, 512:] == 448 * factor).all()
    assert keys[0, 0].item() == pytest.approx(0.1, rel=2**-4)


def test_fault_20_float32_scales_are_not_cut_to_powers_of_two() -> None:
    latents = Latents("latent.flashmla.656", pages=1, page=4)
    row = torch.zeros(656, dtype=torch.uint8)
    row[:512] = 0x38  # e4m3fn 1.0
    row[512:528] = torch.tensor([0.75, 1.3, 3.0, 0.001]).view(torch.uint8)
    latents.cache[0, :656] = row
    q = torch.zeros(1, 1, 576).bfloat16()
    out, lse = latents.attend(q, int32([[0, 4 + 5]]))  # slot 9 is beyond the four
    assert out[0, 0, ::128].tolist() == pytest.approx([0.75, 1.3, 3.0, 0.001])
    assert lse.item() == 0.0


@pytest.mark.parametrize(("latent", "one"), [(FP8, 1.0), ("latent.fp8.e4m3fnuz.tensor", 0.5)])
def test_fault_22_each_cache_is_read_in_its_own_dialect(latent: str, one: float) -> None:
    latents = Latents(latent, pages=1, page=4, k_scale=torch.tensor([1.0]))
    latents.cache[0, :576] = 0x38
    out, _ = latents.attend(torch.zeros(1, 1, 576).bfloat16(), int32([[0]]))
    assert (out == one).all()


def test_fault_22_small_negatives_are_zero_and_not_nan_in_fnuz() -> None:
    latents = Latents("latent.fp8.e4m3fnuz.tensor", pages=1, page=4, k_scale=torch.tensor([1.0]))
    latents.store(torch.tensor([0]), torch.full((1, 512), -1e-9), torch.full((1, 64), -1e-9))
    assert latents.cache[0, :576].count_nonzero() == 0


# --- class 23: units, dtypes, strides ---------------------------------------------------------------------


def test_fault_23_page_unit_of_the_table() -> None:
    latents = Latents(FP8, pages=10, page=32)
    spec = latents.spec(1, index_space="local")
    where = torch.tensor([[63]])
    slots = reference.physical_slots(spec, latents.cache, where, int32([[7, 3, 9]]), int32([0]))
    assert slots.tolist() == [[127]]


def refused(name: str, spec: object, **operands: object) -> str:
    return "; ".join(problems(get(name), spec, operands))


def test_fault_23_int64_indices_are_refused_not_reinterpreted() -> None:
    latents = Latents()
    reason = refused(
        "sparse_mla",
        latents.spec(1),
        q=queries(1, 1),
        cache=latents.cache,
        indices=torch.tensor([[1, 2, 3, 4]]),
        k_scale=latents.k_scale,
    )
    assert reason == "indices must be int32, got int64"


def test_fault_23_int32_write_slots_are_refused() -> None:
    latents = Latents()
    rows = {"kv_c": torch.ones(4, 512), "k_pe": torch.ones(4, 64)}
    spec = StoreLatentSpec(latent=FP8, page=16)
    reason = refused(
        "store_latent", spec, **rows, slots=int32([1, 2, 3, 4]), cache=latents.cache, k_scale=latents.k_scale
    )
    assert reason == "slots must be int64, got int32"


def test_fault_23_more_slots_than_rows_are_refused() -> None:
    latents = Latents()
    rows = {"kv_c": torch.ones(4, 512), "k_pe": torch.ones(4, 64)}
    spec = StoreLatentSpec(latent=FP8, page=16)
    reason = refused(
        "store_latent", spec, **rows, slots=torch.arange(5), cache=latents.cache, k_scale=latents.k_scale
    )
    assert reason == (
        "kv_c must be [>=T kv_rank] with T=5, got shape [4, 512]; "
        "k_pe must be [>=T pe_dim] with T=5, got shape [4, 64]"
    )


def test_fault_23_columns_of_a_wider_tensor_are_read_by_their_stride() -> None:
    latents, q = cache_of([1.0, 2.0, 4.0])
    wide = int32([[1, 0, 7], [0, 1, 7], [1, 2, 7]])
    given = {"block_table": int32([[3], [0]]), "row_req": wide[:, 0]}
    out, _ = latents.attend(q.expand(3, 1, 576), wide[:, 1:2], index_space="local", **given)
    assert out[[0, 2], 0, 0].tolist() == [1.0, 4.0]
