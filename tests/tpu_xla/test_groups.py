"""Plans for torch-xla's device whose ranks meet on the host: what is sent is cut out of the trace, and comes back."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("torch_xla", reason="needs the environment of `nox -s tpu_xla`")
os.environ.setdefault("PJRT_DEVICE", "CPU")

import torch_xla

import kimi_hal as hal
from kimi_hal.dispatch.contract import BuildContext, Sizes
from kimi_hal.ops.all_gather import GatherSpec
from kimi_hal.ops.spec import DCP, Limits
from kimi_hal.ops.topk_merge import TopKMergeSpec
from kimi_hal.parallel import LoopbackGroup
from kimi_hal_tpu.xla.bridge import XLA

pytestmark = pytest.mark.usefixtures("tpu")
LIMITS = Limits(max_rows=8, max_reqs=4)


def test_what_ranks_gather_on_the_host_is_what_they_gave() -> None:
    def one(group: LoopbackGroup) -> torch.Tensor:
        spec = GatherSpec(layout="rank_major", dtype="float32", dcp=DCP(world=2, rank=group.rank()))
        plan = hal.plan("all_gather", spec, device="xla", implementation="tpu.xla", group=group)
        x = torch.full((3, 2), group.rank() + 1.0).to(torch_xla.device())
        found = plan.run(x * 2)
        assert found.device.type == "xla"
        return found.cpu()

    for found in LoopbackGroup.run(2, one, timeout=60):
        assert found[:, 0, 0].tolist() == [2, 4]
        assert found.shape == (2, 3, 2)


@pytest.mark.parametrize("protocol", ["full", "compact", "scores_only"])
def test_selections_are_merged_through_the_host_as_the_reference_merges_them(protocol: str) -> None:
    scores = torch.rand(2, 8, 4, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    index, lengths = torch.arange(4).int().expand(8, 4).contiguous(), torch.full((8,), 8, dtype=torch.int32)

    def merged(group: LoopbackGroup, place: str, implementation: str) -> list[torch.Tensor]:
        dcp = DCP(world=2, rank=group.rank())
        spec = TopKMergeSpec(
            topk=4, dcp=dcp, protocol=protocol, score="bfloat16", return_global=protocol != "scores_only"
        )
        plan = hal.plan("topk_merge", spec, LIMITS, device=place, implementation=implementation, group=group)
        given = scores[group.rank()].bfloat16(), index, lengths
        return [t.cpu() for t in plan.run(*(t.to(place) for t in given))]

    mine = LoopbackGroup.run(2, lambda group: merged(group, "xla", "tpu.xla"), timeout=60)
    his = LoopbackGroup.run(2, lambda group: merged(group, "cpu", "reference.torch"), timeout=60)
    for rank in range(2):
        assert all(torch.equal(a, b) for a, b in zip(mine[rank], his[rank], strict=True))


@pytest.mark.parametrize(
    ("plan", "group", "on_host"),
    [("xla", "cpu", True), ("xla", "xla", False), ("cpu", "cpu", True), ("cpu:0", "cpu", True)],
)
def test_where_ranks_meet_follows_from_the_group(plan: str, group: str, on_host: bool) -> None:
    spec = GatherSpec(layout="rank_major", dtype="float32", dcp=DCP(world=2))
    ranks = SimpleNamespace(size=lambda: 2, rank=lambda: 0, device=torch.device(group))
    context = BuildContext(
        "all_gather",
        spec,
        LIMITS,
        plan,
        "v6e",
        Sizes(),
        ranks,  # type: ignore[arg-type]
        None,
        lambda **given: None,
        {},
    )
    exchange = XLA(context, lambda *given: ())._exchange(None)
    assert exchange is not None
    assert exchange.on_host is on_host
