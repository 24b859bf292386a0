"""NVIDIA's kernels become code of Hopper and Blackwell, whose instructions are looked at. Nothing is run."""

from __future__ import annotations

import pytest
from compiled import codes, compiled, holds, wrong

from kimi_hal_conformance.schema import Report

pytest.importorskip("triton", reason="Triton is not installed: nothing can be compiled")

#: Target -> how its matrix unit's instructions begin.
MATRIX = {
    "sm_90a": r"wgmma\.mma_async|[HQI]GMMA|HMMA\.16816\.F32",
    "sm_100a": r"tcgen05\.mma|HMMA\.16816\.F32|IMMA\.16832\.U8\.S8",
    "sm_103a": r"tcgen05\.mma|HMMA\.16816\.F32|IMMA\.16832\.U8\.S8",
}

#: Products of numbers that nothing has decoded: in PTX, and what the assembler makes of it.
BLACKWELL = {
    "f8f6f4": (r"tcgen05\.mma\.cta_group::1\.kind::f8f6f4", "UTCQMMA"),
    "mxf4": (r"tcgen05\.mma\.cta_group::1\.kind::mxf4\.block_scale", "UTCOMMA"),
}


@pytest.fixture(scope="module")
def report() -> Report:
    return compiled("nvidia")


def test_every_kernel_compiles_for_every_target_and_holds_what_it_should(report: Report) -> None:
    assert wrong(report) == []
    assert report.ok


@pytest.mark.parametrize("target", MATRIX)
def test_every_family_with_kernels_is_there_with_its_figures(report: Report, target: str) -> None:
    found = dict(codes(report, target))
    assert {name.partition("/")[0] for name in found} >= {
        "quantize_index_query",
        "store_index_keys",
        "indexer_logits",
        "indexer_topk",
        "topk_select",
        "topk_merge",
        "all_gather",
        "store_latent",
        "sparse_mla",
        "merge_attn_states",
        "kda_gate",
        "kda_decode",
    }
    for name, code in found.items():
        assert code.size > 1000, name
        assert code.registers, name
        assert code.spilled is not None, name


@pytest.mark.parametrize("target", MATRIX)
def test_scores_and_attention_are_multiplied_by_the_matrix_unit(report: Report, target: str) -> None:
    found = [*codes(report, target, "indexer_logits"), *codes(report, target, "sparse_mla")]
    plain = [name for name, code in found if not holds(code, MATRIX[target])]
    assert plain == ["sparse_mla/combine"]  # which adds parts
    assert len(found) >= 10


@pytest.mark.parametrize("target", ["sm_100a", "sm_103a"])
def test_blackwell_multiplies_fp8_and_mxfp4_as_they_stand(report: Report, target: str) -> None:
    found = dict(codes(report, target, "indexer_logits"))
    for name, opcodes in BLACKWELL.items():
        assert all(holds(found[f"indexer_logits/{name}"], opcode) for opcode in opcodes), name
