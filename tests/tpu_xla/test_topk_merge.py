"""``topk_merge`` under ``compact`` as traced programs: the second message has a size that few programs serve."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch

pytest.importorskip("torch_xla", reason="needs the environment of `nox -s tpu_xla`")
os.environ.setdefault("PJRT_DEVICE", "CPU")

import torch_xla
import torch_xla.debug.metrics as metrics

import kimi_hal as hal
from kimi_hal.errors import GroupError
from kimi_hal.ops.spec import DCP, Limits
from kimi_hal.ops.topk_merge import TopKMergeSpec
from kimi_hal.parallel import LoopbackGroup, candidates
from kimi_hal.reference import topk_merge as reference
from kimi_hal_tpu.xla import topk_merge
from kimi_hal_tpu.xla.tracing import Traced

SPEC = TopKMergeSpec(dcp=DCP(world=2), topk=8, protocol="compact", score="bfloat16", quota=5)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KIMI_HAL_EXECUTION", "interpreted")
    monkeypatch.setenv("KIMI_HAL_BACKEND", "tpu")


def test_words_are_packed_and_unpacked_as_on_the_host_without_leaving_the_trace() -> None:
    positions = torch.tensor([[0, 65535, 65536, 300000, -1], [7, 8, 9, 524287, -1], [-1] * 5])
    scores, held = torch.tensor([[-32767, -1, 0, 1, 32640]] * 3), torch.tensor([4, 9, 0])
    device = torch_xla.device()
    expected = candidates.pack(scores, positions, held, 8)
    metrics.clear_all()
    with Traced():
        message = topk_merge.pack(scores.to(device), positions.to(device), held.to(device), 8)
        back = topk_merge.unpack(message, 8)
    torch_xla.sync(wait=True)
    assert [name for name in metrics.counter_names() if name.startswith("aten::")] == []
    assert torch.equal(message.cpu(), expected)
    for found, want in zip(back, candidates.unpack(expected, 8), strict=True):
        assert torch.equal(found.cpu(), want)


class Counting(LoopbackGroup):
    """A rank that notes what it sends."""

    sent: list[list[int]]

    def all_gather(self, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        self.sent.append(list(x.shape))
        return super().all_gather(x, out=out)


def selected(rank: int, one_sided: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what a rank selected in 8 rows; in the first ``one_sided`` rank 1 has all winners, more than its quota."""
    scores = torch.arange(16, 0, -1).float()[rank::2].expand(8, 8).clone()
    scores[:one_sided] += 100 * rank
    index = torch.arange(8, dtype=torch.int32).expand(8, 8).contiguous()
    return scores.bfloat16(), index, torch.full((8,), 16, dtype=torch.int32)


def test_only_rows_that_the_first_message_leaves_open_are_sent_again_in_powers_of_two() -> None:
    counts = (0, 1, 3, 4, 5)

    def plans(group: Counting) -> list[list[int]]:
        spec = dataclasses.replace(SPEC, dcp=DCP(world=2, rank=group.rank()))
        limits = Limits(max_rows=8, max_reqs=8)
        group.sent = []
        plan = hal.plan("topk_merge", spec, limits, device="cpu", implementation="tpu.xla", group=group)
        group.sent = []
        results.append((group.rank(), [plan.run(*selected(group.rank(), rows)) for rows in counts]))
        return group.sent

    def references(group: LoopbackGroup) -> list[tuple[torch.Tensor, ...]]:
        spec = dataclasses.replace(SPEC, dcp=DCP(world=2, rank=group.rank()))
        return [reference.topk_merge(spec, *selected(group.rank(), rows), group=group) for rows in counts]

    results: list[tuple[int, list[tuple[torch.Tensor, ...]]]] = []
    sent = Counting.run(2, plans)
    expected = LoopbackGroup.run(2, references)
    for rank, found in results:
        for mine, want in zip(found, expected[rank], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, want, strict=True))
    first = [8, candidates.segments(SPEC.dcp) + 1 + 5]
    assert sent[0] == [first, first, [1, 8, 2], first, [4, 8, 2], first, [4, 8, 2], first, [8, 8, 2]]
    assert sent[1] == sent[0]


PROTOCOLS = [("full", "float32"), ("compact", "bfloat16"), ("scores_only", "bfloat16")]


def merged(
    implementation: str, protocol: str, score: str, rows: tuple[int, int]
) -> list[tuple[torch.Tensor, ...]]:
    """Return what two ranks get that bring so many rows each."""

    def rank(group: LoopbackGroup) -> tuple[torch.Tensor, ...]:
        dcp = DCP(world=2, rank=group.rank())
        spec = TopKMergeSpec(
            dcp=dcp, topk=8, protocol=protocol, score=score, return_global=protocol != "scores_only"
        )
        limits = Limits(max_rows=8, max_reqs=8)
        plan = hal.plan("topk_merge", spec, limits, device="cpu", implementation=implementation, group=group)
        scores, index, lengths = (t[: rows[group.rank()]] for t in selected(group.rank(), 2))
        return plan.run(scores.to(getattr(torch, score)), index, lengths)  # type: ignore[no-any-return]

    return LoopbackGroup.run(2, rank)


@pytest.mark.parametrize(("protocol", "score"), PROTOCOLS)
@pytest.mark.parametrize("rows", [(2, 3), (0, 3), (3, 0)])
def test_ranks_with_other_numbers_of_rows_are_told_as_by_the_reference(
    protocol: str, score: str, rows: tuple[int, int]
) -> None:
    told = []
    for implementation in ("tpu.xla", "reference.torch"):
        with pytest.raises(GroupError) as error:
            merged(implementation, protocol, score, rows)
        told.append(str(error.value))
    assert told[0] == told[1]
    assert ("ranks disagree at call 1" in told[0]) is all(rows)


@pytest.mark.parametrize(("protocol", "score"), PROTOCOLS)
@pytest.mark.parametrize("rows", [0, 3, 8])
def test_padded_rows_are_not_sent_and_change_nothing(protocol: str, score: str, rows: int) -> None:
    mine, his = (merged(name, protocol, score, (rows, rows)) for name in ("tpu.xla", "reference.torch"))
    for found, expected in zip(mine, his, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
