"""The form of the merges that a graph can hold: fixed messages, and a flag instead of a wrong answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from index_cases import int32
from merge_cases import PROTOCOLS, Merged, merge, tied_rows
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from kimi_hal.errors import ContractError, GroupError, SpecError
from kimi_hal.ops.spec import DCP, Limits
from kimi_hal.ops.topk_merge import TopKMergeSpec
from kimi_hal.parallel.captured import Capacity, CapturedMerge
from kimi_hal.parallel.groups import Group, LoopbackGroup
from kimi_hal.reference import selection
from kimi_hal.reference import topk_merge as reference

Made = list[CapturedMerge]


def captured(rows: int, ties: int = 1 << 20, made: Made | None = None) -> Callable[..., Any]:
    """Return what ``merge`` calls instead of the reference; collects the ranks' objects."""
    kept = made if made is not None else []

    def make(spec: TopKMergeSpec, group: Group) -> Callable[..., Any]:
        limits = Limits(max_rows=1 << 20, max_reqs=1)
        kept.append(CapturedMerge(spec, group, limits, device="cpu", capacity=Capacity(rows, ties)))
        return kept[-1].run

    return make


def right_or_left_out(merged: Merged, expected: Tensor, k: int) -> int:
    """Compare the rows that were answered; return how many were left out, which have nothing at all."""
    found = merged.union(k)
    empty = (found == -1).all(dim=1) & (expected >= 0).any(dim=1)
    assert torch.equal(found[~empty], expected[~empty])
    for local, count in zip(merged.local, merged.counts, strict=True):
        assert torch.equal((local >= 0).sum(1), count.long())
    return int(empty.sum())


@pytest.mark.parametrize("interleave", [1, 64])
@pytest.mark.parametrize(("world", "rows"), [(2, 120), (3, 90), (8, 60)])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_with_room_for_every_row_it_is_the_selection_of_one_rank(
    protocol: str, world: int, rows: int, interleave: int
) -> None:
    made: Made = []
    scores, lengths = tied_rows(rows, 200, seed=world)
    merged = merge(scores, lengths, 24, world, interleave, protocol=protocol, make=captured(rows, made=made))
    assert torch.equal(merged.union(24), selection.select_positions(scores, lengths, 24))
    assert [int(each.flag) for each in made] == [0] * world


SCARCE = [("compact", 1, 1), ("compact", 5, 1)]
SCARCE += [("scores_only", rows, ties) for rows, ties in ((1, 2), (1, 24), (5, 6), (30, 3), (400, 1))]


@pytest.mark.parametrize(("protocol", "rows", "ties"), SCARCE)
def test_rows_without_room_have_no_answer_and_raise_the_flag(protocol: str, rows: int, ties: int) -> None:
    made: Made = []
    scores, lengths = tied_rows(90, 200, seed=rows)
    expected = selection.select_positions(scores, lengths, 24)
    merged = merge(scores, lengths, 24, 4, protocol=protocol, make=captured(rows, ties, made))
    missed = right_or_left_out(merged, expected, 24)
    assert missed > 0
    assert [int(each.flag) for each in made] == [missed] * 4


def test_full_never_raises_the_flag() -> None:
    made: Made = []
    scores, lengths = tied_rows(90, 200, seed=3)
    merged = merge(scores, lengths, 24, 4, protocol="full", make=captured(1, 1, made))
    assert torch.equal(merged.union(24), selection.select_positions(scores, lengths, 24))
    assert [int(each.flag) for each in made] == [0] * 4


@pytest.mark.parametrize("protocol", ["compact", "scores_only"])
def test_messages_depend_on_the_rows_alone(protocol: str) -> None:
    sent = []
    for scores in (torch.zeros(40, 160), torch.randn(40, 160)):
        made = captured(4, 8)
        sent.append(merge(scores.bfloat16(), int32([160] * 40), 24, 4, protocol=protocol, make=made).sent)
    assert sent[0] == sent[1]
    spec = TopKMergeSpec(
        dcp=DCP(world=4), topk=24, protocol=protocol, score="bfloat16", return_global=protocol == "compact"
    )
    first = {"compact": 4 * (9 + 4 + 1), "scores_only": 2 * 24}[protocol]
    agreed = 40  # once, when it is made
    assert sent[0] == [agreed + 40 * first + Capacity(4, 8).bytes(spec)] * 4


@pytest.mark.parametrize(
    ("interleave", "rows", "sentence"),
    [
        (2, 1, 'ranks do not agree on dcp.interleave: rank 0 has "1", rank 1 has "2"'),
        (
            1,
            2,
            'ranks do not agree on capacity: rank 0 has "Capacity(rows=1, ties=1)", '
            'rank 1 has "Capacity(rows=2, ties=1)"',
        ),
    ],
)
def test_ranks_that_mean_another_merge_are_refused(interleave: int, rows: int, sentence: str) -> None:
    def one_rank(group: Group) -> None:
        other = group.rank() == 1
        dcp = DCP(world=2, rank=group.rank(), interleave=interleave if other else 1)
        room = Capacity(rows if other else 1, 1)
        CapturedMerge(
            TopKMergeSpec(dcp=dcp, topk=8), group, Limits(max_rows=4, max_reqs=4), device="cpu", capacity=room
        )

    with pytest.raises(GroupError) as caught:
        LoopbackGroup.run(2, one_rank)
    assert str(caught.value) == sentence


def test_the_flag_counts_over_calls_until_it_is_cleared() -> None:
    scores, index = torch.zeros(6, 4).bfloat16(), int32([[0, 1, 2, 3]] * 6)

    def one_rank(group: Group) -> list[int]:
        spec = TopKMergeSpec(
            dcp=DCP(world=2, rank=group.rank()), topk=4, protocol="compact", score="bfloat16", quota=1
        )
        limits = Limits(max_rows=6, max_reqs=6)
        merged = CapturedMerge(spec, group, limits, device="cpu", capacity=Capacity(2, 1))
        seen = []
        for lengths in ([8] * 6, [8] * 3 + [0] * 3, [2] * 6, [8] * 2 + [2] * 4):
            merged.run(scores, index, int32(lengths))
            seen.append(int(merged.flag))
        merged.flag.zero_()
        merged.run(scores, index, int32([8] * 6))
        return [*seen, int(merged.flag)]

    assert LoopbackGroup.run(2, one_rank) == [[4, 5, 5, 5, 4]] * 2


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_eager_full_answers_the_rows_that_were_left_out(protocol: str) -> None:
    scores, lengths = tied_rows(40, 120, seed=9)
    made: Made = []
    first = merge(scores, lengths, 16, 3, protocol=protocol, make=captured(1, 2, made))
    again = merge(scores, lengths, 16, 3, protocol="full")
    expected = selection.select_positions(scores, lengths, 16)
    answer = again if int(made[0].flag) else first
    assert torch.equal(answer.union(16), expected)


class Silent(Group):
    """A group of W ranks without the others: what is sent comes back W times. Its calls are shapes alone."""

    def __init__(self, world: int) -> None:
        self.world = world

    def size(self) -> int:
        return self.world

    def rank(self) -> int:
        return 0

    def all_gather(self, x: Tensor, *, out: Tensor | None = None) -> Tensor:
        return x[None].expand(self.world, *x.shape).contiguous()

    def all_to_all(self, x: Tensor) -> Tensor:
        return x.clone()

    def barrier(self) -> None: ...


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_nothing_in_it_waits_for_a_value(protocol: str) -> None:
    """Fake tensors have no values: a branch, a shape or an ``item()`` that needs one raises.

    Ranks agree once, with values, when it is made: before any graph is captured.
    """
    dcp = DCP(world=4, interleave=4)
    spec = TopKMergeSpec(dcp=dcp, topk=8, protocol=protocol, score="bfloat16", return_global=False)
    merged = CapturedMerge(spec, Silent(4), Limits(max_rows=64, max_reqs=64), device="cpu")
    with FakeTensorMode() as fake:
        merged.flag = fake.from_tensor(merged.flag)
        operands = (
            torch.zeros(64, 8, dtype=torch.bfloat16),
            torch.zeros(64, 8, dtype=torch.int32),
            torch.zeros(64, dtype=torch.int32),
        )
        local, count, _ = merged.run(*operands)
    assert (local.shape, count.shape) == ((64, 8), (64,))


def test_the_eager_form_does_wait_for_values() -> None:
    """What the captured form is for: the check above finds the eager form's second message."""
    spec = TopKMergeSpec(dcp=DCP(world=4), topk=8, protocol="compact", score="bfloat16")
    with FakeTensorMode():
        operands = (
            torch.zeros(64, 8, dtype=torch.bfloat16),
            torch.zeros(64, 8, dtype=torch.int32),
            torch.zeros(64, dtype=torch.int32),
        )
        with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
            reference.topk_merge(spec, *operands, group=Silent(4))


def test_outputs_are_the_callers_buffers() -> None:
    spec = TopKMergeSpec(dcp=DCP(), topk=4)
    merged = CapturedMerge(spec, None, Limits(max_rows=2, max_reqs=2), device="cpu")
    buffers = {
        "local_out": torch.full((2, 4), 9, dtype=torch.int32),
        "len_out": torch.full((2,), 9, dtype=torch.int32),
        "global_out": torch.full((2, 4), 9, dtype=torch.int32),
    }
    got = merged.run(torch.zeros(2, 4), int32([[3, -1, 0, 1], [5, 2, -1, -1]]), int32([8, 4]), **buffers)
    assert all(a is b for a, b in zip(got, buffers.values(), strict=True))
    assert buffers["local_out"].tolist() == [[0, 1, 3, -1], [2, -1, -1, -1]]
    assert buffers["len_out"].tolist() == [3, 1]


def test_what_it_refuses() -> None:
    spec, limits = TopKMergeSpec(dcp=DCP(world=2), topk=4), Limits(max_rows=2, max_reqs=2)
    with pytest.raises(GroupError, match=r"^dcp\.world=2 needs a group: hal\.plan"):
        CapturedMerge(spec, None, limits, device="cpu")
    with pytest.raises(SpecError) as caught:
        CapturedMerge(spec, Silent(2), limits, device="cpu", capacity=Capacity(0, 4))
    assert str(caught.value) == (
        "Capacity(rows=0, ties=4): rows and ties are at least 1; leave capacity out for a default"
    )
    merged = CapturedMerge(spec, Silent(2), limits, device="cpu")
    with pytest.raises(ContractError, match=r"^topk_merge: indices must be int32, got int64$"):
        merged.run(torch.zeros(2, 4), torch.zeros(2, 4, dtype=torch.int64), int32([8, 4]))


def test_the_default_has_room_for_one_row_in_32() -> None:
    spec = TopKMergeSpec(dcp=DCP(world=8), topk=2048, protocol="compact", score="bfloat16")
    assert Capacity.default(spec, 512) == Capacity(rows=16, ties=2048)
    assert Capacity.default(spec, 3) == Capacity(rows=1, ties=2048)
    assert Capacity.default(spec, 512).bytes(spec) == 16 * 2048 * 8


def test_scores_of_16_bits_have_room_for_some_ties_of_every_row() -> None:
    fields = {"dcp": DCP(world=8), "protocol": "scores_only", "return_global": False}
    short, wide = (TopKMergeSpec(score=score, topk=2048, **fields) for score in ("bfloat16", "float32"))
    assert Capacity.default(short, 64) == Capacity(rows=64, ties=128)
    assert Capacity.default(wide, 64) == Capacity(rows=2, ties=2048)
    assert Capacity.default(short, 64).bytes(short) == 64 * 128 * 4
