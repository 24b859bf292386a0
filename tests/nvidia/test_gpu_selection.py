"""Selection by the CUDA kernels, entry for entry beside the reference, on scores that are hard to select from.

``topk_select``, and what ``indexer_topk`` launches behind its scores, which may write slots.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kimi_hal as hal
from kimi_hal.dispatch.contract import BuildContext, Sizes
from kimi_hal.ops.indexer import IndexerTopKSpec
from kimi_hal.ops.spec import DCP, Limits
from kimi_hal.ops.topk_merge import TopKSpec
from kimi_hal.parallel import ownership
from kimi_hal.reference import selection
from kimi_hal_nvidia import topk

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

D, PAGE = "cuda", 64
INDEX = "index.fp8.e4m3fn.pow2.page64"


def same(spec: TopKSpec, x: Tensor, length: Tensor, start: Tensor | None = None) -> None:
    """Select into a slice of a wider buffer and compare all of it with the reference."""
    limits = Limits(max_rows=len(x), max_reqs=len(x), max_context=max(1, x.shape[1]))
    plan = hal.plan("topk_select", spec, limits, device=D, implementation="nvidia.cuda")
    wide = torch.full((len(x), spec.topk + 3), 77, dtype=torch.int32, device=D)
    got, chosen = plan.run(x, length, start, out=wide[:, : spec.topk])
    score = getattr(torch, spec.score)
    keys = ownership.local_length(length.long(), ownership.of_keys(spec.dcp))
    index = selection.select_positions(x, keys, spec.topk, starts=start, score=score)
    assert torch.equal(got, index.int())
    assert (wide[:, spec.topk :] == 77).all()
    if spec.return_selected:
        expected = selection.as_score(selection.scores_at(x, index, start), score).to(chosen.dtype)
        assert torch.equal(chosen.nan_to_num(9e9), expected.nan_to_num(9e9))


def special(x: Tensor) -> Tensor:
    x[:, ::3], x[:, 1::5] = math.nan, -math.nan
    x[:, 2::11], x[:, 4::9], x[:, 5::13] = math.inf, -math.inf, -0.0
    return x


def few_numbers(x: Tensor) -> Tensor:
    few = torch.full_like(x, math.nan)
    few[:, 100:1500] = x[:, 100:1500]
    return few


def ties(x: Tensor) -> Tensor:
    tied = torch.zeros_like(x)
    tied[:, ::7] = 1.0
    return tied


def counted(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1], device=D, dtype=torch.float32).expand_as(x)


def alike(x: Tensor) -> Tensor:
    """Return scores that change slowly along a row, as those of text do."""
    total = torch.nn.functional.pad(x, (64, 0)).cumsum(1)
    return (total[:, 64:] - total[:, :-64]).contiguous()


def in_one_place(x: Tensor) -> Tensor:
    x[:, 500:3700] += 20
    return x


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "positive": lambda x: x.abs() * 3 + 100,
    "ties": ties,
    "equal": lambda x: torch.full_like(x, -2.5),
    "clustered": lambda x: (counted(x) * 2**-23 + 1)[:, torch.randperm(x.shape[1], device=D)].contiguous(),
    "ascending": lambda x: counted(x).contiguous(),
    "descending": lambda x: -counted(x),
    "special": special,
    "few-numbers": few_numbers,
    "least": lambda x: torch.full_like(x, -math.inf),
    "rounded": lambda x: x.bfloat16().float(),
    "alike": alike,
    "in-one-place": in_one_place,
}
#: Around k, around what a block holds in registers, around what it has room for, and long.
WIDTHS = (2048, 2049, 8184, 8185, 8191, 8192, 8193, 20000, 40001, 131072, 300007, 1 << 20)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [3, 66, 140])
def test_any_scores_are_selected_from_as_by_the_reference(kind: str, width: int, rows: int) -> None:
    if rows * width > 1 << 23:
        rows = 2
    x = KINDS[kind](torch.randn(rows, width, device=D))
    length = torch.full((rows,), width, dtype=torch.int32, device=D)
    length[0] = width - 3
    for row, n in enumerate((0, -4, 2047, 2048, 2049), start=5):
        if row < rows:
            length[row] = min(n, width)
    same(TopKSpec(return_selected=True), x, length)


FORMS: dict[str, dict[str, Any]] = {
    "rounded": {"score": "bfloat16", "return_selected": True},
    "bfloat16": {"topk": 777, "scores_dtype": "bfloat16", "return_selected": True},
    "one": {"topk": 1, "scores_dtype": "bfloat16", "score": "bfloat16"},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [8185, 8193, 40001])
@pytest.mark.parametrize("rows", [3, 140])
def test_every_type_of_scores(form: str, kind: str, width: int, rows: int) -> None:
    spec = TopKSpec(**FORMS[form])
    x = KINDS[kind](torch.randn(rows, width, device=D)).to(getattr(torch, spec.scores_dtype))
    same(spec, x, torch.full((rows,), width, dtype=torch.int32, device=D))


@pytest.mark.parametrize("width", [8185, 8193, 40001])
@pytest.mark.parametrize("rows", [3, 140])
def test_windows_strides_and_shards(width: int, rows: int) -> None:
    x = torch.randn(rows, width + 5, device=D)
    length = torch.full((rows,), width, dtype=torch.int32, device=D)
    start = torch.randint(0, 9, (rows,), dtype=torch.int32, device=D)
    same(TopKSpec(topk=128, has_row_start=True, return_selected=True), x, length, start)
    shard = DCP(world=3, rank=1, interleave=4)
    same(TopKSpec(topk=100, dcp=shard), x[:, 1 : width + 1], length * 2)


def test_many_long_rows_in_which_no_threshold_helps() -> None:
    x = torch.randn(133, 300000, device=D)
    x[1], x[2, ::3] = 7.0, 9.0
    same(TopKSpec(), x, torch.full((133,), 300000, dtype=torch.int32, device=D))


def test_a_captured_selection_follows_new_scores_and_lengths() -> None:
    x, length = torch.randn(2, 40000, device=D), torch.tensor([40000, 9], dtype=torch.int32, device=D)
    limits = Limits(max_rows=2, max_reqs=2, max_context=40000)
    plan = hal.plan("topk_select", TopKSpec(), limits, device=D, implementation="nvidia.cuda")
    out = torch.empty(2, 2048, dtype=torch.int32, device=D)
    plan.run(x, length, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.run(x, length, out=out)
    x.normal_()
    length.copy_(torch.tensor([30000, 40000]))
    graph.replay()
    assert torch.equal(out, selection.select_positions(x, length, 2048).int())


def selector(spec: IndexerTopKSpec) -> topk.Selector:
    """Return the selection of a plan of ``indexer_topk``."""
    major, minor = torch.cuda.get_device_capability()
    return topk.Selector(
        BuildContext(
            operator="indexer_topk",
            spec=spec,
            limits=Limits(max_rows=64, max_reqs=64, max_context=1 << 20),
            device=D,
            arch=f"sm_{major}{minor}",
            sizes=Sizes(),
            group=None,
            persistent=None,
            check=lambda **_: None,
            settings={},
        )
    )


def operands(rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Return a table of shuffled pages, and each row's request."""
    pages = rows * -(-width // PAGE)
    table = torch.randperm(pages, device=D, dtype=torch.int32).view(rows, -1)
    return table, torch.arange(rows, device=D, dtype=torch.int32).flip(0)


def same_slots(spec: IndexerTopKSpec, x: Tensor, length: Tensor, missing: list[int]) -> None:
    """Select and compare with the reference; the two pages ``missing`` have no place, and their keys -inf."""
    rows, width = x.shape
    table, row_req = operands(rows, width)
    pages = table.numel()
    table[:, missing] = torch.tensor([-1, pages], dtype=torch.int32, device=D)
    for page in missing:
        x[:, page * PAGE : (page + 1) * PAGE] = -math.inf
    out = torch.full((rows, spec.topk), -7, dtype=torch.int32, device=D)
    kept = torch.full((rows, spec.topk if spec.return_selected else 0), 7.0, device=D)
    selector(spec)(x, length, None, out, kept, table, row_req, pages)
    wanted = selection.select_positions(x, length.long(), spec.topk)
    page = table[row_req.long()].long().gather(1, wanted.clamp(min=0) // PAGE)
    there = (wanted >= 0) & (page >= 0) & (page < pages)
    slot = torch.where(there, page * PAGE + wanted.clamp(min=0) % PAGE, -1)
    order = (~there).long().sort(dim=1, stable=True).indices
    scores = torch.where(there, selection.scores_at(x, wanted, None), -math.inf).gather(1, order)
    assert torch.equal(out, slot.gather(1, order).int())
    if spec.return_selected:
        assert torch.equal(kept.nan_to_num(9e9), selection.as_score(scores, torch.float32).nan_to_num(9e9))


SHAPES = [
    (1, 2112),
    (3, 8192),
    (3, 16384),
    (70, 32768),
    (4, 32768),
    (2, 131072),
    (8, 131072),
    (40, 100032),
    (140, 65536),
    (1, 1 << 20),
]


@pytest.mark.parametrize("selected", [False, True])
@pytest.mark.parametrize("kind", ["normal", "ties", "least", "special"])
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_slots_are_those_of_the_winners_that_have_pages(
    rows: int, width: int, kind: str, selected: bool
) -> None:
    x = KINDS[kind](torch.randn(rows, width, device=D))
    length = torch.full((rows,), width, dtype=torch.int32, device=D)
    length[-1] = 2050
    spec = IndexerTopKSpec(index=INDEX, emit="slot", return_selected=selected)
    same_slots(spec, x, length, missing=[0, 7])
