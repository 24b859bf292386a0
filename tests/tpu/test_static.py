"""Calls in compiled sizes: what rows are padded to, what a machine is told of them, and what it is not told."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from static_calls import Recorded, called

from kimi_hal.errors import ContractError
from kimi_hal.ops.all_gather import GatherSpec
from kimi_hal.ops.kda import KDASpec
from kimi_hal.ops.operator import get
from kimi_hal.ops.spec import DCP, Limits
from kimi_hal.ops.topk_merge import TopKMergeSpec, TopKSpec
from kimi_hal_tpu import buckets
from kimi_hal_tpu.pallas import bridge
from kimi_hal_tpu.static import apart

KDA = KDASpec(num_heads=2, head_dim=4, checkpoints=True)


def rows_of(device: str, limits: Limits, rows: int) -> int | None:
    """Return the rows that a call is compiled for; ``None``: those that it has."""
    return called("kda_conv", KDA, limits, device).targets({"x": torch.zeros(rows, 24)}).get("T")


@pytest.mark.parametrize(
    ("most", "listed", "device", "expected"),
    [(4, (), "xla", 4), (0, (), "xla", 1), (32, (), "xla", 8), (4, (0, 2, 4), "xla", 2), (4, (), "cpu", 8)],
)
def test_a_call_on_no_rows_is_compiled_for_the_plans_smallest_bucket(
    most: int, listed: tuple[int, ...], device: str, expected: int
) -> None:
    assert rows_of(device, Limits(max_rows=most, max_reqs=2, row_buckets=listed), 0) == expected


def test_rows_of_the_device_are_taken_as_they_are_and_those_of_the_host_padded() -> None:
    limits = Limits(max_rows=12, max_reqs=2)
    assert buckets.on_device(limits) == (8, 12)
    assert (rows_of("xla", limits, 12), rows_of("cpu", limits, 12)) == (None, 16)
    assert rows_of("cpu:0", limits, 5) == 8
    with pytest.raises(ContractError, match="T=5 is in no bucket; this plan compiles for 8, 12"):
        rows_of("xla", limits, 5)


def test_a_machine_is_told_the_rows_before_padding_only_where_ranks_meet() -> None:
    limits, numbers = Limits(max_rows=8, max_reqs=2), torch.zeros(8, 4, dtype=torch.int32)
    together = Recorded(numbers, numbers[:, 0], numbers[:, :0])
    scores, lengths = torch.zeros(5, 4), torch.full((5,), 4, dtype=torch.int32)
    merge = called("topk_merge", TopKMergeSpec(topk=4, dcp=DCP()), limits, "cpu", together).function()
    merge(scores, numbers[:5], lengths)
    alone = Recorded(numbers, scores[:, :0])
    called("topk_select", TopKSpec(topk=4), limits, "cpu", alone).function()(scores, lengths)
    assert (together.rows, alone.rows) == (5, None)
    for machine in (together, alone):
        assert machine.operands["scores"].shape[0] == 8
        assert "rows" not in machine.operands


def test_nothing_that_is_apart_records_a_gradient() -> None:
    x = torch.ones(2, requires_grad=True)
    assert not apart(lambda x: x * 2)(x).requires_grad


def test_an_entry_for_tests_is_apart_as_the_function_that_it_calls_is() -> None:
    op, scores, buffer = get("indexer_topk"), torch.ones(2, 3), torch.zeros(2, 3, requires_grad=True)
    staged = SimpleNamespace(staged=lambda given: [scores])
    entry = bridge._test_entry(op, lambda *args: (None, None), staged)  # type: ignore[arg-type]
    operands = [p.name for p in op.signature.parameters.values() if p.default is p.empty]
    assert entry(*operands, all_scores_out=buffer)[-1] is buffer
    assert torch.equal(buffer.detach(), scores)
    assert buffer.grad_fn is None


def test_calls_in_compiled_sizes_can_be_imported_without_the_compiler() -> None:
    code = "import sys, kimi_hal_tpu.static; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("total", "said"),
    [
        (-1, "total=-1 is outside 0 to 3, 1 ranks of 3 rows"),
        (10**12, "total=1000000000000 is outside 0 to 3, 1 ranks of 3 rows"),
        (2.5, "total must be a number of rows, got float 2.5"),
    ],
)
def test_rows_that_ranks_cannot_have_are_refused_before_room_for_them_is_made(total: Any, said: str) -> None:
    call = called("all_gather", GatherSpec(layout="token_order", dtype="float32"), None, "cpu").function()
    with pytest.raises(ContractError) as error:
        call(torch.zeros(3, 2), total=total)
    assert str(error.value) == f"all_gather: {said}"
