"""Blackwell's index scores: interpreted on the CPU, refused in words, and never taken but by name."""

from __future__ import annotations

from typing import Any

import pytest
from interpreted import names, outcomes
from machines import explained

from kimi_hal.dispatch import matching, versions
from kimi_hal.dispatch.explain import Explanation
from kimi_hal.ops.indexer import IndexerSpec
from kimi_hal.ops.operator import get
from kimi_hal.ops.spec import Limits
from kimi_hal_nvidia.implementations import IMPLEMENTATIONS
from kimi_hal_nvidia.tensor_memory_claims import TENSOR_MEMORY

(CLAIM,) = TENSOR_MEMORY
NAME = "nvidia.triton_tcgen05"
CHECKS = names("tensor_memory_indexer")
LIMITS = Limits(max_rows=64, max_reqs=64, max_context=1024)
FP8, SHUFFLED = "index.fp8.e4m3fn.pow2.page64", "index.fp8.e4m3fnuz.f32.shuffled.page64"
NEW = {"triton": "3.9.0"}
TRITON = matching.distribution("triton") or "0"
NEEDS_TRITON = pytest.mark.skipif(
    versions.satisfies(TRITON, "<3.8"),
    reason=f"Triton {TRITON}: it needs 3.8, whose interpreter has scaled products",
)


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    return outcomes("tensor_memory_indexer", CHECKS)


@NEEDS_TRITON
@pytest.mark.parametrize("check", CHECKS)
def test_scores(check: str, found: dict[str, str]) -> None:
    assert found[check] == "", found[check]


def refusals(spec: Any, arch: str = "sm_100", installed: dict[str, str] = NEW) -> list[str]:
    target = matching.Target(arch, installed)
    return list(matching.refusals(get("indexer_logits"), spec, LIMITS, CLAIM.capabilities[0], target))


@pytest.mark.parametrize("arch", ["sm_100", "sm_103"])
@pytest.mark.parametrize("index", [FP8, "index.mxfp4.page64"])
def test_blackwell_s_two_architectures_are_claimed(arch: str, index: str) -> None:
    assert refusals(IndexerSpec(index=index), arch) == []


@pytest.mark.parametrize("arch", ["sm_90", "sm_120"])
def test_an_architecture_without_tensor_memory_is_refused(arch: str) -> None:
    assert refusals(IndexerSpec(index=FP8), arch) == [f"arch {arch} is not sm_100 | sm_103"]


def test_a_format_outside_the_claim_is_refused() -> None:
    assert refusals(IndexerSpec(index=SHUFFLED)) == [
        f"index={SHUFFLED!r} is not 'index.fp8.e4m3fn.f32.page64' | 'index.fp8.e4m3fn.pow2.page64' | "
        "'index.fp8.e4m3fn.ue8m0x4.page64' | 'index.mxfp4.page64'"
    ]


def test_a_triton_without_scaled_products_in_its_interpreter_is_refused() -> None:
    assert refusals(IndexerSpec(index=FP8), installed={"triton": "3.7.1"}) == [
        "triton 3.7.1 is installed; it needs triton>=3.8"
    ]


def test_it_ranks_behind_everything_that_fits_beside_it() -> None:
    others = [i for i in IMPLEMENTATIONS if i.operator == "indexer_logits" and i is not CLAIM]
    assert CLAIM.preferences[0].rank < min(p.rank for i in others for p in i.preferences)
    assert CLAIM.preferences[0].measured == "compiled, not run"
    assert CLAIM.execution == ("interpreted", "compile_only")


def told(
    arch: str, device: str, name: str | None = None, *numerics: str, execution: str = "native"
) -> Explanation:
    """Explain a plan on a machine with this architecture."""
    spec = IndexerSpec(index=FP8, numerics=numerics)
    return explained("indexer_logits", spec, LIMITS, arch, name, device=device, execution=execution)


def against(found: Explanation) -> list[str]:
    return [reason for c in found.candidates if c.full_name == NAME for reason in c.refusals]


@NEEDS_TRITON
def test_interpreted_it_is_taken_by_name() -> None:
    found = told("sm_90", "cpu", NAME, execution="interpreted")
    assert (found.chosen, found.execution) == (NAME, "interpreted")
    assert "it rounds beyond the contract (logits=fp8_sum)" in found.why


@NEEDS_TRITON
def test_unnamed_it_is_not_taken_where_a_spec_admits_what_it_rounds_either() -> None:
    found = told("sm_100", "cpu", None, "logits=fp8_sum", execution="interpreted")
    assert found.chosen == "nvidia.triton"
    assert against(found) == ["nvidia.triton is preferred"]
    assert against(told("sm_100", "cpu", execution="interpreted")) == [
        "it rounds beyond the contract (logits=fp8_sum); Spec.numerics or its name admits it"
    ]


@NEEDS_TRITON
def test_on_a_device_it_says_that_nothing_was_run() -> None:
    native = "it runs interpreted only, not native"
    assert against(told("sm_100", "cuda", NAME)) == [native]
    assert against(told("sm_90", "cuda", NAME)) == [native, "arch sm_90 is not sm_100 | sm_103"]


@NEEDS_TRITON
@pytest.mark.parametrize(
    ("heads", "limits", "rows"),
    [
        (32, LIMITS, 1),
        (32, Limits(max_rows=64, max_reqs=32, rows_per_req=2), 2),
        (32, Limits(max_rows=8192, max_reqs=4, uniform=False), 4),
        (5, Limits(max_rows=8192, max_reqs=4, uniform=False), 8),
        (33, Limits(max_rows=8192, max_reqs=4, uniform=False), 2),
        (128, Limits(max_rows=8192, max_reqs=4, uniform=False), 1),
    ],
)
def test_a_program_takes_as_many_rows_as_the_instruction_has_columns(
    heads: int, limits: Limits, rows: int
) -> None:
    from kimi_hal_nvidia import tensor_memory

    assert tensor_memory.rows_together(heads, limits) == rows
    assert tensor_memory.padded(heads) * rows <= tensor_memory.COLUMNS
