"""Portable Triton kernels under the CPU interpreter: every backend that adopts them keeps the contract."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest
from conformance_runs import once
from plugin_package import installed, write

from kimi_hal_conformance import suite
from kimi_hal_conformance.request import Request
from kimi_hal_conformance.schema import Report
from kimi_hal_conformance.verdict import NOT_RUN, PASSED, REFUSED

pytest.importorskip("triton", reason="Triton is not installed: its CPU interpreter cannot run")

ADOPTED = {"merge_attn_states", "kda_gate", "kda_decode", "topk_merge", "all_gather", "dsa_decode"}
#: Ranks that meet: a merge of each protocol, a gather of each layout, and a layer.
RANKS = (
    "topk_merge/full/world3-interleave4/ties",
    "topk_merge/compact/world2-interleave1/ties",
    "topk_merge/scores_only/world2-interleave1/special",
    "all_gather/rank_major/bfloat16/world2-interleave1",
    "all_gather/token_order/ragged13/world2-interleave1",
    "all_gather/last_dim/float8_e4m3fn/world3-interleave4",
    "dsa_decode/two-ranks/full",
)


@pytest.fixture(scope="module")
def nvidia(tmp_path_factory: pytest.TempPathFactory) -> Report:
    request = Request("nvidia", execution="interpreted")
    return once(tmp_path_factory, "nvidia", lambda: suite.run(request))


def test_every_adopted_kernel_passes(nvidia: Report) -> None:
    assert {v.operator for v in nvidia.verdicts if v.status == PASSED} >= ADOPTED
    assert [v for v in nvidia.verdicts if v.status not in (PASSED, NOT_RUN, REFUSED)] == []
    refused = {v.operator for v in nvidia.verdicts if v.status == REFUSED}
    # Implementations of the first share the latent formats out among them; one of the second reads plain pages alone.
    assert refused <= {"sparse_mla", "indexer_logits"}
    assert nvidia.ok


def test_interpreting_takes_the_small_cases_and_says_what_it_leaves_out(nvidia: Report) -> None:
    assert nvidia.environment.profile == "interp"
    large = {
        v.case
        for v in nvidia.verdicts
        if v.problems == ("not in the interp profile; the quick profile has it",)
    }
    assert "kda_decode/tp8/rows6" in large
    assert "topk_merge/compact/world8-interleave64/ties" in large
    assert "merge_attn_states/parts8/heads12/dim512/bfloat16/rows7" in large


def test_ranks_of_a_loopback_group_meet_in_kernels(nvidia: Report) -> None:
    passed = {v.case for v in nvidia.verdicts if v.status == PASSED}
    assert passed >= set(RANKS)
    ran = {v.operator: v.implementation for v in nvidia.verdicts if v.case in RANKS}
    assert ran["dsa_decode"] == "nvidia.composed"


def test_a_composition_whose_parts_are_missing_says_which() -> None:
    report = suite.run(Request("amd", execution="interpreted", only=("kda_layer_decode/tp32/rows1",)))
    assert [v.problems for v in report.verdicts] == [("amd does not implement its parts: kda_conv",)]
    assert not report.ok


def test_a_composition_whose_parts_are_missing_names_no_profile_that_would_have_it() -> None:
    report = suite.run(Request("amd", execution="interpreted", operators=("kda_layer_decode",)))
    said = {problem for v in report.verdicts for problem in v.problems}
    assert said == {"amd does not implement its parts: kda_conv"}


def test_an_implementation_whose_library_is_missing_is_not_run() -> None:
    """TPU's libraries have environments of their own; a composition lacks what all candidates for a part lack."""
    cases = ("kda_gate/odd/rows9", "kda_layer_decode/tp32/rows1")
    report = suite.run(Request("tpu", execution="interpreted", only=cases))
    missing = "torch_xla is not installed; it needs torch_xla>=2.9,<2.10"
    assert [(v.implementation, v.status, v.problems) for v in report.verdicts] == [
        ("tpu.xla", "not_run", (missing,)),
        ("tpu.composed", "not_run", (f"its part kda_conv cannot run: {missing}",)),
    ]
    assert not report.ok


def test_an_implementation_whose_library_has_the_wrong_version_is_not_run(tmp_path: Path) -> None:
    declared = """
IMPLEMENTATIONS = (
    covering("kda_gate", "late", capabilities=(Capability(("*",), {}, requires={"click": ">=99"}),)),
)
"""
    write(tmp_path, "old", declared, "from kimi_hal.reference.backend import build as late\n")
    with installed(tmp_path):
        report = suite.run(Request("old", operators=("kda_gate",)))
    missing = f"click {version('click')} is installed; it needs click>=99"
    assert [(v.case, v.status, v.problems) for v in report.verdicts] == [("kda_gate/*", NOT_RUN, (missing,))]
    assert not report.ok


@pytest.mark.parametrize("backend", ["amd", "ppu"])
def test_other_backends_adopt_the_same_kernels(backend: str) -> None:
    """Their own runs are the same code; one case an operator shows that each backend reaches it."""
    cases = (
        "kda_gate/odd/rows9",
        "kda_decode/odd/rows6",
        "merge_attn_states/parts3/heads5/dim130/bfloat16/rows7",
        *RANKS,
    )
    report = suite.run(Request(backend, execution="interpreted", only=cases))
    assert [(v.case, v.problems) for v in report.verdicts if v.status != PASSED] == []
    assert len(report.verdicts) == len(cases)
