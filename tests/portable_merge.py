"""Checks of the portable ``topk_merge``: against the reference, entry for entry and byte for byte of what is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from index_cases import int32
from interpreted import device, on_device
from merge_cases import PROTOCOLS, Merged, merge, tied_rows
from torch import Tensor

import kimi_hal as hal
from kimi_hal.errors import GroupError
from kimi_hal.ops.spec import DCP, Limits
from kimi_hal.ops.topk_merge import TopKMergeSpec
from kimi_hal.parallel import candidates, ownership
from kimi_hal.parallel.groups import Faults, Group, LoopbackGroup
from kimi_hal.reference import selection
from kimi_hal.reference import topk_merge as reference
from kimi_hal.triton import protocols

LIMITS = Limits(max_rows=512, max_reqs=512, max_context=1 << 26)
DEVICE = device()
#: Rows by world: few where Triton's interpreter goes over them.
ROWS = {2: 6, 3: 4, 8: 1} if DEVICE == "cpu" else {2: 300, 3: 300, 8: 300}
Ranks = list[dict[str, Tensor]]


def planned(spec: TopKMergeSpec, group: Group | None) -> Callable[..., Any]:
    """Plan the portable merge; what planning sends is not counted."""
    plan = hal.plan("topk_merge", spec, LIMITS, device=DEVICE, group=group, implementation="nvidia.triton")
    if group is not None:
        group.bytes_sent = 0
    return on_device(plan.run, DEVICE)


def same(scores: Tensor, lengths: Tensor, k: int, world: int, interleave: int = 1, **fields: Any) -> Merged:
    """Merge rows by kernels and by the reference and compare all that either returns and sends."""
    got = merge(scores, lengths, k, world, interleave, make=planned, **fields)
    expected = merge(scores, lengths, k, world, interleave, **fields)
    for name in ("local", "counts", "everyones"):
        for rank, (a, b) in enumerate(zip(getattr(got, name), getattr(expected, name), strict=True)):
            assert torch.equal(a, b), (name, rank, fields, a, b)
    assert got.sent == expected.sent, (got.sent, expected.sent)
    return got


def same_on(ranks: Ranks, **fields: Any) -> None:
    """Merge what each rank is given, by kernels and by the reference, and compare all results."""

    def one(group: Group) -> None:
        dcp = DCP(world=len(ranks), rank=group.rank(), interleave=fields.get("interleave", 1))
        given = {n: v for n, v in fields.items() if n != "interleave"}
        own = ranks[group.rank()]
        dtype = str(own["scores"].dtype).removeprefix("torch.")
        spec = TopKMergeSpec(dcp=dcp, topk=own["scores"].shape[1], score=dtype, **given)
        got = planned(spec, group)(**own)
        expected = reference.topk_merge(spec, **own, group=group)
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a, b), (fields, a, b)

    LoopbackGroup.run(len(ranks), one)


@contextmanager
def small(**sizes: int) -> Iterator[None]:
    """Let the kernels' sizes be small enough for a few candidates to pass their borders."""
    kept = {name: getattr(protocols, name) for name in sizes}
    try:
        for name, value in sizes.items():
            setattr(protocols, name, value)
        yield
    finally:
        for name, value in kept.items():
            setattr(protocols, name, value)


def tied(protocol: str, world: int) -> None:
    for interleave in (1, 4, 64):
        scores, lengths = tied_rows(ROWS[world], 300, seed=world * interleave)
        got = same(scores, lengths, 16, world, interleave, protocol=protocol)
        assert torch.equal(got.union(16), selection.select_positions(scores, lengths, 16))


def check_full_over_two_ranks() -> None:
    tied("full", 2)


def check_full_over_three_ranks() -> None:
    tied("full", 3)


def check_full_over_eight_ranks() -> None:
    tied("full", 8)


def check_compact_over_two_ranks() -> None:
    tied("compact", 2)


def check_compact_over_three_ranks() -> None:
    tied("compact", 3)


def check_compact_over_eight_ranks() -> None:
    tied("compact", 8)


def check_scores_only_over_two_ranks() -> None:
    tied("scores_only", 2)


def check_scores_only_over_three_ranks() -> None:
    tied("scores_only", 3)


def check_scores_only_over_eight_ranks() -> None:
    tied("scores_only", 8)


def check_float32_scores_are_merged_in_all_their_bits() -> None:
    scores = 1.0 + torch.randperm(200, generator=torch.Generator().manual_seed(1))[None].float() * 2**-23
    scores[0, :40] = scores[0, 3]  # and some are equal
    for protocol in ("full", "scores_only"):
        same(scores, int32([200]), 24, 3, 4, protocol=protocol)


def check_ties_that_no_rank_sent_do_not_win() -> None:
    scores = torch.zeros(1, 48)  # rank 0 holds the first 16 positions, and sends no more of them than can win
    same(scores, int32([48]), 16, 3, 16, protocol="scores_only")
    scores[0, 20:28] = 1.0  # then eight of its ties win
    same(scores, int32([48]), 16, 3, 16, protocol="scores_only")


def check_a_quota_of_one_sends_rows_again() -> None:
    scores, lengths = tied_rows(5, 60, seed=3)
    same(scores, lengths, 8, 3, protocol="compact", quota=1)


def check_more_candidates_than_one_program_holds() -> None:
    scores, lengths = tied_rows(4, 300, seed=11)
    with small(SHORT=16, BLOCK=32):
        for protocol in PROTOCOLS:
            same(scores, lengths, 20, 2, 4, protocol=protocol)
        same(scores.float(), lengths, 20, 2, protocol="full")
        same(scores.float(), lengths, 20, 2, protocol="scores_only")


def check_lists_too_long_to_be_ordered_by_counting() -> None:
    scores, lengths = tied_rows(3, 200, seed=12)
    with small(COUNTED=4):
        for protocol in PROTOCOLS:
            same(scores, lengths, 16, 2, protocol=protocol)


def check_lists_longer_than_one_program_orders() -> None:
    scores, lengths = tied_rows(2, 400, seed=13)
    with small(PLACED=16, STEP=16):
        same(scores, lengths, 70, 2, protocol="compact")


def check_rows_that_go_into_several_messages() -> None:
    scores, lengths = tied_rows(5, 60, seed=5)
    kept, reference.AT_ONCE = reference.AT_ONCE, 2 * 8 * 3
    with small(AT_ONCE=reference.AT_ONCE):
        for protocol in PROTOCOLS:
            same(scores, lengths, 8, 3, protocol=protocol)
    reference.AT_ONCE = kept


def check_the_order_of_arrival_does_not_matter() -> None:
    scores, lengths = tied_rows(3, 60, seed=4)
    for protocol in PROTOCOLS:
        same(scores, lengths, 8, 3, protocol=protocol, faults=Faults(reorder=1))


def far(lengths: list[int], k: int, world: int, interleave: int, seed: int) -> Ranks:
    """Return candidates all over long requests, in no order, with holes, and stale ones that would win."""
    g, ranks = torch.Generator().manual_seed(seed), []
    for rank in range(world):
        own = DCP(world=world, rank=rank, interleave=interleave)
        keys = [ownership.local_length(n, own) for n in lengths]
        indices = torch.stack([torch.randint(0, n, (4 * k,), generator=g).unique()[:k] for n in keys])
        for row, n in enumerate(keys):
            indices[row] = indices[row, torch.randperm(k, generator=g)]
            indices[row, ::5] = torch.tensor([-1, n, 1 << 30, -7])[row % 4]
        scores = torch.randint(-3, 4, (len(lengths), k), generator=g).float()
        scores[:, ::5] = 100.0
        ranks.append({"scores": scores.bfloat16(), "indices": indices.int(), "row_len": int32(lengths)})
    return ranks


def check_far_positions_in_any_order_with_holes_and_stale_entries() -> None:
    for world, interleave in ((2, 1), (3, 64)):
        ranks = far([70_000, 1 << 20, candidates.CONTEXT + 1, (1 << 25) + 77], 24, world, interleave, seed=2)
        for protocol in PROTOCOLS:
            same_on(ranks, protocol=protocol, return_global=protocol != "scores_only", interleave=interleave)


def check_the_longest_request_and_the_largest_position() -> None:
    ranks = far([(1 << 31) - 1, (1 << 31) - 1], 16, 2, 1 << 20, seed=6)
    for own in ranks:
        own["indices"][0, 1] = (1 << 30) - (1 << 20)
    for protocol in ("full", "scores_only"):
        same_on(ranks, protocol=protocol, return_global=protocol == "full", interleave=1 << 20)


def check_views_of_wider_tensors_and_given_buffers() -> None:
    k, rows = 12, 3
    g = torch.Generator().manual_seed(8)

    def one(group: Group) -> None:
        dcp = DCP(world=2, rank=group.rank(), interleave=4)
        spec = TopKMergeSpec(dcp=dcp, topk=k, score="float32")
        wide = torch.randn(rows, 2 * k + 5, generator=g)
        index = torch.stack([torch.randperm(40, generator=g)[: k + 3] for _ in range(rows)]).int()
        lengths = int32([80, 9, 60, 9, 0, 9])[::2]
        own = (wide[:, 3 : 3 + k], index[:, 2 : 2 + k], lengths)
        buffers = {
            "local_out": torch.full((rows, k + 3), 77, dtype=torch.int32),
            "global_out": torch.full((rows, k + 3), 77, dtype=torch.int32),
        }
        count = torch.full((rows + 2,), 77, dtype=torch.int32)
        given = {name: b[:, :k] for name, b in buffers.items()}
        got = planned(spec, group)(*own, **given, len_out=count[1:-1])
        expected = reference.topk_merge(spec, *own, group=group)
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a, b), (a, b)
        assert all((b[:, k:] == 77).all() for b in buffers.values())
        assert count[0] == count[-1] == 77

    LoopbackGroup.run(2, one)


def check_one_rank_takes_all_that_it_has() -> None:
    scores = torch.tensor([[1.0, -torch.inf, 2.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    index, lengths = int32([[7, -1, 3, 9], [0, 1, 2, 3]]), int32([8, -2])
    for protocol in PROTOCOLS:
        kind = scores.bfloat16() if protocol == "compact" else scores
        shown, dtype = protocol != "scores_only", str(kind.dtype).removeprefix("torch.")
        spec = TopKMergeSpec(dcp=DCP(), topk=4, protocol=protocol, score=dtype, return_global=shown)
        local, count, everyones = planned(spec, None)(kind, index, lengths)
        assert local.tolist() == [[3, 7, -1, -1], [-1] * 4]
        assert count.tolist() == [2, 0]
        assert everyones.tolist() == (local.tolist() if shown else [[], []])


def check_replicated_candidates_are_parted_by_owner_without_a_group() -> None:
    for rank in range(2):
        dcp = DCP(world=2, rank=rank, interleave=2, index="replicated")
        spec = TopKMergeSpec(dcp=dcp, topk=5)
        own = (torch.zeros(1, 5), int32([[9, 3, 6, 0, -1]]), int32([10]))
        got, expected = planned(spec, None)(*own), reference.topk_merge(spec, *own)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), (got, expected)
        assert got[2].tolist() == [[0, 3, 6, 9, -1]]


def check_no_rows_send_nothing() -> None:
    for protocol in PROTOCOLS:
        got = same(torch.zeros(0, 8).bfloat16(), int32([]), 4, 2, protocol=protocol)
        assert got.sent == [0, 0]


def check_a_rank_that_dies_at_either_message_ends_the_merge_of_the_others() -> None:
    scores, lengths = tied_rows(2, 60, seed=3)
    for protocol, call in (("full", 1), ("compact", 2), ("scores_only", 2)):
        fields = {"quota": 1} if protocol == "compact" else {}
        with pytest.raises(GroupError, match="rank 1 died"):
            merge(
                scores,
                lengths,
                8,
                2,
                protocol=protocol,
                make=planned,
                faults=Faults(dead={1: call}),
                **fields,
            )
