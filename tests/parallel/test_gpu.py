"""The captured form of the merges inside a real graph: eight ranks on one device, replayed with new data."""

from __future__ import annotations

import pytest
import torch
from merge_cases import PROTOCOLS, share, tied_rows
from torch import Tensor

from kimi_hal.ops.spec import DCP, Limits
from kimi_hal.ops.topk_merge import TopKMergeSpec, TopKSpec
from kimi_hal.parallel import ownership
from kimi_hal.parallel.captured import Capacity, CapturedMerge
from kimi_hal.parallel.groups import Group, LoopbackGroup
from kimi_hal.reference import selection
from kimi_hal.reference import topk_merge as reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

WORLD, ROWS, TOPK, WIDTH = 8, 64, 256, 4000


class Rank:
    """One rank's buffers at fixed addresses, and its merge."""

    def __init__(self, group: Group, protocol: str, capacity: Capacity) -> None:
        self.dcp = DCP(world=WORLD, rank=group.rank())
        spec = TopKMergeSpec(
            dcp=self.dcp,
            topk=TOPK,
            score="bfloat16",
            protocol=protocol,
            return_global=False,
            quota=TOPK // WORLD if protocol == "compact" else None,  # so small that many rows are sent again
        )
        limits = Limits(max_rows=ROWS, max_reqs=ROWS)
        self.merge = CapturedMerge(spec, group, limits, device="cuda", capacity=capacity)
        self.scores = torch.zeros(ROWS, TOPK, dtype=torch.bfloat16, device="cuda")
        self.index = torch.full((ROWS, TOPK), -1, dtype=torch.int32, device="cuda")
        self.lengths = torch.zeros(ROWS, dtype=torch.int32, device="cuda")
        self.local = torch.zeros(ROWS, TOPK, dtype=torch.int32, device="cuda")
        self.count = torch.zeros(ROWS, dtype=torch.int32, device="cuda")

    def load(self, scores: Tensor, lengths: Tensor) -> None:
        """Put this rank's selection of new scores into the buffers."""
        select = TopKSpec(
            topk=TOPK, score="bfloat16", scores_dtype="bfloat16", return_selected=True, dcp=self.dcp
        )
        index, chosen = reference.topk_select(select, share(scores, self.dcp), lengths)
        self.index.copy_(index)
        self.scores.copy_(chosen)
        self.lengths.copy_(lengths)

    def run(self) -> None:
        """Merge into the buffers."""
        self.merge.run(self.scores, self.index, self.lengths, local_out=self.local, len_out=self.count)


def union(ranks: list[Rank]) -> Tensor:
    parts = [torch.where(r.local >= 0, ownership.position(r.local.long(), r.dcp), -1).cpu() for r in ranks]
    whole = selection.ascending(torch.cat(parts, dim=1))
    assert (whole[:, TOPK:] == -1).all()
    return whole[:, :TOPK]


@pytest.mark.parametrize("capacity", [Capacity(ROWS, TOPK), Capacity(4, 16)])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_graph_replayed_with_new_scores_is_right_or_says_that_it_is_not(
    protocol: str, capacity: Capacity
) -> None:
    stream, ranks = torch.cuda.Stream(), {}

    def one_rank(group: Group) -> None:
        # All ranks use one stream: what a rank enqueues after a meeting follows what all did before it.
        with torch.cuda.stream(stream):
            if group.rank() not in ranks:
                ranks[group.rank()] = Rank(group, protocol, capacity)
            rank = ranks[group.rank()]
            rank.merge._group = group if rank.merge._group is not None else None
            rank.run()

    LoopbackGroup.run(WORLD, one_rank)  # compiles and allocates outside the graph
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):
        LoopbackGroup.run(WORLD, one_rank)
    held = [ranks[r] for r in range(WORLD)]
    missed_somewhere = False
    for seed in range(4):
        scores, lengths = tied_rows(ROWS, WIDTH, seed)
        for rank in held:
            rank.load(scores, lengths)
            rank.merge.flag.zero_()
        graph.replay()
        torch.cuda.synchronize()
        expected, found = selection.select_positions(scores, lengths, TOPK), union(held)
        wrong = (found != expected).any(dim=1)
        assert (found[wrong] == -1).all()
        assert [int(rank.merge.flag) for rank in held] == [int(wrong.sum())] * WORLD
        missed_somewhere |= bool(wrong.any())
    assert missed_somewhere == (capacity.rows < ROWS and protocol != "full")
