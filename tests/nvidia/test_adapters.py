"""Adapters: what they compute over operators with the libraries' signatures; what is said where one is wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import peer_fakes
import pytest
from interpreted import names, outcomes

from kimi_hal.dispatch import matching
from kimi_hal.ops.indexer import IndexerSpec
from kimi_hal.ops.operator import get
from kimi_hal.ops.sparse_mla import SparseMLASpec
from kimi_hal.ops.spec import Limits
from kimi_hal.ops.topk_merge import TopKSpec
from kimi_hal_conformance import waivers
from kimi_hal_conformance.cases import load
from kimi_hal_nvidia.adapters import libraries
from kimi_hal_nvidia.adapters.claims import ADAPTERS
from kimi_hal_nvidia.implementations import IMPLEMENTATIONS

pytest.importorskip("triton", reason="Triton is not installed: its CPU interpreter cannot run")
MODULE = "peer_adapters"
ROOT = Path(__file__).resolve().parents[2]
FACTS = {"deep-gemm": "2.8.1", "vllm": "0.33.0", "sgl-flash-mla": "1.0.0", "flashinfer-python": "0.7.4"}
H200 = matching.Target("sm_90", FACTS | {"triton": "3.6.0"})
CLAIMS = {(i.operator, i.name): i for i in ADAPTERS}
OPERATORS = {IndexerSpec: "indexer_logits", SparseMLASpec: "sparse_mla", TopKSpec: "topk_select"}


def refusals(name: str, spec: object, limits: Limits, target: matching.Target = H200) -> list[str]:
    found = CLAIMS[OPERATORS[type(spec)], name]
    each = [
        list(matching.refusals(get(found.operator), spec, limits, c, target))  # type: ignore[arg-type]
        for c in found.capabilities
    ]
    return min(each, key=len)


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    return outcomes(MODULE, names(MODULE))


@pytest.mark.parametrize("check", names(MODULE))
def test_adapter(check: str, found: dict[str, str]) -> None:
    assert found[check] == "", found[check]


def test_claims_import_no_torch_and_no_library() -> None:
    code = (
        "import sys, kimi_hal_nvidia.adapters.claims, kimi_hal_nvidia.adapters.sizes; "
        "assert not {'torch', 'vllm', 'deep_gemm', 'flashinfer', 'flash_mla'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_adapter_is_never_taken_for_its_rank() -> None:
    for adapter in ADAPTERS:
        same = (i for i in IMPLEMENTATIONS if i.operator == adapter.operator and i not in ADAPTERS)
        own = [i for i in same if "native" in i.execution]  # what never runs on a device is not taken either
        assert max(p.rank for p in adapter.preferences) < min(max(p.rank for p in i.preferences) for i in own)


def test_an_adapter_rounds_by_a_class_or_has_its_own_order() -> None:
    for adapter in ADAPTERS:
        free = {c.properties.tie_rule for c in adapter.capabilities}
        assert adapter.numerics or free == {"any"}


DECODE = Limits(max_rows=64, max_reqs=64)
FP8 = "index.fp8.e4m3fn.pow2.page64"


def test_what_the_model_needs_is_covered() -> None:
    assert refusals("deepgemm", IndexerSpec(index=FP8), DECODE) == []
    prefill = Limits(max_rows=4096, max_reqs=2, rows_per_req=2048, uniform=False)
    assert refusals("deepgemm", IndexerSpec(index=FP8), prefill) == []
    assert refusals("vllm", TopKSpec(), DECODE) == []
    assert refusals("flashinfer", TopKSpec(has_row_start=True), DECODE) == []
    assert refusals("flashmla", SparseMLASpec(num_heads=12, latent="latent.flashmla.656"), DECODE) == []
    rows = SparseMLASpec(num_heads=12, latent="latent.bf16", return_lse=False)
    assert refusals("flashmla", rows, DECODE) == []


def test_what_is_beyond_a_library_is_refused_by_name() -> None:
    assert refusals("deepgemm", IndexerSpec(index="index.mxfp4.page64", num_heads=8), DECODE) == [
        "index='index.mxfp4.page64' is not 'index.fp8.e4m3fn.f32.page64' | 'index.fp8.e4m3fn.pow2.page64'",
        "num_heads=8 is not 32 | 64",
    ]
    assert refusals("vllm", TopKSpec(topk=100, ordered=True), DECODE) == [
        "topk=100 is not 512 | 1024 | 2048",
        "ordered=True is not covered, only its default False",
    ]
    spec = SparseMLASpec(num_heads=12, latent="latent.fp8.e4m3fn.tensor", q_dtype="float8_e4m3fn")
    assert refusals("flashmla", spec, DECODE) == [
        "latent='latent.fp8.e4m3fn.tensor' is not 'latent.flashmla.656'",
        "q_dtype='float8_e4m3fn' is not covered, only its default 'bfloat16'",
    ]


def test_a_library_that_is_missing_or_too_old_is_told() -> None:
    old = matching.Target("sm_90", {"deep-gemm": "2.5.0", "vllm": "0.33.0"})
    first = CLAIMS["indexer_logits", "deepgemm"].capabilities[0]
    assert list(matching.refusals(get("indexer_logits"), IndexerSpec(index=FP8), DECODE, first, old)) == [
        "deep-gemm 2.5.0 is installed; it needs deep-gemm>=2.8,<2.9"
    ]
    assert refusals("deepgemm", IndexerSpec(index=FP8), DECODE, old) == []  # vLLM's copy serves
    none = matching.Target("sm_90", {})
    assert refusals("vllm", TopKSpec(), DECODE, none) == ["vllm is not installed; it needs vllm>=0.33"]


def test_a_package_that_is_not_there_is_told() -> None:
    with pytest.raises(ImportError, match=r"^no_such_library is not installed$"):
        libraries.folder("no_such_library")


def test_a_package_without_its_kernels_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernelless").mkdir()
    (tmp_path / "kernelless" / "__init__.py").touch()
    (tmp_path / "kernelless" / "_broken.so").write_bytes(b"no library")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ImportError, match=r"^kernelless is installed, but has no _C\*\.so: a build without CUDA"
    ):
        libraries.load("kernelless", "_C*.so")
    with pytest.raises(ImportError, match=r"^_broken\.so of kernelless does not load: "):
        libraries.load("kernelless", "_broken*.so")
    assert "kernelless" not in sys.modules


def test_an_operator_with_other_arguments_is_told() -> None:
    schemas = ("f(Tensor a, int b, bool c=False) -> Tensor", "g(Tensor a, int b) -> Tensor")
    peer_fakes.register("kimi_hal_fake", schemas, f=lambda a, b, c=False: a, g=lambda a, b: a)
    assert libraries.operator("kimi_hal_fake", "f", ("a", "b"))
    with pytest.raises(ImportError) as other:
        libraries.operator("kimi_hal_fake", "g", ("a", "bees"))
    assert str(other.value) == (
        "torch.ops.kimi_hal_fake.g takes (a, b), this adapter gives (a, bees): another version of the library"
    )
    with pytest.raises(
        ImportError, match=r"^torch\.ops\.kimi_hal_fake\.g takes \(a, b\), this adapter gives \(a\)"
    ):
        libraries.operator("kimi_hal_fake", "g", ("a",))
    with pytest.raises(
        ImportError, match=r"^torch\.ops\.kimi_hal_fake has no h: another version of the library$"
    ):
        libraries.operator("kimi_hal_fake", "h", ())


def test_a_known_failure_is_waived_for_an_adapter_that_never_counts_as_conforming() -> None:
    load()
    for waiver in waivers.read(ROOT / "backends" / "nvidia" / "waivers.toml"):
        adapter = CLAIMS[waiver.case.partition("/")[0], waiver.implementation.partition(".")[2]]
        assert {c.properties.tie_rule for c in adapter.capabilities} == {"any"}
