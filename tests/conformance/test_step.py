"""Step metadata, workspaces and records reach an implementation as an engine would hand them over."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conformance_runs import once
from plugin_package import installed, write

from kimi_hal_conformance import suite
from kimi_hal_conformance.request import Request
from kimi_hal_conformance.schema import Report
from kimi_hal_conformance.verdict import FAILED, PASSED, Verdict

IMPLEMENTATIONS = """
FIELDS = {"prepare": "stepped_kernels:prepare", "size": "stepped_kernels:size"}
OPERATORS = ("sparse_mla", "indexer_topk", "indexer_logits", "kda_prefill", "moe_experts")
IMPLEMENTATIONS = (
    *(
        covering(
            operator,
            "planned",
            weights="kimi_hal.reference.weights:weights" if operator == "moe_experts" else None,
            **({} if operator == "moe_experts" else FIELDS),
        )
        for operator in OPERATORS
    ),
    covering("sparse_mla", "writes_past_workspace", **FIELDS),
    covering("sparse_mla", "trusts_workspace", **FIELDS),
)
"""

KERNELS = """
import torch
from kimi_hal.dispatch.contract import Sizes
from kimi_hal.ops.operator import get
from kimi_hal.reference.backend import build as reference

ROWS = 512


def size(spec, limits, arch):
    return Sizes(workspace=1000, step=8 * ROWS)


def prepare(ctx):
    if ctx.operator == "kda_prefill":

        def fill(cu_seqlens, state_ids, *, step, cu_seqlens_host=None):
            step.view(torch.int64)[: cu_seqlens.numel()] = cu_seqlens.long()

    else:

        def fill(row_req, row_len, block_table, *, step, cu_seqlens=None, cu_seqlens_host=None, max_context=None):
            assert row_req.shape == row_len.shape
            step.view(torch.int64)[: row_len.numel()] = row_len.long()

    return fill


def built(ctx, act):
    op, right = get(ctx.operator), reference(ctx)

    def run(*args, **kwargs):
        bound = op.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        act(given)
        return right(*args, **kwargs)

    run.__signature__ = op.signature
    if hasattr(right, "return_scores"):
        run.return_scores = right.return_scores
    return run


def planned(ctx):
    called = []

    def act(given):
        if ctx.operator == "moe_experts":
            return
        known = given["cu_seqlens"] if ctx.operator == "kda_prefill" else given.get("row_len")
        step = given["step"].view(torch.int64)
        if known is not None:
            assert step[: known.numel()].tolist() == known.tolist()
        assert (step[: given[op_rows(ctx)].shape[0]] >= -8).all()
        workspace = given["workspace"]
        assert workspace.dtype == torch.uint8 and workspace.numel() == 1000
        assert workspace.data_ptr() % 256 == 0
        assert called or (workspace == 0xFF).all(), "it holds NaN before a plan's first call"
        called.append(True)
        workspace.copy_(torch.arange(1000) % 251)

    return built(ctx, act)


def op_rows(ctx):
    return "q"


def writes_past_workspace(ctx):
    def act(given):
        given["workspace"].as_strided((1001,), (1,)).zero_()

    return built(ctx, act)


def trusts_workspace(ctx):
    def act(given):
        given["out"] is None or None
        if int(given["workspace"][0]):
            raise RuntimeError("the workspace is not zero")

    return built(ctx, act)
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Report]:
    folder = tmp_path_factory.mktemp("stepped")
    write(folder, "stepped", IMPLEMENTATIONS, KERNELS)
    with installed(folder):
        yield once(tmp_path_factory, "stepped", lambda: suite.run(Request("stepped", profile="interp")))


def test_a_step_is_prepared_before_every_call(report: Report) -> None:
    mine = [v for v in report.verdicts if v.implementation == "stepped.planned" and v.status != "not_run"]
    assert {v.operator for v in mine} == {
        "sparse_mla",
        "indexer_topk",
        "indexer_logits",
        "kda_prefill",
        "moe_experts",
    }
    assert {p for v in mine if v.status != PASSED for p in v.problems} == set()


def test_a_byte_behind_the_workspace_is_a_canary(report: Report) -> None:
    found = [v for v in report.verdicts if v.implementation == "stepped.writes_past_workspace"]
    ran = [v for v in found if v.status != "not_run"]
    assert {plain(v) for v in ran} == {"memory around workspace was written"}


def test_nobody_clears_a_workspace(report: Report) -> None:
    found = [v for v in report.verdicts if v.implementation == "stepped.trusts_workspace"]
    assert {plain(v) for v in found if v.status == FAILED} == {"RuntimeError: the workspace is not zero"}
    assert PASSED not in {v.status for v in found}


def plain(verdict: Verdict) -> str:
    """Return the one problem, without the sentence about what was claimed."""
    (problem,) = verdict.problems
    return problem.rpartition(", but ")[2]
