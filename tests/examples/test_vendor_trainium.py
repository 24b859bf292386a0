"""The worked example of a vendor: installed by pip, held by the suite, chosen and refused as its page says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch

import kimi_hal as hal
from inputs import example
from kimi_hal import specs
from kimi_hal.dispatch.contract import Probe
from kimi_hal.errors import ContractError, SelectionError, SettingsError
from kimi_hal.ops.sparse_mla import SparseMLASpec

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "vendor_trainium"
FP8 = "latent.fp8.e4m3fn.tensor"
INDEX = "index.fp8.e4m3fn.pow2.page64"
SPEC = SparseMLASpec(num_heads=12, latent=FP8)
LIMITS = specs.Limits(max_rows=8, max_reqs=8, max_context=1024)


@pytest.fixture
def trainium(plugins: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the example for one test, and run its kernels on the CPU."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    plugins.points.append(EntryPoint(name="trainium", value="kimi_hal_trainium.plugin", group="kimi_hal"))
    monkeypatch.setenv("KIMI_HAL_BACKEND", "trainium")
    monkeypatch.setenv("KIMI_HAL_EXECUTION", "interpreted")


def test_it_installs_and_its_own_tests_pass_with_the_suite(tmp_path: Path) -> None:
    pytest.importorskip("pip", reason="installs a package")
    shutil.copytree(EXAMPLE, tmp_path / "source")  # a build leaves files behind
    options = "--quiet --no-build-isolation --no-deps --no-index --disable-pip-version-check"
    pip = [sys.executable, "-m", "pip", "install", *options.split(), "--target", str(tmp_path / "site")]
    subprocess.run([*pip, str(tmp_path / "source")], check=True)
    env = {n: v for n, v in os.environ.items() if not n.startswith(("KIMI_HAL_", "PYTEST_"))}
    env["PYTHONPATH"] = os.pathsep.join(map(str, (tmp_path / "site", ROOT, ROOT / "conformance")))
    env["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=tmp_path / "source", env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "9 passed" in done.stdout


def test_what_the_contract_admits_is_taken_and_the_rounding_kernel_left(trainium: None) -> None:
    answer = hal.explain("sparse_mla", SPEC, device="cpu")
    named = {c.full_name: c.refusals for c in answer.candidates}
    assert answer.chosen == "trainium.tiled"
    assert named["trainium.tiled_bf16"] == (
        "it rounds beyond the contract (attn.p=bf16); Spec.numerics or its name admits it",
    )


def test_a_spec_that_admits_the_rounding_gets_the_preferred_kernel(trainium: None) -> None:
    spec = SparseMLASpec(num_heads=12, latent=FP8, numerics=("attn.p=bf16",))
    answer = hal.explain("sparse_mla", spec, device="cpu")
    assert answer.chosen == "trainium.tiled_bf16"
    assert "rank 1 before trainium.tiled" in answer.why


def test_what_it_does_not_claim_is_refused_with_every_reason(trainium: None) -> None:
    spec = SparseMLASpec(num_heads=12, latent=FP8, has_index_len=True, index_space="local", page=8192)
    with pytest.raises(SelectionError) as caught:
        hal.plan("sparse_mla", spec, LIMITS, device="cpu")
    first, second = caught.value.refusals["trainium.tiled"]
    assert first == (
        "[1 of 2] page=8192 is not 1 to 4096; index_space='local' is not 'slot' | 'position'; "
        "has_index_len=True is not covered, only its default False"
    )
    assert second.startswith(f"[2 of 2] latent={FP8!r} is not 'latent.bf16'; page=8192")


@pytest.fixture
def driver(trainium: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that puts a device with a driver of some version here."""
    from kimi_hal_trainium import plugin

    def install(version: str) -> None:
        probe = Probe(True, "trn2", ("AWS Trainium2 neuron0",), {"neuron-driver": version})
        monkeypatch.setattr(plugin, "probe", lambda: probe)
        monkeypatch.setenv("KIMI_HAL_EXECUTION", "native")
        monkeypatch.delenv("KIMI_HAL_BACKEND")

    return install


def test_a_device_is_found_by_auto(driver: Any) -> None:
    driver("2.27.4.0")
    answer = hal.explain("sparse_mla", SPEC, device="cpu")
    assert (answer.chosen, answer.execution) == ("trainium.tiled", "native")
    assert answer.why.startswith("auto found AWS Trainium2 neuron0 (trn2)")


def test_a_driver_that_is_too_old_is_refused(driver: Any) -> None:
    driver("2.19")
    with pytest.raises(
        SelectionError, match=r"neuron-driver 2\.19 is installed; it needs neuron-driver>=2\.20"
    ):
        hal.plan("sparse_mla", SPEC, LIMITS, device="cpu")


def test_memory_is_known_before_a_device_exists(trainium: None) -> None:
    attend = hal.plan("sparse_mla", SPEC, LIMITS, device="cpu")
    score = hal.plan("indexer_logits", specs.IndexerSpec(index=INDEX), LIMITS, device="cpu")
    assert (attend.workspace_bytes, attend.step_bytes, attend.persistent_bytes) == (512 * 576 * 4, 0, 1024)
    assert (score.workspace_bytes, score.step_bytes, score.persistent_bytes) == (512 * 128 * 4, 32, 1024)


@pytest.mark.parametrize("tile", ["128", "256", "512"])
def test_scores_agree_with_the_reference_whatever_the_tile_and_the_step(
    trainium: None, monkeypatch: pytest.MonkeyPatch, tile: str
) -> None:
    monkeypatch.setenv("KIMI_HAL_TRAINIUM_TILE", tile)
    spec, limits, args, _ = example("indexer_logits")
    plan = hal.plan("indexer_logits", spec, limits, device="cpu")
    reference = hal.plan("indexer_logits", spec, limits, device="cpu", implementation="reference.torch")
    step, workspace = plan.new_step().fill_(0xFF), plan.new_workspace().fill_(0xFF)
    plan.prepare(args[5], args[6], args[4], step=step)
    prepared = plan.run(*args, step=step, workspace=workspace)
    alone, wanted = plan.run(*args), reference.run(*args)
    for row, length in enumerate(args[6].clamp(min=0).tolist()):
        torch.testing.assert_close(prepared[row, :length], wanted[row, :length], rtol=1e-6, atol=1e-7)
        assert torch.equal(prepared[row, :length], alone[row, :length])


def test_positions_go_through_the_block_table_and_hostile_ones_contribute_nothing(trainium: None) -> None:
    """The suite tries positions with ``index_len`` and DCP only, which this kernel does not claim."""
    g = torch.Generator().manual_seed(5)
    spec = SparseMLASpec(num_heads=3, latent="latent.bf16", page=16, topk=40, index_space="position")
    cache = torch.randn(9, 16 * 576, generator=g).bfloat16().view(torch.uint8)
    cache[3] = 0xFF  # NaN in a page that no table names
    table = torch.tensor([[4, 1, -1, 8], [0, 99, 2, 5]], dtype=torch.int32)
    indices = torch.randint(-2, 70, (6, 40), generator=g).int()
    indices[5] = -1
    row_req = torch.tensor([0, 1, 1, 0, 7, -3], dtype=torch.int32)
    operands = {
        "q": torch.randn(6, 3, 576, generator=g).bfloat16(),
        "cache": cache,
        "indices": indices,
        "block_table": table,
        "row_req": row_req,
    }
    out, lse = hal.plan("sparse_mla", spec, LIMITS, device="cpu").run(**operands)
    reference = hal.plan("sparse_mla", spec, LIMITS, device="cpu", implementation="reference.torch")
    wanted, wanted_lse = reference.run(**operands)
    torch.testing.assert_close(out, wanted, rtol=2**-7, atol=1e-6)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-6, atol=1e-6)
    assert lse[4:].eq(-torch.inf).all()
    assert out[4:].eq(0).all()


def test_two_values_of_its_variable_are_two_sizes_of_one_result(
    trainium: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, limits, args, kwargs = example("sparse_mla")
    results = []
    for tile in ("128", "512"):
        monkeypatch.setenv("KIMI_HAL_TRAINIUM_TILE", tile)
        plan = hal.plan("sparse_mla", spec, limits, device="cpu", implementation="trainium.tiled")
        results.append(plan.run(*args, **kwargs)[1])
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)


def test_a_wrong_value_of_its_variable_is_an_error_when_planning(
    trainium: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KIMI_HAL_TRAINIUM_TILE", "100")
    with pytest.raises(SettingsError) as caught:
        hal.plan("sparse_mla", SPEC, LIMITS, device="cpu")
    assert str(caught.value) == "KIMI_HAL_TRAINIUM_TILE='100' is not 128, 256 or 512"


def test_operands_that_break_the_contract_are_refused_with_all_reasons(trainium: None) -> None:
    plan = hal.plan("topk_select", specs.TopKSpec(topk=4), LIMITS, device="cpu")
    with pytest.raises(ContractError) as caught:
        plan.run(torch.zeros(2, 8, dtype=torch.float64), torch.tensor([1, 2]))
    assert str(caught.value) == (
        "topk_select: scores must be float32, got float64; row_len must be int32, got int64"
    )


def test_the_readme_shows_files_that_exist() -> None:
    text = (EXAMPLE / "README.md").read_text()
    for name in ("plugin", "implementations", "scores", "select", "attention", "device"):
        assert f"`{name}.py`" in text
        assert (EXAMPLE / "kimi_hal_trainium" / f"{name}.py").is_file()
    assert "**by name only**" in text
