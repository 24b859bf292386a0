"""FlashInfer's attention through its adapters: answers over functions of its signatures, claims, and every refusal."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import subprocess
import sys
from types import ModuleType
from typing import Any

import flashinfer_fakes
import pytest
from interpreted import names, outcomes
from machines import DRIVER, explained

from kimi_hal.dispatch import matching
from kimi_hal.dispatch.contract import Implementation
from kimi_hal.dispatch.explain import Explanation
from kimi_hal.ops.operator import get
from kimi_hal.ops.sparse_mla import SparseMLASpec
from kimi_hal.ops.spec import Limits
from kimi_hal_nvidia.adapters import flashinfer, libraries, xqa
from kimi_hal_nvidia.adapters.flashinfer_claims import ATTENTION

pytest.importorskip("triton", reason="Triton is not installed: its CPU interpreter cannot run")
MODULE = "flashinfer_adapters"
CLAIMS = {i.name: i for i in ATTENTION}
FACTS = {"flashinfer-python": "0.7.4", "triton": "3.6.0"}
LIMITS = Limits(max_rows=64, max_reqs=64)
FP8 = {"latent": "latent.fp8.e4m3fn.tensor", "q_dtype": "float8_e4m3fn"}
#: Implementation -> one of its architectures, and what of the model it covers.
COVERED: dict[str, tuple[str, dict[str, Any]]] = {
    "flashinfer": ("sm_100", {"latent": "latent.bf16"}),
    "flashinfer_fp8": ("sm_103", FP8),
    "flashinfer_records": ("sm_120", {"latent": "latent.flashmla.656"}),
    "xqa": ("sm_121", {"latent": "latent.bf16", "return_lse": False}),
    "xqa_fp8": ("sm_120", FP8 | {"return_lse": False}),
}


def refusals(name: str, arch: str, facts: dict[str, str] | None = None, **fields: Any) -> list[str]:
    """Return what the claim of an implementation says of a Spec on a device."""
    spec = SparseMLASpec(**({"num_heads": 12} | COVERED[name][1] | fields))
    (capability,) = CLAIMS[name].capabilities
    target = matching.Target(arch, FACTS if facts is None else facts)
    return list(matching.refusals(get("sparse_mla"), spec, LIMITS, capability, target))


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    return outcomes(MODULE, names(MODULE))


@pytest.mark.parametrize("check", names(MODULE))
def test_adapter(check: str, found: dict[str, str]) -> None:
    assert found[check] == "", found[check]


def signature(function: Any) -> str:
    """Return names and defaults of a function's parameters."""
    bare = [p.replace(annotation=p.empty) for p in inspect.signature(function).parameters.values()]
    return ", ".join(map(str, bare))


@pytest.mark.parametrize("name", flashinfer_fakes.SIGNATURES)
def test_what_stands_for_the_library_has_its_signature(name: str) -> None:
    assert signature(getattr(flashinfer_fakes, name)) == flashinfer_fakes.SIGNATURES[name]


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="FlashInfer is not installed")
@pytest.mark.parametrize("name", flashinfer_fakes.SIGNATURES)
def test_the_library_that_is_installed_has_this_signature(name: str) -> None:
    assert (
        signature(getattr(importlib.import_module("flashinfer.mla"), name))
        == flashinfer_fakes.SIGNATURES[name]
    )


def test_claims_and_sizes_import_no_torch_and_no_library() -> None:
    code = (
        "import sys, kimi_hal_nvidia.adapters.flashinfer_claims, kimi_hal_nvidia.adapters.flashinfer_sizes; "
        "assert not {'torch', 'flashinfer'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- claims -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COVERED)
def test_what_the_model_needs_is_covered_on_its_devices_alone(name: str) -> None:
    own = CLAIMS[name].capabilities[0].arch
    for arch in own:
        assert refusals(name, arch) == []
        assert refusals(name, arch, num_heads=96, index_space="local", page=64, has_index_len=True) == []
    for arch in {"sm_90", "sm_100", "sm_103", "sm_120"} - {*own}:
        assert refusals(name, arch) == [f"arch {arch} is not {' | '.join(own)}"]


def test_what_is_beyond_the_library_is_refused_by_name() -> None:
    assert refusals("flashinfer", "sm_100", page=48, topk=5000, latent="latent.nvfp4.352") == [
        "latent='latent.nvfp4.352' is not 'latent.bf16'",
        "page=48 is not 32 to 1048576, a multiple of 32",
        "topk=5000 is not 1 to 4096",
    ]
    assert refusals("flashinfer_fp8", "sm_100", q_dtype="bfloat16") == [
        "q_dtype='bfloat16' is not 'float8_e4m3fn'"
    ]
    assert refusals(
        "flashinfer_records", "sm_120", page=32, q_dtype="float8_e4m3fn", out_dtype="float32"
    ) == [
        "page=32 is not 64",
        "q_dtype='float8_e4m3fn' is not covered, only its default 'bfloat16'",
        "out_dtype='float32' is not covered, only its default 'bfloat16'",
    ]
    assert refusals("xqa", "sm_120", return_lse=True) == ["return_lse=True is not False"]


@pytest.mark.parametrize("name", COVERED)
def test_a_library_that_is_missing_or_too_old_is_told(name: str) -> None:
    arch = COVERED[name][0]
    assert refusals(name, arch, {"triton": "3.6.0", "flashinfer-python": "0.6.9"}) == [
        "flashinfer-python 0.6.9 is installed; it needs flashinfer-python>=0.7.4"
    ]
    if importlib.util.find_spec("flashinfer") is None:
        assert refusals(name, arch, {"triton": "3.6.0"}) == [
            "flashinfer-python is not installed; it needs flashinfer-python>=0.7.4"
        ]


@pytest.mark.parametrize("kernel", [pytest.param(i, id=i.name) for i in ATTENTION])
def test_who_was_never_run_promises_nothing_and_says_so(kernel: Implementation) -> None:
    assert kernel.not_run == "no such device was here"
    assert kernel.numerics


# ---- selection --------------------------------------------------------------------------------------------


def told(arch: str, name: str, implementation: str | None = None, **fields: Any) -> Explanation:
    """Explain a plan where such a device and FlashInfer are said to be."""
    spec = SparseMLASpec(**({"num_heads": 12} | COVERED[name][1] | fields))
    return explained("sparse_mla", spec, LIMITS, arch, implementation, libraries=FACTS | DRIVER)


@pytest.mark.parametrize("name", COVERED)
def test_it_is_taken_by_name_alone_and_explained(name: str) -> None:
    arch, numerics = COVERED[name][0], CLAIMS[name].numerics
    only = "it was not run: no such device was here; it is reachable by name only"
    free = told(arch, name, numerics=numerics)
    assert free.chosen != f"nvidia.{name}"
    assert next(c for c in free.candidates if c.full_name == f"nvidia.{name}").refusals == (only,)
    named = told(arch, name, f"nvidia.{name}")
    assert named.chosen == f"nvidia.{name}"
    assert named.why.endswith("; it was not run: no such device was here")


def test_another_device_is_told() -> None:
    named = told("sm_90", "flashinfer", "nvidia.flashinfer")
    assert named.chosen is None
    assert "arch sm_90 is not sm_100 | sm_103" in str(named)


# ---- the library's functions ------------------------------------------------------------------------------


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    package, module = ModuleType("flashinfer"), ModuleType("flashinfer.mla")
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.mla", module)
    return module


def test_a_library_without_the_function_is_told(library: ModuleType) -> None:
    with pytest.raises(ImportError, match=r"^flashinfer\.mla has no f: another version of the library$"):
        libraries.function("flashinfer.mla", "f", ("query",))


def test_a_function_with_other_arguments_is_told(library: ModuleType) -> None:
    library.f = lambda query, cache, more=None: query  # type: ignore[attr-defined]
    assert libraries.function("flashinfer.mla", "f", ("query", "cache")) is library.f
    for given in (("query",), ("query", "cache", "base")):
        said = f"flashinfer.mla.f takes (query, cache, more), this adapter gives ({', '.join(given)}): another version"
        with pytest.raises(ImportError, match="^" + re.escape(said)):
            libraries.function("flashinfer.mla", "f", given)


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is not None, reason="FlashInfer is installed")
def test_a_library_that_is_not_there_is_told() -> None:
    with pytest.raises(ImportError, match=r"^No module named 'flashinfer'$"):
        libraries.function("flashinfer.mla", "f", ())


def test_each_adapter_gives_what_the_library_takes(library: ModuleType) -> None:
    for name in flashinfer_fakes.SIGNATURES:
        setattr(library, name, getattr(flashinfer_fakes, name))
    assert libraries.function("flashinfer.mla", "trtllm_batch_decode_with_kv_cache_mla", flashinfer.TRTLLM)
    assert libraries.function("flashinfer.mla", "trtllm_batch_decode_with_kv_cache_mla", flashinfer.RECORDS)
    assert libraries.function("flashinfer.mla", "xqa_batch_decode_with_kv_cache_mla", xqa.GIVEN)
