from __future__ import annotations

from pathlib import Path

import pytest
import torch
from latent_cases import FP8, SCALE, Latents, flat_keys, int32, plain, queries
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kimi_hal import formats
from kimi_hal.ops.sparse_mla import MergeSpec, SparseMLASpec, StoreLatentSpec
from kimi_hal.ops.spec import DCP
from kimi_hal.parallel import ownership
from kimi_hal.reference import sparse_mla as reference


class LargestTensor(TorchDispatchMode):
    """Remembers the bytes of the largest tensor that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, list | tuple) else (result,):
            if isinstance(value, Tensor):
                self.nbytes = max(self.nbytes, value.nbytes)
        return result


# --- sparse_mla -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("latent", formats.names("latent"))
def test_attention_over_selected_keys_of_every_format(latent: str) -> None:
    latents = Latents(latent, pages=4, page=16, padding=64)
    slots = torch.tensor([3, 17, 18, 40, 63, 0])
    keys, q = latents.fill(slots), queries(2, 12)
    chosen = torch.tensor([[4, 0, 5], [1, 1, 3]])
    out, lse = latents.attend(q, slots[chosen].int(), torch.float64)
    for row, picks in enumerate(chosen):
        expected = plain(q[row], keys[picks])
        torch.testing.assert_close((out[row], lse[row]), expected, rtol=1e-12, atol=1e-12)


def test_float32_stays_within_float32_of_the_oracle() -> None:
    latents = Latents(pages=8, page=64)
    slots = torch.arange(512)
    latents.fill(slots)
    q, indices = queries(3, 12), torch.stack([torch.randperm(512)[:384] for _ in range(3)]).int()
    out, lse = latents.attend(q, indices)
    oracle_out, oracle_lse = latents.attend(q, indices, torch.float64)
    assert out.dtype == lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), oracle_out, rtol=0, atol=2e-6 * oracle_out.abs().max().item())
    torch.testing.assert_close(lse.double(), oracle_lse, rtol=1e-6, atol=1e-6)


def test_without_return_lse_the_lse_has_no_columns() -> None:
    latents = Latents()
    latents.fill(torch.tensor([0]))
    out, lse = latents.attend(queries(3, 2), int32([[0]] * 3), return_lse=False)
    assert out.shape == (3, 2, 512)
    assert lse.shape == (3, 0)


@pytest.mark.parametrize("q_dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz])
def test_fp8_queries_are_scaled(q_dtype: torch.dtype) -> None:
    latents = Latents()
    slots = torch.arange(8)
    keys = latents.fill(slots)
    q, q_scale = queries(1, 4).to(q_dtype), torch.tensor([0.25])
    name = str(q_dtype).removeprefix("torch.")
    out, lse = latents.attend(q, slots[None].int(), torch.float64, q_scale=q_scale, q_dtype=name)
    expected = plain(q[0].double() * 0.25, keys)
    torch.testing.assert_close((out[0], lse[0]), expected, rtol=1e-12, atol=1e-12)


def test_the_softmax_scale_of_the_spec_is_used() -> None:
    latents = Latents()
    slots = torch.arange(8)
    keys, q = latents.fill(slots), queries(1, 2)
    out, lse = latents.attend(q, slots[None].int(), torch.float64, softmax_scale=0.25)
    torch.testing.assert_close((out[0], lse[0]), plain(q[0], keys, 0.25), rtol=1e-12, atol=1e-12)


def test_slots_positions_and_local_positions_name_the_same_keys() -> None:
    latents = Latents(pages=5, page=16)
    table = int32([[4, 1, -1], [3, 0, 2]])
    position = torch.tensor([[0, 31, 17], [47, 5, -1]])
    slot = torch.tensor([[64, 31, 17], [47, 53, -1]])
    latents.fill(torch.tensor([64, 31, 17, 47, 53]))
    q, row_req = queries(2, 3), int32([0, 1])
    expected = latents.attend(q, slot.int())
    for space in ("position", "local"):
        got = latents.attend(q, position.int(), index_space=space, block_table=table, row_req=row_req)
        assert got[0].equal(expected[0])
        assert got[1].equal(expected[1])


@pytest.mark.parametrize("interleave", [1, 4, 64])
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_drop_what_they_do_not_own_and_merge_to_the_whole(world: int, interleave: int) -> None:
    length, q = 300, queries(2, 4)
    generator = torch.Generator().manual_seed(3)
    kv_c, k_pe = torch.randn(length, 512, generator=generator), torch.randn(length, 64, generator=generator)
    positions = torch.stack([torch.randperm(length, generator=generator)[:100] for _ in range(2)]).int()
    whole = Latents(pages=5, page=64)
    whole.store(torch.arange(length), kv_c, k_pe)
    expected = whole.attend(q, positions, torch.float64)
    outs, lses = [], []
    for rank in range(world):
        dcp = DCP(world=world, rank=rank, interleave=interleave)
        mine = torch.arange(length)[ownership.owner(torch.arange(length), dcp) == rank]
        shard = Latents(pages=5, page=64)
        shard.store(ownership.local(mine, dcp), kv_c[mine], k_pe[mine])
        operands = {"block_table": int32([[0, 1, 2, 3, 4]]), "row_req": int32([0, 0])}
        out, lse = shard.attend(q, positions, torch.float64, index_space="position", dcp=dcp, **operands)
        outs.append(out)
        lses.append(lse)
    spec = MergeSpec(parts=world, num_heads=4, return_lse=True)
    got = reference.merge_attn_states(spec, torch.stack(outs), torch.stack(lses), dtype=torch.float64)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_index_len_cuts_a_row_and_is_clamped() -> None:
    latents = Latents()
    latents.fill(torch.arange(6))
    q, indices = queries(4, 2), int32([[0, 1, 2, 3]] * 4)
    got = latents.attend(q, indices, index_len=int32([2, 0, -7, 99]), has_index_len=True)
    expected = latents.attend(q, int32([[0, 1, -1, -1], [-1] * 4, [-1] * 4, [0, 1, 2, 3]]))
    assert got[0].equal(expected[0])
    assert got[1].equal(expected[1])


def test_the_order_and_place_of_sentinels_change_no_bit() -> None:
    latents = Latents()
    latents.fill(torch.arange(6))
    q = queries(1, 2)
    apart, together = int32([[-1, 4, -(2**31), -5, 2, -1]]), int32([[4, 2]])
    assert latents.attend(q, apart)[0].equal(latents.attend(q, together)[0])


def test_no_rows_and_no_indices() -> None:
    latents = Latents()
    out, lse = latents.attend(queries(0, 3), int32([]).reshape(0, 4))
    assert (out.shape, lse.shape) == ((0, 3, 512), (0, 3))
    out, lse = latents.attend(queries(2, 3), int32([]).reshape(2, 0))
    assert out.count_nonzero() == 0
    assert (lse == -torch.inf).all()


def test_row_req_of_a_row_without_keys_is_not_read() -> None:
    latents = Latents()
    latents.fill(torch.arange(4))
    table, row_req = int32([[0]]), int32([2**31 - 1, 0])
    out, lse = latents.attend(
        queries(2, 2), int32([[-1, -1], [0, 1]]), index_space="local", block_table=table, row_req=row_req
    )
    assert (lse[0] == -torch.inf).all()
    assert out[1].isfinite().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_query_in_a_row_without_keys_changes_nothing(bad: float) -> None:
    latents = Latents()
    out, lse = latents.attend(torch.full((1, 2, 576), bad).bfloat16(), int32([[-1, -1]]))
    assert out.count_nonzero() == 0
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("piece", [1, 3, 7, 64])
def test_a_row_in_pieces_is_the_row_in_one(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    latents = Latents(pages=4, page=16)
    latents.fill(torch.arange(64))
    q, indices = queries(2, 3), torch.stack([torch.randperm(64)[:50] for _ in range(2)]).int()
    expected = latents.attend(q, indices, torch.float64)
    monkeypatch.setattr(reference, "KEYS", piece)
    monkeypatch.setattr(reference, "INDICES", 1)
    got = latents.attend(q, indices, torch.float64)
    torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-13)


# Logit of each key (the score stands in the shared part), and what the row must give.
EXTREMES = {
    "plus infinity": ([1.0, torch.inf, 2.0], torch.inf, "nan"),
    "minus infinity weighs nothing": ([0.0, -torch.inf, 0.0], 0.6931471805599453, 2.0),
    "only minus infinity": ([-torch.inf, -torch.inf, -torch.inf], -torch.inf, 0.0),
    "NaN": ([1.0, torch.nan, 2.0], torch.nan, "nan"),
    "NaN beside plus infinity": ([torch.inf, torch.nan, 0.0], torch.nan, "nan"),
}


@pytest.mark.parametrize("piece", [1, 2, 3])
@pytest.mark.parametrize("case", EXTREMES)
def test_infinities_and_nan_follow_ieee_in_any_number_of_pieces(
    case: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores, lse, value = EXTREMES[case]
    monkeypatch.setattr(reference, "KEYS", piece)
    latents = Latents("latent.bf16")
    q, kv_c, k_pe = flat_keys([1.0, 2.0, 3.0])
    k_pe[:, 0] = torch.tensor(scores)
    latents.store(torch.arange(3), kv_c, k_pe)
    q[..., 513:] = 0.0
    got_out, got_lse = latents.attend(q, int32([[0, 1, 2]]), torch.float64, softmax_scale=1.0)
    torch.testing.assert_close(got_lse, torch.full((1, 1), lse, dtype=torch.float64), equal_nan=True)
    expected = torch.full((1, 1, 512), torch.nan if value == "nan" else value, dtype=torch.float64)
    torch.testing.assert_close(got_out, expected, equal_nan=True)


def test_bits_of_a_row_depend_on_no_other_row() -> None:
    latents = Latents(pages=16, page=64)
    latents.fill(torch.arange(1024))
    q, indices = queries(40, 12), torch.stack([torch.randperm(1024)[:256] for _ in range(40)]).int()
    out, lse = latents.attend(q, indices)
    for row in (0, 13, 39):
        alone = latents.attend(q[row : row + 1], indices[row : row + 1])
        assert alone[0][0].equal(out[row])
        assert alone[1][0].equal(lse[row])


def test_no_intermediate_grows_with_the_row() -> None:
    latents = Latents(pages=4, page=64)
    latents.fill(torch.arange(256))
    indices = (torch.arange(100_000) % 256).int()[None]
    with LargestTensor() as seen:
        latents.attend(queries(1, 2), indices, torch.float64, topk=1 << 20)
    assert seen.nbytes == reference.KEYS * 576 * 8  # the keys of one piece, whatever k is


def test_no_intermediate_grows_with_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, width = 4096, 2048
    monkeypatch.setattr(reference, "_attend", lambda *_: (torch.zeros(1, 512), torch.zeros(1)))
    indices = torch.zeros(1, 1, dtype=torch.int32).expand(rows, width)
    with LargestTensor() as seen:
        Latents().attend(torch.zeros(1, 1, 576).bfloat16().expand(rows, 1, 576), indices)
    assert seen.nbytes == reference.INDICES * 8  # half of the slots of all rows


@pytest.mark.full
def test_a_row_of_a_million_keys_and_128_heads() -> None:
    latents = Latents(pages=4, page=64)
    keys, q = latents.fill(torch.arange(256)), queries(1, 128)
    indices = (torch.arange(1 << 20) % 256).int()[None]
    with LargestTensor() as seen:
        out, lse = latents.attend(q, indices, torch.float64, topk=1 << 20)
    assert seen.nbytes < 1 << 30
    expected_out, expected_lse = plain(q[0], keys)
    torch.testing.assert_close(out[0], expected_out, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(lse[0], expected_lse + torch.log(torch.tensor(4096.0, dtype=torch.float64)))


def test_strided_operands_give_the_bits_of_contiguous_ones() -> None:
    latents = Latents(pages=4, page=16, padding=192)
    latents.fill(torch.arange(64))
    wide_q, wide_indices = queries(3, 8), torch.randint(0, 64, (3, 40)).int()
    numbers = int32([[1, 9, 9], [0, 9, 9], [1, 9, 9]])
    table = int32([[0, 1, 77, 77], [2, 3, 77, 77]])[:, :2]
    q, indices, row_req = wide_q[:, 2:5], wide_indices[:, :20] % 32, numbers[:, 0]
    expected = latents.attend(
        q.clone(), indices.clone(), index_space="local", block_table=table.clone(), row_req=row_req.clone()
    )
    got = latents.attend(q, wide_indices.remainder_(32)[:, :20], index_space="local", block_table=table,
                         row_req=row_req)  # fmt: skip
    assert got[0].equal(expected[0])
    assert got[1].equal(expected[1])


def sparse_file(path: Path, nbytes: int) -> Tensor:
    """Map a file that takes no disk until it is written."""
    path.touch()
    with path.open("r+b") as file:
        file.truncate(nbytes)
    return torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8)


def test_a_cache_beyond_two_to_the_31_bytes(tmp_path: Path) -> None:
    page_bytes = 64 * 576
    pages = (1 << 31) // page_bytes + 100
    latents = Latents(FP8, pages=1, page=64)
    latents.cache = sparse_file(tmp_path / "cache", pages * page_bytes).view(pages, page_bytes)
    low, high = 5, (pages - 1) * 64 + 63
    assert high * 576 > 2**31
    keys, q = latents.fill(torch.tensor([high, low])), queries(1, 2)
    assert latents.cache[-1, -576:].count_nonzero() > 500  # the bytes went where they belong
    out, lse = latents.attend(q, int32([[high, low]]), torch.float64)
    torch.testing.assert_close((out[0], lse[0]), plain(q[0], keys))
    by_table = latents.attend(
        q,
        int32([[63, 64 + 5]]),
        torch.float64,
        index_space="position",
        block_table=int32([[pages - 1, 0]]),
        row_req=int32([0]),
    )
    assert by_table[0].equal(out)


# --- store_latent ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("latent", formats.names("latent"))
def test_a_store_changes_the_named_slots_and_no_other_byte(latent: str) -> None:
    latents = Latents(latent, pages=5, page=16, padding=32)
    pool = latents.cache._base
    before = pool.clone()
    latents.fill(torch.tensor([3, 0, 79]))
    row = formats.latent(latent).row_bytes
    touched = torch.zeros_like(pool, dtype=torch.bool)
    for slot in (3, 0, 79):
        touched[slot // 16, slot % 16 * row : (slot % 16 + 1) * row] = True
    assert pool[~touched].equal(before[~touched])
    assert latents.keys(torch.tensor([0, 3, 79])).isfinite().all()


def test_rows_beyond_the_slots_are_ignored() -> None:
    some, all_ = Latents(), Latents()
    kv_c, k_pe = torch.randn(8, 512), torch.randn(8, 64)
    some.store(torch.tensor([4, 2]), kv_c, k_pe)
    all_.store(torch.tensor([4, 2]), kv_c[:2], k_pe[:2])
    assert some.cache.equal(all_.cache)


def test_a_slot_beyond_the_cache_writes_nothing() -> None:
    latents = Latents(pages=2, page=4)
    before = latents.cache.clone()
    spec = StoreLatentSpec(latent=latents.name, page=4)
    slots = torch.tensor([8, 2**62, -1, -(2**62)])
    reference.store_latent(spec, torch.ones(4, 512), torch.ones(4, 64), slots, latents.cache, latents.k_scale)
    assert latents.cache.equal(before)


def test_bf16_and_float32_inputs_of_one_value_give_the_same_bytes() -> None:
    one, other = Latents(), Latents()
    kv_c, k_pe, slots = torch.randn(4, 512).bfloat16(), torch.randn(4, 64).bfloat16(), torch.arange(4)
    one.store(slots, kv_c, k_pe)
    other.store(slots, kv_c.float(), k_pe.float())
    assert one.cache.equal(other.cache)


def test_a_store_in_pieces_is_the_store_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = Latents(), Latents()
    kv_c, k_pe, slots = torch.randn(9, 512), torch.randn(9, 64), torch.tensor([5, -1, 7, 9, 0, 63, 99, 2, 1])
    spec = StoreLatentSpec(latent=FP8, page=16)
    reference.store_latent(spec, kv_c, k_pe, slots, one.cache, one.k_scale)
    monkeypatch.setattr(reference, "TOKENS", 2)
    reference.store_latent(spec, kv_c, k_pe, slots, other.cache, other.k_scale)
    assert one.cache.equal(other.cache)


# --- merge_attn_states ----------------------------------------------------------------------------------


def merged(outs: Tensor, lses: Tensor, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    spec = MergeSpec(parts=outs.shape[0], num_heads=outs.shape[2], dim=outs.shape[3], return_lse=True)
    return reference.merge_attn_states(spec, outs, lses, dtype=dtype)


@pytest.mark.parametrize("parts", [1, 2, 3, 8, 64])
def test_merged_parts_are_attention_over_their_union(parts: int) -> None:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(parts * 5, 576, generator=generator, dtype=torch.float64)
    q = queries(1, 3)
    pieces = [plain(q[0], piece) for piece in keys.chunk(parts)]
    outs, lses = torch.stack([o for o, _ in pieces])[:, None], torch.stack([s for _, s in pieces])[:, None]
    out, lse = merged(outs, lses)
    torch.testing.assert_close((out[0], lse[0]), plain(q[0], keys), rtol=1e-12, atol=1e-12)


def test_one_part_comes_back_as_it_is() -> None:
    outs, lses = torch.randn(1, 2, 3, 8), 1e4 * torch.randn(1, 2, 3)
    out, lse = merged(outs, lses, torch.float32)
    assert out.equal(outs[0])
    assert lse.equal(lses[0])


@pytest.mark.parametrize("parts", [2, 3, 8, 13])
def test_bits_of_a_merged_row_depend_on_no_other_row(parts: int) -> None:
    outs, lses = torch.randn(parts, 37, 3, 24), 3 * torch.randn(parts, 37, 3)
    out, lse = merged(outs, lses, torch.float32)
    for row in (0, 8, 36):
        alone = merged(outs[:, row : row + 1], lses[:, row : row + 1], torch.float32)
        assert alone[0][0].equal(out[row])
        assert alone[1][0].equal(lse[row])


def test_a_merge_in_pieces_is_the_merge_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    outs, lses = torch.randn(3, 7, 2, 16), torch.randn(3, 7, 2)
    expected = merged(outs, lses)
    monkeypatch.setattr(reference, "ELEMENTS", 1)
    got = merged(outs, lses)
    assert got[0].equal(expected[0])
    assert got[1].equal(expected[1])


def test_finite_lse_with_a_nan_output_propagates_even_at_weight_zero() -> None:
    outs = torch.tensor([1.0, torch.nan]).reshape(2, 1, 1, 1)
    out, lse = merged(outs, torch.tensor([0.0, -1e6]).reshape(2, 1, 1))
    assert out.isnan().all()
    assert lse.item() == 0.0


def test_without_return_lse_the_merged_lse_has_no_columns() -> None:
    spec = MergeSpec(parts=2, num_heads=1, dim=4)
    out, lse = reference.merge_attn_states(spec, torch.ones(2, 3, 1, 4), torch.zeros(2, 3, 1))
    assert out.equal(torch.ones(3, 1, 4))
    assert lse.shape == (3, 0)


def test_scale_constant_is_the_models() -> None:
    assert SparseMLASpec(num_heads=1, latent=FP8).softmax_scale == SCALE
