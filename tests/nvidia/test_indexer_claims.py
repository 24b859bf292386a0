"""What this backend's own indexer claims, what it refuses in which words, and how a launch is filled in."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from struct import unpack_from
from typing import Any

import pytest
import torch

from kimi_hal.dispatch import matching
from kimi_hal.ops.indexer import IndexerSpec, IndexerTopKSpec
from kimi_hal.ops.operator import get
from kimi_hal.ops.spec import Limits
from kimi_hal.ops.topk_merge import TopKSpec
from kimi_hal_nvidia import scores, sizes, topk
from kimi_hal_nvidia.implementations import IMPLEMENTATIONS
from kimi_hal_nvidia.indexer_claims import INDEXER
from kimi_hal_nvidia.layouts import Layout
from kimi_hal_nvidia.parameters import Parameters

H200 = matching.Target("sm_90", {"nvidia-driver": "580.159"})
LIMITS = Limits(max_rows=64, max_reqs=64, max_context=1 << 17)
CLAIMS = {i.operator: i.capabilities[0] for i in INDEXER if i.name == "cuda"}
FP8, SHUFFLED = "index.fp8.e4m3fn.pow2.page64", "index.fp8.e4m3fnuz.f32.shuffled.page64"


def refusals(spec: Any, operator: str, target: matching.Target = H200) -> list[str]:
    return list(matching.refusals(get(operator), spec, LIMITS, CLAIMS[operator], target))


def test_claims_import_no_torch() -> None:
    code = "import sys, kimi_hal_nvidia.implementations; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("operator", CLAIMS)
def test_code_for_blackwell_is_compiled_and_never_run(operator: str) -> None:
    found = [i for i in INDEXER if i.operator == operator and i.name == "cuda_blackwell"]
    assert [i.execution for i in found] == [("compile_only",)]
    assert found[0].capabilities[0].arch == ("sm_100", "sm_103")


@pytest.mark.parametrize("operator", CLAIMS)
def test_a_kernel_that_the_suite_has_passed_goes_before_the_portable_one(operator: str) -> None:
    ranks = {i.name: max(p.rank for p in i.preferences) for i in IMPLEMENTATIONS if i.operator == operator}
    assert ranks["cuda"] > ranks["triton"] > ranks["cuda_blackwell"]


def test_the_model_s_own_indexer_is_covered() -> None:
    assert refusals(IndexerSpec(index=FP8), "indexer_logits") == []
    assert refusals(IndexerTopKSpec(index="index.mxfp4.page64", emit="slot"), "indexer_topk") == []
    assert refusals(TopKSpec(has_row_start=True), "topk_select") == []


def test_an_architecture_without_the_instructions_is_refused_by_name() -> None:
    blackwell = matching.Target("sm_100", {"nvidia-driver": "580.159"})
    assert refusals(TopKSpec(), "topk_select", blackwell) == ["arch sm_100 is not sm_90"]


def test_a_driver_older_than_the_code_is_refused_by_version() -> None:
    old = matching.Target("sm_90", {"nvidia-driver": "550.54"})
    assert refusals(TopKSpec(), "topk_select", old) == [
        "nvidia-driver 550.54 is installed; it needs nvidia-driver>=580"
    ]


def test_heads_formats_and_k_beyond_the_claim_are_refused_together() -> None:
    assert refusals(IndexerTopKSpec(index=SHUFFLED, num_heads=96, topk=4096), "indexer_topk") == [
        f"index={SHUFFLED!r} is not 'index.fp8.e4m3fn.f32.page64' | 'index.fp8.e4m3fn.pow2.page64' | "
        "'index.fp8.e4m3fn.ue8m0x4.page64' | 'index.mxfp4.page64'",
        "num_heads=96 is not 1 to 64",
        "topk=4096 is not 1 to 2048",
    ]


@pytest.mark.parametrize(
    ("heads", "rows", "name"),
    [(32, 1, "32x1"), (8, 2, "32x2"), (32, 5, "32x8"), (33, 1, "64x1"), (64, 9, "64x4")],
)
def test_rows_of_a_request_share_what_they_read(heads: int, rows: int, name: str) -> None:
    ring = scores.ring_for(heads, Limits(max_rows=64 * rows, max_reqs=64, rows_per_req=rows))
    assert f"{ring.heads}x{ring.rows}" == name


@pytest.mark.parametrize(
    ("rows", "width", "blocks"),
    [(1, 1 << 20, 16), (1, 1 << 15, 2), (1, 9000, 1), (64, 1 << 17, 2), (100, 1 << 20, 1)],
)
def test_a_row_has_as_many_blocks_as_stand_beside_each_other(rows: int, width: int, blocks: int) -> None:
    assert topk.blocks_of(rows, width) == blocks


def test_workspace_holds_the_scores_of_some_rows_in_whole_pages() -> None:
    spec = IndexerTopKSpec(index=FP8)
    assert sizes.indexer_topk(spec, LIMITS, "sm_90").workspace == 64 * (1 << 17) * 4
    many = Limits(max_rows=8192, max_reqs=1, max_context=1 << 17)
    assert sizes.indexer_topk(spec, many, "sm_90").workspace == 256 << 20


class Launched(topk.Selector):
    """A selector whose launches are written down instead."""

    def __init__(self) -> None:
        self.parameters = Parameters(topk.ADDRESSES, topk.NUMBERS)
        self.launched: list[tuple[Any, ...]] = []
        self.launch = {what: self.note(what) for what in topk.FORMS}
        self.stream, self.topk, self.page = lambda: 7, 4, 1
        self.shard, self.emission, self.facts = (1, 0, 1), (1, 0, 0), ()
        self.layout = Layout()

    def note(self, what: str) -> Any:
        return lambda *grid: self.launched.append((what, *grid))


@pytest.fixture
def selector() -> Launched:
    return Launched()


def operands(rows: int, width: int, stride: int = 0) -> tuple[torch.Tensor, ...]:
    x = torch.empty(rows, stride or width, dtype=torch.float32)[:, :width]
    return (
        x,
        torch.empty(rows, dtype=torch.int32),
        torch.empty(rows, 4, dtype=torch.int32),
        torch.empty(rows, 4),
    )


def test_a_launch_holds_addresses_strides_and_sizes(selector: Launched) -> None:
    x, length, out, chosen = operands(3, 100, 128)
    selector(x, length, None, out, chosen)
    content = selector.parameters.content
    pointers = (x.data_ptr(), length.data_ptr(), 0, out.data_ptr(), chosen.data_ptr(), 0, 0)
    assert unpack_from("7Q", content) == pointers
    assert unpack_from("7q", content, 56) == (128, 4, 4, 0, 1, 0, 0)
    assert unpack_from("12i", content, 112) == (100, 4, 1, 1, 0, 1, 0, 0, 1, 1, 0, 0)
    assert selector.launched == [("short", 3, 1, 7, 1)]


def test_rows_of_no_columns_all_begin_at_no_address(selector: Launched) -> None:
    _, length, out, chosen = operands(3, 4)
    selector(torch.empty(3, 0), length, None, out, chosen)
    assert unpack_from("Q", selector.parameters.content) == (0,)
    assert unpack_from("q", selector.parameters.content, 56) == (0,)
    assert selector.launched == [("short", 3, 1, 7, 1)]


def test_numbers_are_written_anew_where_shapes_change_and_change_back(selector: Launched) -> None:
    small, large = operands(1, 64), operands(2, 1 << 17)
    for x, length, out, chosen in (small, large, small):
        selector(x, length, None, out, chosen)
        assert unpack_from("i", selector.parameters.content, 112) == (x.shape[1],)
    assert [grid[:2] for grid in selector.launched] == [("short", 1), ("team", 32), ("short", 1)]


def test_rows_at_odd_addresses_have_a_vector_less_of_room(selector: Launched) -> None:
    x, length, out, chosen = operands(1, 8193)
    selector(x[:, :8192], length, None, out, chosen)
    selector(x[:, 1:], length, None, out, chosen)
    assert [grid[0] for grid in selector.launched] == ["middle", "middle"]
    selector(torch.empty(1, 8192), length, None, out, chosen)
    assert selector.launched[-1][0] == "short"


def test_two_threads_that_call_one_plan_launch_their_own_addresses(selector: Launched) -> None:
    seen: list[tuple[int, int]] = []

    def note(*grid: int) -> None:
        content = selector.parameters.content
        seen.append((unpack_from("Q", content)[0], unpack_from("i", content, 112)[0]))

    selector.launch = dict.fromkeys(topk.FORMS, note)
    calls = [operands(1, width) for width in (64, 9000)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as pool:
            for call in [*calls] * 500:
                pool.submit(selector, call[0], call[1], None, *call[2:])
    finally:
        sys.setswitchinterval(interval)
    assert len(seen) == 1000
    assert {*seen} == {(x.data_ptr(), x.shape[1]) for x, *_ in calls}


@pytest.mark.parametrize(
    ("rows", "requests", "name"),
    [
        (1, 1, "_one"),
        (2, 1, "_one"),
        (3, 1, ""),
        (2, 2, ""),
        (128, 64, ""),
        (129, 129, "_many"),
        (2048, 1, "_many"),
    ],
)
def test_each_number_of_rows_has_its_kernel(rows: int, requests: int, name: str) -> None:
    ring = scores.Ring(32, 2, {})
    assert ring.kernel("fp8", ring.kind(rows, requests)) == f"fp8_32x2{name}"
