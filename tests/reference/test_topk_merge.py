from __future__ import annotations

import math

import pytest
import torch
from index_cases import filled, int32, planned
from merge_cases import PROTOCOLS, merge, share, tied_rows
from torch import Tensor

from kimi_hal.errors import GroupError
from kimi_hal.ops import topk_merge, topk_select
from kimi_hal.ops.spec import DCP
from kimi_hal.ops.topk_merge import TopKMergeSpec, TopKSpec
from kimi_hal.parallel import candidates
from kimi_hal.parallel.groups import Faults, LoopbackGroup
from kimi_hal.reference import protocols, selection
from kimi_hal.reference import topk_merge as reference

NAN, INF = math.nan, math.inf


# --- topk_select ----------------------------------------------------------------------------------------


def select(scores: Tensor, row_len: list[int], k: int, start: list[int] | None = None, **fields: object):
    dtype = str(scores.dtype).removeprefix("torch.")
    spec = TopKSpec(topk=k, scores_dtype=dtype, has_row_start=start is not None, **fields)
    row_start = None if start is None else int32(start)
    return planned(topk_select, spec)(scores, int32(row_len), row_start)


def test_selected_scores_stand_beside_their_positions() -> None:
    index, chosen = select(torch.tensor([[1.0, NAN, 3.0]]), [3], 4, return_selected=True)
    assert index.tolist() == [[0, 1, 2, -1]]
    assert chosen[0, [0, 2, 3]].tolist() == [1.0, 3.0, -INF]
    assert chosen[0, 1].isnan()


def test_bfloat16_selection_rounds_float32_scores() -> None:
    scores = torch.tensor([[1.0, 1.0 + 2**-10, 0.5]])
    index, chosen = select(scores, [3], 1, score="bfloat16", return_selected=True)
    assert index.tolist() == [[0]]
    assert chosen.dtype == torch.bfloat16


def test_bfloat16_scores_may_be_selected_as_float32() -> None:
    index, chosen = select(torch.tensor([[1.0, 2.0]]).bfloat16(), [2], 1, return_selected=True)
    assert index.tolist() == [[1]]
    assert chosen.dtype == torch.float32


def test_without_return_selected_there_are_no_scores() -> None:
    assert select(torch.zeros(2, 3), [3, 3], 2)[1].shape == (2, 0)


def test_under_dcp_the_length_is_the_ranks_share() -> None:
    scores = torch.arange(8.0)[None]
    dcp = DCP(world=2, rank=1, interleave=4)
    assert select(scores, [10], 8, dcp=dcp)[0].tolist() == [filled([0, 1, 2, 3], 8)]
    assert select(scores, [6], 8, dcp=dcp)[0].tolist() == [filled([0, 1], 8)]


def test_replicated_scores_are_all_keys() -> None:
    dcp = DCP(world=2, rank=1, interleave=4, index="replicated")
    assert select(torch.arange(8.0)[None], [6], 8, dcp=dcp)[0].tolist() == [filled(range(6), 8)]


def test_a_start_beyond_the_row_leaves_no_keys() -> None:
    assert select(torch.zeros(2, 4), [3, 3], 2, start=[4, 9])[0].tolist() == [[-1, -1], [-1, -1]]


# --- topk_merge: one rank -------------------------------------------------------------------------------


def alone(scores: list[float], index: list[int], length: int, **fields: object):
    spec = TopKMergeSpec(dcp=fields.pop("dcp", DCP()), topk=len(index), **fields)
    return planned(topk_merge, spec)(torch.tensor([scores]), int32([index]), int32([length]))


def test_one_rank_orders_and_compacts_what_it_has() -> None:
    local, count, everyones = alone([1.0, -INF, 2.0, 0.0], [7, -1, 3, 5], 8)
    assert local.tolist() == everyones.tolist() == [[3, 5, 7, -1]]
    assert count.tolist() == [3]


def test_one_rank_may_ask_for_any_protocol() -> None:
    local, count, everyones = alone([1.0, 2.0], [4, 0], 8, protocol="scores_only", return_global=False)
    assert (local.tolist(), count.tolist(), everyones.shape) == ([[0, 4]], [2], (1, 0))


def test_an_index_beyond_the_length_is_no_candidate() -> None:
    local, count, _ = alone([1.0, 2.0, 3.0], [2, 8, 1 << 30], 8)
    assert (local.tolist(), count.tolist()) == ([[2, -1, -1]], [1])


def test_replicated_candidates_are_parted_by_owner_without_a_message() -> None:
    dcp = DCP(world=2, rank=1, interleave=2, index="replicated")
    local, count, everyones = alone([0.0] * 4, [0, 3, 6, 9], 10, dcp=dcp)
    assert everyones.tolist() == [[0, 3, 6, 9]]
    assert (local.tolist(), count.tolist()) == ([[1, 2, -1, -1]], [2])


@pytest.mark.parametrize("length", [-1, 0])
def test_a_padded_row_has_no_winners(length: int) -> None:
    local, count, everyones = alone([1.0, 2.0], [0, 1], length)
    assert local.tolist() == everyones.tolist() == [[-1, -1]]
    assert count.tolist() == [0]


def test_several_ranks_need_a_group() -> None:
    with pytest.raises(GroupError, match=r"^dcp.world=2 needs a group: hal.plan\(…, group=TorchGroup"):
        alone([1.0], [0], 1, dcp=DCP(world=2))


def test_another_group_than_the_specs_is_refused() -> None:
    spec = TopKMergeSpec(dcp=DCP(world=2, rank=0), topk=1)

    def one_rank(group: LoopbackGroup) -> str:
        if group.rank() == 0:
            return ""
        with pytest.raises(GroupError) as caught:
            reference.topk_merge(spec, torch.zeros(1, 1), int32([[0]]), int32([1]), group=group)
        return str(caught.value)

    assert LoopbackGroup.run(2, one_rank)[1] == "the Spec is rank 0 of 2, the group is rank 1 of 2"


# --- topk_merge: several ranks --------------------------------------------------------------------------

#: Rows by world: together more than 20,000, each merged under every protocol and interleave.
ROWS = {2: 700, 3: 600, 4: 600, 8: 400, 32: 60}


@pytest.mark.parametrize("interleave", [1, 4, 64])
@pytest.mark.parametrize("world", ROWS)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_union_is_the_selection_of_one_rank(protocol: str, world: int, interleave: int) -> None:
    k, width = 32, 300
    scores, lengths = tied_rows(ROWS[world], width, seed=world * interleave)
    expected = selection.select_positions(scores, lengths, k)
    merged = merge(scores, lengths, k, world, interleave, protocol=protocol)
    assert torch.equal(merged.union(k), expected)
    for local, count in zip(merged.local, merged.counts, strict=True):
        assert torch.equal(local.long(), selection.ascending(local.long()))
        assert torch.equal((local >= 0).sum(1), count.long())
    if protocol != "scores_only":
        assert all(torch.equal(everyones.long(), expected) for everyones in merged.everyones)


@pytest.mark.full
@pytest.mark.parametrize("interleave", [1, 4, 64])
@pytest.mark.parametrize("world", ROWS)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_twenty_thousand_more_rows_for_each_world(protocol: str, world: int, interleave: int) -> None:
    k, width = 48, 700
    scores, lengths = tied_rows(20000 // (3 * 3), width, seed=7 + world * interleave)
    merged = merge(scores, lengths, k, world, interleave, protocol=protocol)
    assert torch.equal(merged.union(k), selection.select_positions(scores, lengths, k))


@pytest.mark.parametrize("protocol", ["full", "scores_only"])
def test_float32_scores_are_merged_in_all_their_bits(protocol: str) -> None:
    scores = 1.0 + torch.randperm(512)[None].float() * 2**-23
    merged = merge(scores, int32([512]), 64, 4, protocol=protocol)
    assert torch.equal(merged.union(64), (scores[0] >= 1.0 + 448 * 2**-23).nonzero().T)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_quota_of_one_is_still_exact(protocol: str) -> None:
    scores, lengths = tied_rows(60, 90, seed=3)
    fields = {"quota": 1} if protocol == "compact" else {}
    merged = merge(scores, lengths, 8, 4, protocol=protocol, **fields)
    assert torch.equal(merged.union(8), selection.select_positions(scores, lengths, 8))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_order_of_arrival_does_not_matter(protocol: str) -> None:
    scores, lengths = tied_rows(30, 90, seed=4)
    runs = [
        merge(scores, lengths, 16, 3, protocol=protocol, faults=Faults(reorder=seed)) for seed in range(3)
    ]
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run.local, runs[0].local, strict=True))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_rows_cut_into_several_messages_give_the_same(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scores, lengths = tied_rows(30, 90, seed=5)
    monkeypatch.setattr(reference, "AT_ONCE", 3 * 16 * 4)
    merged = merge(scores, lengths, 16, 3, protocol=protocol)
    assert torch.equal(merged.union(16), selection.select_positions(scores, lengths, 16))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_no_rows_send_nothing(protocol: str) -> None:
    merged = merge(torch.zeros(0, 8).bfloat16(), int32([]), 4, 2, protocol=protocol)
    assert [local.shape for local in merged.local] == [(0, 4), (0, 4)]
    assert merged.sent == [0, 0]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_candidates_need_not_stand_in_order(protocol: str) -> None:
    scores = [torch.tensor([[-INF, 1.0, 3.0]]).bfloat16(), torch.tensor([[2.0, -INF, 1.0]]).bfloat16()]
    indices = [int32([[-1, 4, 1]]), int32([[3, -1, 0]])]

    def one_rank(group: LoopbackGroup) -> list[int]:
        dcp = DCP(world=2, rank=group.rank())
        spec = TopKMergeSpec(
            dcp=dcp, topk=3, score="bfloat16", protocol=protocol, return_global=protocol != "scores_only"
        )
        r = group.rank()
        return reference.topk_merge(spec, scores[r], indices[r], int32([10]), group=group)[0][0].tolist()

    assert LoopbackGroup.run(2, one_rank) == [[1, -1, -1], [0, 3, -1]]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_clamped_shard_counts_by_its_candidates(protocol: str) -> None:
    # Rank 0's table was too short: it selected 1 of the 4 keys that row_len gives it.
    def one_rank(group: LoopbackGroup) -> list[int]:
        r = group.rank()
        spec = TopKMergeSpec(
            dcp=DCP(world=2, rank=r),
            topk=4,
            score="bfloat16",
            protocol=protocol,
            return_global=protocol != "scores_only",
        )
        index = int32([[0, -1, -1, -1]]) if r == 0 else int32([[0, 1, 2, 3]])
        scores = torch.where(index >= 0, -INF, -INF).bfloat16()
        return reference.topk_merge(spec, scores, index, int32([8]), group=group)[0][0].tolist()

    assert LoopbackGroup.run(2, one_rank) == [[0, -1, -1, -1], [0, 1, 2, -1]]


# --- what is sent ---------------------------------------------------------------------------------------


def spread(k: int, world: int, rows: int = 4) -> tuple[Tensor, Tensor]:
    """Return distinct scores whose best k are shared evenly by the ranks."""
    width = 2 * k
    return (-torch.arange(width) / 4.0).bfloat16().expand(rows, -1), int32([width] * rows)


def test_full_sends_eight_bytes_a_candidate() -> None:
    merged = merge(*spread(64, 4), 64, 4, protocol="full")
    assert merged.sent == [4 * 64 * 8] * 4


def test_compact_sends_four_bytes_for_each_of_its_quota() -> None:
    merged = merge(*spread(64, 4), 64, 4, protocol="compact")
    segments = candidates.segments(DCP(world=4))
    assert segments == 4
    assert merged.sent == [4 * 4 * (segments + 1 + 24)] * 4


def test_the_quota_of_the_model_is_384_of_2048_on_eight_ranks() -> None:
    spec = TopKMergeSpec(dcp=DCP(world=8), protocol="compact", score="bfloat16")
    assert spec.candidates == 384
    assert candidates.segments(spec.dcp) == 2


def test_scores_only_sends_half_of_full_or_less() -> None:
    scores, lengths = spread(64, 4)
    assert merge(scores.float(), lengths, 64, 4, protocol="scores_only").sent == [4 * 64 * 4] * 4
    assert merge(scores, lengths, 64, 4, protocol="scores_only").sent == [4 * 64 * 2] * 4


def test_only_undecided_rows_are_sent_again() -> None:
    k, world, rows = 64, 4, 8
    scores, lengths = spread(k, world, rows)
    scores = scores.clone()
    scores[5, 0::4] = 100.0  # rank 0 owns more winners of this row than its quota
    merged = merge(scores, lengths, k, world, protocol="compact")
    assert torch.equal(merged.union(k), selection.select_positions(scores, lengths, k))
    once = rows * 4 * (candidates.segments(DCP(world=world)) + 1 + 24)
    assert merged.sent == [once + k * 8] * world


def test_a_last_candidate_that_ties_with_the_cut_decides_whether_to_send_again() -> None:
    # Quota 2 of k=4 on two ranks, all scores equal: the last of each quota is itself a winner.
    scores = torch.zeros(1, 8).bfloat16()
    merged = merge(scores, int32([8]), 4, 2, protocol="compact", quota=2)
    assert merged.union(4).tolist() == [[0, 1, 2, 3]]
    # With one more each the last ones lose by their position, and nothing is sent again.
    wider = merge(scores, int32([8]), 4, 2, protocol="compact", quota=3)
    assert wider.union(4).tolist() == [[0, 1, 2, 3]]
    assert merged.sent[0] - wider.sent[0] == 4 * 8 - 4


def test_a_rank_that_sent_all_it_holds_hides_nothing() -> None:
    merged = merge(torch.zeros(1, 4).bfloat16(), int32([4]), 4, 2, protocol="compact", quota=2)
    assert merged.union(4).tolist() == [[0, 1, 2, 3]]
    assert merged.sent == [4 * (candidates.segments(DCP(world=2)) + 1 + 2)] * 2


def test_rows_beyond_the_header_are_sent_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "CONTEXT", 16)
    monkeypatch.setattr(candidates, "SEGMENT", 4)
    scores, lengths = tied_rows(40, 60, seed=6)
    merged = merge(scores, lengths, 8, 2, protocol="compact")
    assert torch.equal(merged.union(8), selection.select_positions(scores, lengths, 8))
    again = int((lengths > 16).sum())
    assert merged.sent[0] >= again * 8 * 8


def test_ties_are_exchanged_for_the_rows_they_straddle_alone() -> None:
    k = 8
    scores = torch.zeros(3, 32).bfloat16()
    scores[0] = -torch.arange(32).bfloat16()  # no ties
    scores[2, :k] = 1.0  # ties, but not across the cut
    merged = merge(scores, int32([32] * 3), k, 2, protocol="scores_only")
    assert torch.equal(merged.union(k), torch.arange(k).expand(3, -1))
    assert merged.sent == [3 * k * 2 + k * 4] * 2


def test_positions_up_to_a_million_tokens_survive_the_wire() -> None:
    world, interleave, tokens = 2, 64, candidates.CONTEXT
    best = torch.tensor([0, 65535, 65536, 131072, 524287, 524288, tokens - 65, tokens - 1])
    scores = torch.zeros(1, tokens).bfloat16()
    scores[0, best] = 1.0
    merged = merge(scores, int32([tokens]), 8, world, interleave, protocol="compact", quota=8)
    assert torch.equal(merged.union(8), best[None])


def test_keys_of_all_ranks_stand_side_by_side() -> None:
    parts = torch.arange(12).reshape(2, 3, 2)
    assert protocols.side_by_side(parts).tolist() == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]


def test_a_share_is_poisoned_behind_its_keys() -> None:
    mine = share(torch.arange(5.0)[None], DCP(world=2, rank=1, interleave=2))
    assert mine.tolist() == [[2.0, 3.0, INF, INF]]
