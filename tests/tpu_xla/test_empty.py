"""Dimensions of size 0 on torch-xla's device: the reference's results, and no program where nothing is to be done."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

pytest.importorskip("torch_xla", reason="needs the environment of `nox -s tpu_xla`")
os.environ.setdefault("PJRT_DEVICE", "CPU")

from empty_cases import ANYTHING, BUSY, IDLE, Case, copied, planned, ran
from kda_cases import Layer, Rows, cuts, ids

from kimi_hal.ops.kda import KDASpec
from kimi_hal_tpu.xla.bridge import XLA


def same(case: Case, device: str) -> None:
    mine, his = ran(case, "tpu.xla", device), ran(case, "reference.torch", "cpu")
    assert [(t.shape, t.dtype) for t in mine] == [(t.shape, t.dtype) for t in his]
    for found, expected in zip(mine, his, strict=True):
        torch.testing.assert_close(found.float(), expected.float(), rtol=2e-2, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("name", sorted(IDLE))
def test_a_call_with_nothing_to_do_needs_no_program(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def traced(machine: XLA, operands: dict[str, Any], rows: int | None = None) -> None:
        raise AssertionError("a program was traced")

    monkeypatch.setattr(XLA, "run", traced)
    same(IDLE[name], device)


@pytest.mark.parametrize("name", sorted(BUSY))
def test_what_is_empty_is_named_by_nothing(name: str, device: str) -> None:
    same(BUSY[name], device)


@pytest.mark.parametrize("name", sorted(ANYTHING))
def test_scores_that_may_be_anything_are_returned_all_the_same(name: str, device: str) -> None:
    mine, his = ran(ANYTHING[name], "tpu.xla", device), ran(ANYTHING[name], "reference.torch", "cpu")
    assert [(t.shape, t.dtype) for t in mine] == [(t.shape, t.dtype) for t in his]


def test_records_behind_the_sequences_stay_what_they_are(device: str) -> None:
    spec, plan = KDASpec(num_heads=2, head_dim=4), planned("tpu.xla", device)
    rows, layer = Rows.random(spec, 8), Layer.random(spec)
    found = plan("kda_verify", spec)
    given = copied(
        [
            rows.x,
            layer.weight,
            rows.raw_g,
            rows.raw_beta,
            layer.A_log,
            layer.dt_bias,
            layer.conv_pool(4),
            layer.pool(4),
            ids(0, 1, 2),
            cuts(2, 2, 2),
            torch.full((4, found.records_bytes), 99, dtype=torch.uint8),
        ],
        device,
    )
    found.run(*given)
    records = given[-1].cpu()
    assert records[3].unique().tolist() == [99]
    assert all(len(records[n].unique()) > 1 for n in range(3))
