"""The bridge from torch to the Pallas kernels: one program a bucket, the operator's own signature, sentences."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("jax", reason="needs the environment of `nox -s tpu_jax`")

import kimi_hal as hal
from kimi_hal.errors import ContractError, SelectionError, UnknownNameError
from kimi_hal.ops.spec import Limits
from kimi_hal.ops.topk_merge import TopKSpec, topk_select
from kimi_hal_tpu.pallas import aot
from kimi_hal_tpu.static import refuse_dynamic


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KIMI_HAL_EXECUTION", "interpreted")
    monkeypatch.setenv("KIMI_HAL_BACKEND", "tpu")


def machine(plan: Any) -> Any:
    """Return what runs a plan's programs."""
    return plan.run.__globals__["call"].machine


@pytest.mark.usefixtures("interpreted")
def test_rows_of_one_bucket_share_a_program() -> None:
    limits = Limits(max_rows=16, max_reqs=4, row_buckets=(4, 16))
    plan = hal.plan("topk_select", TopKSpec(topk=4), limits, device="cpu", implementation="tpu.pallas")
    programs = []
    for rows in (1, 3, 4, 5):
        scores, lengths = torch.randn(rows, 100), torch.full((rows,), 100, dtype=torch.int32)
        index, _ = plan.run(scores, lengths)
        assert index.tolist() == scores.topk(4).indices.sort().values.tolist()
        programs.append(machine(plan).jitted._cache_size())
    assert programs == [1, 1, 1, 2]


@pytest.mark.usefixtures("interpreted")
def test_rows_outside_the_buckets_are_refused() -> None:
    limits = Limits(max_rows=16, max_reqs=4, row_buckets=(4, 8))
    plan = hal.plan("topk_select", TopKSpec(topk=4), limits, device="cpu", implementation="tpu.pallas")
    with pytest.raises(ContractError, match="T=9 is in no bucket; this plan compiles for 4, 8"):
        plan.run(torch.randn(9, 100), torch.full((9,), 100, dtype=torch.int32))


def test_a_dynamic_shape_is_refused() -> None:
    with pytest.raises(ContractError) as error:
        refuse_dynamic(topk_select, {"T": "s0", "L": 64})
    assert str(error.value) == (
        "topk_select: T=s0 is a dynamic shape, and a TPU program is compiled for one shape: compile with dynamic=False "
        "and pad to Limits.row_buckets"
    )


def test_a_topology_that_does_not_exist_is_refused_with_one_that_does() -> None:
    with pytest.raises(SelectionError) as error:
        aot.topology("tpu7x:3x5x7")
    assert "tpu7x:3x5x7 is no topology that libtpu knows" in str(error.value)
    assert str(error.value).endswith("the smallest of tpu7x is tpu7x:2x2x1")
    with pytest.raises(UnknownNameError, match="unknown TPU generation 'v7x'"):
        aot.topology("v7x:2x2x1")


def test_sparse_core_on_v5e_is_refused_before_anything_is_compiled() -> None:
    with pytest.raises(SelectionError, match="v5e has no SparseCore"):
        aot.compile_for("v5e", lambda x: x, [((8,), "float32")], ("sparse_core",))
