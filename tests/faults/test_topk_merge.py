"""Faults met in the field, on selection and its merge. Numbers are the classes of ``docs/faults.md``."""

from __future__ import annotations

import math

import pytest
import torch
from index_cases import filled, int32, planned
from merge_cases import PROTOCOLS, merge
from torch import Tensor

from kimi_hal.errors import GroupError
from kimi_hal.ops import topk_merge, topk_select
from kimi_hal.ops.check import problems
from kimi_hal.ops.spec import DCP
from kimi_hal.ops.topk_merge import TopKMergeSpec, TopKSpec
from kimi_hal.parallel.groups import Faults, LoopbackGroup, agree
from kimi_hal.reference import selection

NAN, INF = math.nan, math.inf


def select(scores: Tensor, lengths: list[int], k: int, start: list[int] | None = None) -> list[list[int]]:
    spec = TopKSpec(topk=k, has_row_start=start is not None)
    row_start = None if start is None else int32(start)
    picked: Tensor = planned(topk_select, spec)(scores, int32(lengths), row_start)[0]
    return picked.tolist()


def union(scores: list[float], length: int, k: int, world: int, protocol: str, **fields: int) -> list[int]:
    """Merge one row of bfloat16 scores over ranks and return the winners of all."""
    row = torch.tensor([scores]).bfloat16()
    return merge(row, int32([length]), k, world, protocol=protocol, **fields).union(k)[0].tolist()


# --- class 2: ranks without keys ------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_fault_02_ranks_without_keys_have_no_winners(protocol: str) -> None:
    merged = merge(torch.zeros(1, 2).bfloat16(), int32([2]), 4, 4, protocol=protocol)
    assert [local[0].tolist() for local in merged.local] == [[0, -1, -1, -1]] * 2 + [[-1] * 4] * 2
    assert [count.item() for count in merged.counts] == [1, 1, 0, 0]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_fault_02_no_rank_has_keys(protocol: str) -> None:
    merged = merge(torch.zeros(2, 2).bfloat16(), int32([0, -1]), 4, 4, protocol=protocol)
    assert all((local == -1).all() for local in merged.local)
    assert all((count == 0).all() for count in merged.counts)


# --- class 3: padding rows ------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_fault_03_padding_rows_leave_the_others_alone(protocol: str) -> None:
    scores = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    merged = merge(scores, int32([64, 0, 33, -1]), 8, 2, protocol=protocol)
    alone = merge(scores[[0, 2]], int32([64, 33]), 8, 2, protocol=protocol)
    assert torch.equal(merged.union(8)[[0, 2]], alone.union(8))
    assert (merged.union(8)[[1, 3]] == -1).all()


# --- class 4: stale tails -------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [1e30, NAN, INF])
def test_fault_04_scores_behind_the_length_are_not_read(poison: float) -> None:
    scores = torch.full((1, 4096), poison)
    scores[0, :100] = torch.randn(100)
    assert select(scores, [100], 2048) == [filled(range(100), 2048)]


def test_fault_04_scores_around_a_window_are_not_read() -> None:
    scores = torch.full((1, 64), INF)
    scores[0, 20:30] = -torch.arange(10.0)
    assert select(scores, [10], 4, [20]) == [[0, 1, 2, 3]]


def test_fault_04_scores_beside_padding_are_not_read() -> None:
    spec = TopKMergeSpec(dcp=DCP(), topk=4)
    scores, index = torch.tensor([[NAN, 1.0, INF, 0.0]]), int32([[-1, 5, -1, 3]])
    assert planned(topk_merge, spec)(scores, index, int32([8]))[0].tolist() == [[3, 5, -1, -1]]


# --- class 5: ties --------------------------------------------------------------------------------------


def test_fault_05_ties_across_the_cut() -> None:
    scores = torch.zeros(1, 8320)
    winners = torch.randperm(8320, generator=torch.Generator().manual_seed(1))[:100].tolist()
    scores[0, winners] = torch.arange(1.0, 101.0)
    others = [p for p in range(8320) if p not in set(winners)][:1948]
    assert select(scores, [8320], 2048) == [sorted(winners + others)]


def test_fault_05_infinite_winners_among_ties() -> None:
    scores = torch.zeros(1, 8320)
    scores[0, [5000, 6000, 8319]] = INF
    assert select(scores, [8320], 2048) == [[*range(2045), 5000, 6000, 8319]]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_fault_05_ranks_agree_on_ties(protocol: str) -> None:
    for seed in range(5):
        merged = merge(
            torch.full((1, 64), 0.5).bfloat16(),
            int32([64]),
            16,
            4,
            protocol=protocol,
            faults=Faults(reorder=seed),
        )
        assert [local[0].tolist() for local in merged.local] == [filled(range(4), 16)] * 4
        assert merged.union(16)[0].tolist() == list(range(16))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_fault_05_ties_favour_the_position_and_not_the_rank(protocol: str) -> None:
    # At interleave 4, positions 4 to 7 are rank 1's: they win before rank 0's 8 to 11.
    merged = merge(torch.zeros(1, 16).bfloat16(), int32([16]), 6, 2, 4, protocol=protocol)
    assert merged.union(6)[0].tolist() == [0, 1, 2, 3, 4, 5]
    assert [count.item() for count in merged.counts] == [4, 2]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_fault_05_one_ranks_ties_fill_the_cut(protocol: str) -> None:
    # All winners belong to one rank: more than the quota of compact, ties on both sides of its end.
    scores = [1.0 if p % 4 == 2 else 0.0 for p in range(256)]
    assert union(scores, 256, 32, 4, protocol) == [4 * j + 2 for j in range(32)]


# --- class 6: clustered, distinct scores ----------------------------------------------------------------


def clustered() -> tuple[Tensor, list[int]]:
    steps = torch.randperm(8192, generator=torch.Generator().manual_seed(2))
    return 1.0 + steps[None].float() * 2**-23, (steps >= 6144).nonzero().flatten().tolist()


def test_fault_06_scores_that_share_their_upper_bits() -> None:
    scores, expected = clustered()
    assert select(scores, [8192], 2048) == [expected]


def test_fault_06_a_short_row_after_a_full_one() -> None:
    scores, expected = clustered()
    both = scores.repeat(2, 1)
    assert select(both, [8192, 3], 2048) == [expected, filled(range(3), 2048)]


@pytest.mark.parametrize("protocol", ["full", "scores_only"])
def test_fault_06_clustered_scores_over_ranks(protocol: str) -> None:
    scores, expected = clustered()
    assert merge(scores, int32([8192]), 2048, 8, protocol=protocol).union(2048)[0].tolist() == expected


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_fault_06_bfloat16_makes_them_one_tie_at_any_world(protocol: str) -> None:
    scores, _ = clustered()
    short = scores.bfloat16()
    assert torch.equal(short.unique(), torch.tensor([1.0]).bfloat16())
    for world in (1, 2, 8):
        assert merge(short, int32([8192]), 2048, world, protocol=protocol).union(2048)[0].tolist() == list(
            range(2048)
        )


def test_fault_06_a_million_scores() -> None:
    scores = torch.randn(2, 1 << 20, generator=torch.Generator().manual_seed(3))
    picked = torch.tensor(select(scores, [1 << 20] * 2, 2048))
    chosen = scores.gather(1, picked).sort(dim=1, descending=True).values
    assert torch.equal(chosen, scores.topk(2048, dim=1).values)


# --- class 7: lengths around k, windows -----------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 2047, 2048, 2049])
def test_fault_07_lengths_around_k(length: int) -> None:
    scores = -torch.arange(2049.0)[None]
    assert select(scores, [length], 2048) == [filled(range(min(length, 2048)), 2048)]


def test_fault_07_a_window_is_clamped_to_its_row() -> None:
    assert select(torch.arange(10.0)[None], [9], 4, [7]) == [[0, 1, 2, -1]]


def test_fault_07_a_negative_length_is_zero() -> None:
    assert select(torch.arange(10.0)[None], [-1], 4) == [[-1] * 4]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("length", [0, 1, 15, 16, 17])
def test_fault_07_lengths_around_k_over_ranks(length: int, protocol: str) -> None:
    scores = [float(p % 5) for p in range(17)]
    expected = selection.select_positions(torch.tensor([scores]), torch.tensor([length]), 16)[0].tolist()
    assert union(scores, length, 16, 3, protocol) == expected


# --- class 8: positions that need more than 24 bits -----------------------------------------------------


def test_fault_08_positions_beyond_what_float32_counts() -> None:
    # Two candidates that are one apart beyond 2^24: an id sent as float32 would make them equal.
    base = 1 << 25

    def one_rank(group: LoopbackGroup) -> tuple[list[int], list[int]]:
        spec = TopKMergeSpec(dcp=DCP(world=2, rank=group.rank()), topk=2)
        index = int32([[base, -1]])
        local, _, everyones = planned(topk_merge, spec, group=group)(
            torch.tensor([[1.0, -INF]]), index, int32([(1 << 31) - 1])
        )
        return local[0].tolist(), everyones[0].tolist()

    assert LoopbackGroup.run(2, one_rank) == [([base, -1], [2 * base, 2 * base + 1])] * 2


@pytest.mark.parametrize("protocol", ["compact"])
def test_fault_08_compact_is_exact_beyond_its_header(protocol: str) -> None:
    tokens = (1 << 20) + 70_000
    scores = torch.zeros(1, tokens).bfloat16()
    scores[0, -3:] = 1.0
    expected = [0, *range(tokens - 3, tokens)]
    assert merge(scores, int32([tokens]), 4, 2, protocol=protocol).union(4)[0].tolist() == expected


# --- class 11: interleave; two roles that differ --------------------------------------------------------


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_fault_11_winners_stand_where_the_interleave_says(protocol: str) -> None:
    scores = torch.zeros(1, 16).bfloat16()
    scores[0, [3, 4, 9, 14]] = 1.0  # owners 0, 1, 0, 1 at interleave 4
    merged = merge(scores, int32([16]), 4, 2, 4, protocol=protocol)
    assert [local[0].tolist() for local in merged.local] == [[3, 5, -1, -1], [0, 6, -1, -1]]


def test_fault_11_ranks_with_different_interleaves_are_found() -> None:
    def one_rank(group: LoopbackGroup) -> str:
        dcp = DCP(world=2, rank=0, interleave=64 if group.rank() else 1)
        with pytest.raises(GroupError) as caught:
            agree(group, f"interleave {dcp.interleave}")
        return str(caught.value)

    expected = "ranks do not agree: rank 0 'interleave 1'; rank 1 'interleave 64'"
    assert LoopbackGroup.run(2, one_rank) == [expected] * 2


# --- class 14: sizes that are no power of two -----------------------------------------------------------


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("world", [3, 5, 7])
def test_fault_14_worlds_and_k_that_are_no_power_of_two(world: int, protocol: str) -> None:
    scores = [float((7 * p) % 13) for p in range(101)]
    expected = selection.select_positions(torch.tensor([scores]), torch.tensor([101]), 37)[0].tolist()
    assert union(scores, 101, 37, world, protocol) == expected


def test_fault_14_a_row_of_384_has_no_column_384() -> None:
    scores = torch.full((1, 512), INF)
    scores[0, :384] = -INF
    assert max(select(scores, [384], 400)[0]) == 383


# --- class 17: rows beyond one block --------------------------------------------------------------------


@pytest.mark.parametrize("rows", [17, 65, 257])
def test_fault_17_rows_beyond_one_block(rows: int) -> None:
    scores = torch.arange(100.0).expand(rows, -1)
    assert select(scores, [100] * rows, 3) == [[97, 98, 99]] * rows


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_fault_17_a_merged_row_is_the_same_wherever_it_stands(protocol: str) -> None:
    scores = torch.randn(64, 90, generator=torch.Generator().manual_seed(4)).bfloat16()
    scores[[0, 43, 63]] = scores[5].clone()
    merged = merge(scores, int32([90] * 64), 16, 3, protocol=protocol).union(16)
    assert (merged[[0, 43, 63]] == merged[5]).all()


# --- class 19: NaN, infinities and zeros ----------------------------------------------------------------


def row_of_16() -> list[float]:
    row = [float(i) for i in range(16)]
    row[3], row[9] = NAN, -NAN
    return row


def test_fault_19_nan_is_chosen_last() -> None:
    assert select(torch.tensor([row_of_16()]), [16], 4) == [[12, 13, 14, 15]]
    assert select(torch.tensor([row_of_16()]), [16], 15) == [[p for p in range(16) if p != 9]]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_fault_19_nan_is_chosen_last_on_any_number_of_ranks(world: int, protocol: str) -> None:
    assert union(row_of_16(), 16, 4, world, protocol) == [12, 13, 14, 15]
    assert union(row_of_16(), 16, 15, world, protocol) == [p for p in range(16) if p != 9]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("value", [NAN, INF, -INF, -0.0])
def test_fault_19_rows_of_one_odd_value(value: float, protocol: str) -> None:
    assert union([value] * 40, 40, 8, 4, protocol) == list(range(8))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_fault_19_keys_of_minus_infinity_are_not_padding(protocol: str) -> None:
    assert union([-INF, NAN, -INF, 1.0, -INF], 5, 8, 2, protocol) == [0, 1, 2, 3, 4, -1, -1, -1]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_fault_19_zeros_of_both_signs_tie_over_ranks(protocol: str) -> None:
    assert union([-0.0, 0.0] * 8, 16, 5, 2, protocol) == [0, 1, 2, 3, 4]


# --- class 23: index dtype, strides ---------------------------------------------------------------------


def test_fault_23_index_dtypes_are_not_reinterpreted() -> None:
    given = {
        "scores": torch.zeros(1, 4),
        "indices": torch.tensor([[1, 2, 3, 4]]),
        "row_len": torch.tensor([9]),
    }
    assert problems(topk_merge, TopKMergeSpec(dcp=DCP(), topk=4), given) == [
        "indices must be int32, got int64",
        "row_len must be int32, got int64",
    ]


def test_fault_23_columns_of_a_wider_tensor_are_honoured() -> None:
    metadata = int32([[9, 3, 7], [9, 5, 7], [9, 0, 7]])
    scores = torch.full((3, 40), INF)
    scores[:, 8:16] = torch.arange(8.0)
    picked = planned(topk_select, TopKSpec(topk=2))(scores[:, 8:16], metadata[:, 1])[0]
    assert picked.tolist() == [[1, 2], [3, 4], [-1, -1]]


# --- class 24: messages of several sizes, late ranks ----------------------------------------------------


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_fault_24_one_group_merges_batches_of_changing_size(protocol: str) -> None:
    batches = [
        torch.randn(rows, 60, generator=torch.Generator().manual_seed(rows)).bfloat16()
        for rows in (1, 9, 1, 9)
    ]

    def one_rank(group: LoopbackGroup) -> list[Tensor]:
        dcp = DCP(world=2, rank=group.rank())
        select_spec = TopKSpec(
            topk=8, score="bfloat16", scores_dtype="bfloat16", return_selected=True, dcp=dcp
        )
        spec = TopKMergeSpec(
            dcp=dcp, topk=8, score="bfloat16", protocol=protocol, return_global=protocol != "scores_only"
        )
        select_run, merge_run = planned(topk_select, select_spec), planned(topk_merge, spec, group=group)
        done = []
        for scores in batches:
            lengths = torch.full((len(scores),), 60, dtype=torch.int32)
            index, chosen = select_run(scores[:, group.rank() :: 2].contiguous(), lengths)
            local = merge_run(chosen, index, lengths)[0].long()
            done.append(torch.where(local >= 0, 2 * local + group.rank(), -1))
        return done

    ranks = LoopbackGroup.run(2, one_rank, faults=Faults(late={1: 0.01}))
    for scores, *parts in zip(batches, *ranks, strict=True):
        expected = selection.select_positions(scores, torch.full((len(scores),), 60), 8)
        assert torch.equal(selection.ascending(torch.cat(parts, dim=1))[:, :8], expected)
