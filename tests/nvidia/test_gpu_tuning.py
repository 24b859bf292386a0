"""On a GPU: a small run of ``kimi-hal bench --tune``, and plans that follow its table and the shipped one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import kimi_hal as hal
from kimi_hal.cli.main import main
from kimi_hal.dispatch import policy
from kimi_hal.dispatch.tuned_file import read
from kimi_hal.ops.sparse_mla import SparseMLASpec
from kimi_hal.ops.spec import Limits
from kimi_hal.ops.topk_merge import TopKSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def fresh() -> None:
    policy.thaw()


def test_a_plan_takes_what_this_device_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "here.json"
    words = ["bench", "topk_select", "sparse_mla", "--rows", "64", "--length", "8192", "--budget", "0.002"]
    with pytest.raises(SystemExit) as left:
        main([*words, "--tune", str(path)])
    assert not left.value.code
    lines = {line.operator: line for line in read(path, "here").lines}
    monkeypatch.setenv("KIMI_HAL_NVIDIA_TUNE", str(path))
    policy.thaw()
    selection = Limits(max_rows=64, max_reqs=64, max_context=8192)
    attention = SparseMLASpec(num_heads=12, latent="latent.fp8.e4m3fn.tensor", index_space="position")
    for operator, spec, limits in (
        ("topk_select", TopKSpec(), selection),
        ("sparse_mla", attention, Limits(max_rows=64, max_reqs=64)),
    ):
        plan = hal.plan(operator, spec, limits, device="cuda")
        fastest = lines[operator].ranking[0]
        assert plan.name == f"nvidia.{fastest.implementation}"
        assert dict(plan.built.context.configuration) == dict(fastest.configuration)
        assert f"{path}, line " in plan.explain()


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_name() != "NVIDIA H200",
    reason="needs an NVIDIA H200",
)
def test_on_an_h200_the_shipped_table_decides_unless_it_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits(max_rows=64, max_reqs=64, max_context=32768)
    plan = hal.plan("topk_select", TopKSpec(), limits, device="cuda")
    assert "kimi_hal_nvidia/tables/h200.json, line " in plan.explain()
    monkeypatch.setenv("KIMI_HAL_NVIDIA_TUNE", "off")
    policy.thaw()
    plan = hal.plan("topk_select", TopKSpec(), limits, device="cuda")
    assert "h200.json" not in plan.explain()
