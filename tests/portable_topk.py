"""Checks of the portable ``topk_select``: against the reference, entry for entry."""

from __future__ import annotations

import math
from typing import Any

import torch
from index_cases import int32
from interpreted import device, on_device
from torch import Tensor

import kimi_hal as hal
from kimi_hal.ops.spec import DCP, Limits
from kimi_hal.ops.topk_merge import TopKSpec
from kimi_hal.reference.topk_merge import topk_select
from kimi_hal.triton import sizes, topk_merge

LIMITS = Limits(max_rows=64, max_reqs=64, max_context=1 << 16)
INF = math.inf
DEVICE = device()


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def same(spec: TopKSpec, scores: Tensor, row_len: Tensor, row_start: Tensor | None = None) -> Tensor:
    """Select by kernel and by reference, without and with buffers, and compare every entry; return the indices."""
    plan = hal.plan("topk_select", spec, LIMITS, device=DEVICE, implementation="nvidia.triton")
    run = on_device(plan.run, DEVICE)
    index, chosen = topk_select(spec, scores, row_len, row_start)
    wide = torch.full((len(scores), spec.topk + 3), 77, dtype=torch.int32)
    buffers: dict[str, Any] = {"out": wide[:, : spec.topk]}
    buffers["workspace"] = poisoned(plan.workspace_bytes)
    for given in ({}, buffers):
        got, got_scores = run(scores, row_len, row_start, **given)
        assert torch.equal(got, index), (got[got != index], index[got != index])
        assert torch.equal(got_scores.float().nan_to_num(9e9), chosen.float().nan_to_num(9e9))
    assert (wide[:, spec.topk :] == 77).all()
    return got


def poisoned(size: int) -> Tensor:
    """Return a workspace whose every byte is set."""
    room = torch.full((size + 256,), 0xFF, dtype=torch.uint8)
    start = -room.data_ptr() % 256
    return room[start : start + size]


def long_rows(seed: int = 0, rows: int = 3, width: int = 2500) -> Tensor:
    return torch.randn(rows, width, generator=generator(seed))


def thinned() -> None:
    """Let rows of more than 256 columns be thinned out before they are selected from."""
    topk_merge.SHORT = 256
    topk_merge.BLOCK, topk_merge.COLLECTED, topk_merge.GROUPS, topk_merge.FEW_GROUPS = 256, 1024, 64, 32


def check_short_rows() -> None:
    topk_merge.SHORT = 32768
    scores = torch.randn(7, 300, generator=generator())
    scores[1, ::3] = 0.5
    scores[2, 1::2] = -0.0
    scores[3, ::7] = math.nan
    scores[3, 1::5] = -math.nan
    scores[4] = -INF
    lengths = int32([300, 300, 299, 300, 40, 0, -4])
    for score in ("float32", "bfloat16"):
        same(TopKSpec(topk=64, score=score, return_selected=True), scores, lengths)
    same(TopKSpec(topk=400, return_selected=True), scores, lengths)
    same(TopKSpec(topk=1), scores, lengths)


def check_nan_ranks_below_minus_infinity_and_above_no_key() -> None:
    topk_merge.SHORT = 32768
    scores = torch.tensor([[math.nan, -INF, 1.0, -math.nan, 5.0]])
    assert same(TopKSpec(topk=3), scores, int32([4])).tolist() == [[0, 1, 2]]
    assert same(TopKSpec(topk=2), scores, int32([4])).tolist() == [[1, 2]]


def check_long_rows_are_thinned_out_exactly() -> None:
    thinned()
    scores = long_rows(rows=6)
    scores[5, 900:] = -INF
    lengths = int32([2500, 2499, 1, 0, 257, 2500])
    for score in ("float32", "bfloat16"):
        got = same(TopKSpec(topk=30, score=score, return_selected=True), scores, lengths)
        assert (got[0].diff() > 0).all()


def check_the_first_of_equal_scores_win_whatever_their_number() -> None:
    thinned()
    scores = torch.zeros(4, 2500)
    scores[0, 7::100] = 1.0  # fewer winners than k, the rest by position
    scores[1] = torch.arange(2500) % 5  # 500 ties at the top: more than candidates hold
    scores[2] = -0.0
    scores[2, 100:] = 0.0
    scores[3] = torch.arange(2500) // 1250
    got = same(TopKSpec(topk=60, return_selected=True), scores, int32([2500] * 4))
    assert got[2].tolist() == list(range(60))


def check_chunks_of_several_blocks() -> None:
    thinned()
    topk_merge.COLLECTED = 64
    same(TopKSpec(topk=30, return_selected=True), long_rows(rows=1, width=4200), int32([4200]))


def check_scores_in_special_order() -> None:
    thinned()
    rising = torch.arange(2500, dtype=torch.float32)
    close = 1.0 + torch.randperm(2500, generator=generator()).float() * 2.0**-23
    local = torch.randn(2500, generator=generator(1))
    local[1200:1260] += 9.0  # all winners stand together
    periodic = torch.randn(2500, generator=generator(2))
    periodic[3::256] += 9.0  # and here in one group
    scores = torch.stack([rising, -rising, close, local, periodic])
    same(TopKSpec(topk=60, return_selected=True), scores, int32([2500] * 5))


def check_nan_among_the_winners_of_a_long_row() -> None:
    thinned()
    scores = torch.full((2, 2500), math.nan)
    scores[0, 5:25] = torch.randn(20, generator=generator())
    scores[1, 2000] = -INF
    same(TopKSpec(topk=60, return_selected=True), scores, int32([2500, 2400]))


def check_infinities_and_subnormals_of_a_long_row() -> None:
    thinned()
    scores = torch.zeros(1, 2500)
    order = torch.randperm(2500, generator=generator())
    for i, value in enumerate((INF, -INF, 1e-45, -1e-45, 3e38, -0.0, math.nan)):
        scores[0, order[i * 60 : i * 60 + 60]] = value
    for k in (50, 61, 130, 200):
        same(TopKSpec(topk=k, return_selected=True), scores, int32([2500]))


def check_more_winners_than_candidates_are_held_for() -> None:
    thinned()
    scores = long_rows(rows=2, width=9000)
    assert sizes.candidates(5000) == 0
    same(TopKSpec(topk=5000, return_selected=True), scores, int32([9000, 4000]))


def check_windows() -> None:
    thinned()
    scores = long_rows(rows=6)
    spec = TopKSpec(topk=30, has_row_start=True, return_selected=True)
    start = int32([0, 1, 777, 2500, 2400, 9000])
    same(spec, scores, int32([2500, 2499, 900, 5, 500, 3]), start)
    same(spec, scores[:, :200], int32([2500, 199, 90, 5, 500, 3]), start)


def check_bfloat16_rows_with_a_stride() -> None:
    thinned()
    wide = torch.randn(3, 1300, generator=generator()).bfloat16()
    for scores in (wide[:, 5:1200], wide[:, :250]):
        same(
            TopKSpec(topk=30, scores_dtype="bfloat16", return_selected=True),
            scores,
            int32([1195, 300, 2]),
        )
        spec = TopKSpec(topk=30, scores_dtype="bfloat16", score="bfloat16", return_selected=True)
        same(spec, scores, int32([1195, 300, 2]))


def check_shards_take_their_bounds_from_global_lengths() -> None:
    thinned()
    scores = long_rows(rows=4, width=800)
    for rank in range(3):
        dcp = DCP(world=3, rank=rank, interleave=4)
        same(TopKSpec(topk=20, dcp=dcp), scores, int32([2400, 1201, 5, 13]))
    same(TopKSpec(topk=20, dcp=DCP(world=3, rank=1, index="replicated")), scores, int32([800, 700, 5, 13]))


def check_no_rows_and_no_columns() -> None:
    same(TopKSpec(topk=5), torch.zeros(0, 40), int32([]))
    assert (same(TopKSpec(topk=5), torch.zeros(2, 0), int32([0, 3])) == -1).all()


def check_rows_are_selected_from_some_at_a_time() -> None:
    thinned()
    kept, sizes.SELECT_ROWS = sizes.SELECT_ROWS, 2
    scores = long_rows(rows=5, width=600)
    same(TopKSpec(topk=30, return_selected=True), scores, int32([600, 500, 400, 300, 600]))
    sizes.SELECT_ROWS = kept


def check_a_row_has_the_same_winners_alone() -> None:
    thinned()
    scores = long_rows(rows=3, width=700)
    spec = TopKSpec(topk=30)
    together = same(spec, scores, int32([700, 650, 600]))
    for row, length in enumerate((700, 650, 600)):
        assert torch.equal(same(spec, scores[row : row + 1], int32([length]))[0], together[row])
