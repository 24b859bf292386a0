"""The portable latent kernels: how they are cut and chosen, and each check of ``tests/portable_sparse_mla.py``."""

from __future__ import annotations

import pytest
from interpreted import names, outcomes

from kimi_hal.ops.sparse_mla import SparseMLASpec
from kimi_hal.ops.spec import Limits
from kimi_hal.triton import latent_plan
from kimi_hal.triton.sparse_mla_claims import FORMATS, sparse_mla

CHECKS = names("portable_sparse_mla")


@pytest.mark.parametrize("heads", range(1, 129))
def test_a_block_of_heads_pads_less_than_one_dot(heads: int) -> None:
    for most in (16, 32):
        block = latent_plan.head_block(heads, most)
        assert block in (16, most)
        assert -(-heads // block) * block - heads < latent_plan.LEAST_HEADS


@pytest.mark.parametrize(
    ("topk", "programs"), [(1, 1), (64, 1), (65, 1), (2048, 1), (2048, 64), (2048, 10**6)]
)
def test_splits_are_a_power_of_two_of_whole_tiles(topk: int, programs: int) -> None:
    spec = SparseMLASpec(num_heads=12, latent="latent.bf16", topk=topk)
    cut = latent_plan.cut(spec, Limits(max_rows=programs, max_reqs=1), "sm_90")
    assert cut.splits & (cut.splits - 1) == 0
    assert cut.chunk % cut.keys == 0
    assert cut.splits * cut.chunk >= topk
    assert (cut.splits - 1) * cut.chunk < topk or cut.splits == 1


def test_a_plan_of_many_rows_needs_no_workspace() -> None:
    spec = SparseMLASpec(num_heads=12, latent="latent.bf16")
    assert latent_plan.sparse_mla(spec, Limits(max_rows=4096, max_reqs=64), "sm_90").workspace == 0


def test_claims_cover_every_format_that_kernels_know() -> None:
    assert set(FORMATS.values) == set(latent_plan.FORMATS)


def test_only_the_implementation_that_rounds_probabilities_says_so() -> None:
    declared = {i.name: i.numerics for i in sparse_mla(("sm_90",)) if i.operator == "sparse_mla"}
    assert declared == {"triton": (), "triton_p16": ("attn.p=bf16",)}


def test_a_kernel_is_not_compiled_anew_for_a_width_of_one() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from kimi_hal.triton import attention

    assert list(attention.attend.do_not_specialize) == ["width"]


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    pytest.importorskip("triton", reason="Triton is not installed: its CPU interpreter cannot run")
    return outcomes("portable_sparse_mla", CHECKS)


@pytest.mark.parametrize("check", CHECKS)
def test_sparse_mla(check: str, found: dict[str, str]) -> None:
    assert found[check] == "", found[check]


@pytest.fixture(scope="module")
def found_on_gpu() -> dict[str, str]:
    pytest.importorskip("triton", reason="Triton is not installed")
    return outcomes("portable_sparse_mla", CHECKS, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("check", CHECKS)
def test_sparse_mla_on_a_gpu(check: str, found_on_gpu: dict[str, str]) -> None:
    assert found_on_gpu[check] == "", found_on_gpu[check]
