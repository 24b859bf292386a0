"""Experts as a traced program: a loop that runs as often as there are tiles, one compilation whatever the routes."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("torch_xla", reason="needs the environment of `nox -s tpu_xla`")
os.environ.setdefault("PJRT_DEVICE", "CPU")

import torch_xla
import torch_xla.debug.metrics as metrics
from torch import Tensor

import kimi_hal as hal
from kimi_hal import formats
from kimi_hal.ops.moe import MoESpec, RouteSpec
from kimi_hal.ops.spec import Limits
from kimi_hal.reference import moe as reference
from kimi_hal_tpu import expert_grid
from kimi_hal_tpu.xla import experts, loops

SPEC = MoESpec(
    num_experts=8, num_local=5, expert_offset=2, topk=2, hidden=64, intermediate=96, out_dtype="float32"
)


def weights(spec: MoESpec) -> list[Tensor]:
    fmt = formats.experts(spec.weights)
    drawn = [(2 * spec.intermediate, spec.hidden), (spec.hidden, spec.intermediate)]
    return [t for out, width in drawn for t in fmt.encode(torch.randn(spec.num_local, out, width) / 8)]


def compilations() -> int:
    data = metrics.metric_data("CompileTime")
    return int(data[0]) if data else 0


@pytest.mark.parametrize("count", [0, 1, 5])
def test_a_loop_runs_as_often_as_data_say(count: int) -> None:
    device = torch_xla.device()
    often = torch.tensor(count, device=device)
    shift = torch.tensor([10.0, 20.0], device=device)
    seen = torch.zeros(6, 2, device=device)

    def step(number: Tensor, changing: list[Tensor], fixed: list[Tensor]) -> list[Tensor]:
        row = (torch.arange(6, device=device) == number).float()[
            :, None
        ]  # an operand that the step makes itself
        return [changing[0] + row * (fixed[0] + number), changing[1] + 1]

    found, steps = loops.repeat(step, often, [seen, torch.zeros_like(often)], [shift])
    expected = torch.zeros(6, 2)
    for number in range(count):
        expected[number] = torch.tensor([10.0, 20.0]) + number
    assert torch.equal(found.cpu(), expected)
    assert int(steps.cpu()) == count


def test_tiles_hold_each_route_once_and_no_expert_without_rows() -> None:
    ids = torch.randint(0, 8, (40, 2), generator=torch.Generator().manual_seed(0)).int()
    ids[ids == 3] = 9
    local = reference.local_experts(SPEC, ids, None)
    factors = torch.rand(40, 2)
    tiles = experts.cut(SPEC, local, factors, 16)
    used = int(tiles.used)
    found = [
        (int(expert), int(row), float(factor))
        for expert, rows, own in zip(
            tiles.expert[:used], tiles.rows[:used], tiles.weights[:used], strict=True
        )
        for row, factor in zip(rows, own, strict=True)
        if row < 40
    ]
    expected = [
        (int(e), t, float(factors[t, j]))
        for t, pair in enumerate(local)
        for j, e in enumerate(pair)
        if e >= 0
    ]
    assert found == sorted(expected, key=lambda route: route[:2])
    assert 1 not in tiles.expert[:used]
    assert tiles.rows.shape == (expert_grid.most(SPEC, 80, 16), 16)
    assert (tiles.rows[used:] == 40).all()


def test_other_routes_share_a_compilation_and_give_the_references_sums(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KIMI_HAL_EXECUTION", "interpreted")
    monkeypatch.setenv("KIMI_HAL_BACKEND", "tpu")
    limits = Limits(max_rows=32, max_reqs=32, row_buckets=(32,))
    plan = hal.plan("moe_experts", SPEC, limits, device="cpu", implementation="tpu.xla")
    prepared, counts = weights(SPEC), []
    for rows, wanted in ((20, [2, 2]), (32, [4, 7]), (1, [0, 1])):
        before = compilations()
        ids = torch.tensor(wanted).repeat(rows, 1).int()
        x, factors = torch.randn(rows, SPEC.hidden).bfloat16(), torch.rand(rows, 2)
        found = plan.run(x, factors, ids, prepared)
        exact = reference.moe_experts(SPEC, x, factors, ids, prepared, dtype=torch.float64)
        torch.testing.assert_close(found.double(), exact, rtol=0.02, atol=0.02)
        counts.append(compilations() - before)
    assert counts == [1, 0, 0]


@pytest.mark.parametrize("groups", [1, 2])
def test_scores_below_the_smallest_normal_number_are_told_apart(
    groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KIMI_HAL_EXECUTION", "interpreted")
    monkeypatch.setenv("KIMI_HAL_BACKEND", "tpu")
    spec = RouteSpec(num_experts=8, topk=2, groups=groups, topk_groups=1)
    rows = ([-100, -90, -95, -89, -88, -99, -101, -92], [-100] * 8, [-103, -104, -200, 0, -90, -103, -1, -88])
    logits, bias = torch.tensor(rows).float(), torch.zeros(8)
    (weights, ids), (his_weights, his_ids) = (
        hal.plan("moe_route", spec, device="cpu", implementation=name).run(logits, bias)
        for name in ("tpu.xla", "reference.torch")
    )
    assert ids.tolist() == his_ids.tolist()
    torch.testing.assert_close(weights, his_weights, rtol=1e-6, atol=2.0**-126)  # a subnormal weight is lost
