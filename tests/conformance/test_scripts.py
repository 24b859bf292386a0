"""Operators that are called together with another: a test entry, a verify and its commit, weights and their use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conformance_runs import once
from plugin_package import installed, write

from kimi_hal_conformance import suite
from kimi_hal_conformance.request import Request
from kimi_hal_conformance.schema import Report
from kimi_hal_conformance.verdict import FAILED, PASSED, Verdict

CASES = (
    "indexer_topk/ordered-with-scores",
    "prepare_moe_weights/small",
    "kda_commit/odd/partial",
    "kda_verify/odd/drafts",
)

IMPLEMENTATIONS = """
WEIGHTS = "kimi_hal.reference.weights:weights"
SIZES = "kimi_hal.reference.sizes:sizes"
IMPLEMENTATIONS = (
    *(covering("indexer_topk", name) for name in ("whole", "no_entry", "other_scores", "other_selection")),
    *(
        covering("prepare_moe_weights", name, weights_format=tag)
        for name, tag in (("plain", "a"), ("unread", "b"), ("not_a_list", "a"), ("borrowed", "a"), ("wrong", "a"))
    ),
    covering("moe_experts", "experts", weights=WEIGHTS, weights_format="a"),
    *(
        covering(operator, name, records=name, size=SIZES)
        for operator in ("kda_verify", "kda_commit")
        for name in ("paired", "eager", "late")
    ),
)
"""

KERNELS = """
import torch
from kimi_hal.ops.operator import get
from kimi_hal.reference.backend import build as reference

whole = plain = unread = experts = paired = reference


def calling(act):
    \"\"\"Make a builder of a function (right run, operands by name) -> results.\"\"\"

    def build(ctx):
        op, right = get(ctx.operator), reference(ctx)

        def run(*args, **kwargs):
            bound = op.signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return act(ctx, right, dict(bound.arguments))

        run.__signature__ = op.signature
        if hasattr(right, "return_scores"):
            run.return_scores = right.return_scores
        return run

    return build


def no_entry(ctx):
    op, right = get(ctx.operator), reference(ctx)

    def run(*args, **kwargs):
        return right(*args, **kwargs)

    run.__signature__ = op.signature
    return run


@calling
def other_selection(ctx, right, given):
    out, scores = right(**given)
    out[0, :2] = out[0, :2].flip(0)
    return out, scores


def other_scores(ctx):
    op, right = get(ctx.operator), reference(ctx)

    def run(*args, **kwargs):
        return right(*args, **kwargs)

    def entry(*args, all_scores_out, **kwargs):
        results = right.return_scores(*args, all_scores_out=all_scores_out, **kwargs)
        all_scores_out *= 1.001
        return results

    run.__signature__ = op.signature
    run.return_scores = entry
    return run


@calling
def not_a_list(ctx, right, given):
    return tuple(right(**given))


@calling
def borrowed(ctx, right, given):
    return [given["w13"], *right(**given)[1:]]


@calling
def wrong(ctx, right, given):
    first, scale, second, other = right(**given)
    return [first, scale, second.flip(1), other]


@calling
def eager(ctx, right, given):
    \"\"\"A verify that already advances a state.\"\"\"
    results = right(**given)
    if ctx.operator == "kda_verify":
        given["state"][int(given["state_ids"][0])] *= 0.5
    return results


@calling
def late(ctx, right, given):
    \"\"\"A commit that takes one row too few.\"\"\"
    if ctx.operator == "kda_commit":
        given["accepted"] = given["accepted"] - 1
    return right(**given)
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Report]:
    folder = tmp_path_factory.mktemp("scripted")
    write(folder, "scripted", IMPLEMENTATIONS, KERNELS)
    with installed(folder):
        yield once(tmp_path_factory, "scripted", lambda: suite.run(Request("scripted", only=CASES)))


def on(report: Report, name: str) -> dict[str, Verdict]:
    """Return the verdicts on an implementation by operator."""
    return {v.operator: v for v in report.verdicts if v.implementation == f"scripted.{name}"}


@pytest.mark.parametrize("name", ["whole", "plain", "paired"])
def test_what_is_right_passes(report: Report, name: str) -> None:
    assert {v.status for v in on(report, name).values()} == {PASSED}


@pytest.mark.parametrize(
    ("name", "operator", "problems"),
    [
        (
            "no_entry",
            "indexer_topk",
            ("the run function carries no return_scores, the test entry of indexer_topk",),
        ),
        ("other_selection", "indexer_topk", ("out differs with return_scores",)),
        ("unread", "prepare_moe_weights", ("no moe_experts of scripted takes weights_format='b'",)),
        ("not_a_list", "prepare_moe_weights", ("the call did not return a list of tensors",)),
        ("borrowed", "prepare_moe_weights", ("weights[0] shares memory with w13, which was not donated",)),
        ("eager", "kda_verify", ("state was modified",)),
        ("eager", "kda_commit", ("kda_verify: state[0] was modified",)),
    ],
)
def test_what_is_wrong_about_a_pair_is_said(
    report: Report, name: str, operator: str, problems: tuple[str, ...]
) -> None:
    verdict = on(report, name)[operator]
    assert verdict.status == FAILED
    assert verdict.problems[: len(problems)] == problems


@pytest.mark.parametrize(
    ("name", "operator", "tensor"),
    [
        ("other_scores", "indexer_topk", "all_scores_out"),
        ("wrong", "prepare_moe_weights", "out"),
        ("late", "kda_commit", "states[0]"),
    ],
)
def test_what_is_wrong_by_its_values_is_measured(
    report: Report, name: str, operator: str, tensor: str
) -> None:
    verdict = on(report, name)[operator]
    assert verdict.status == FAILED
    assert any(problem.startswith(f"{tensor}: error ") for problem in verdict.problems), verdict.problems


def test_a_verify_that_only_its_own_commit_reads_is_right(report: Report) -> None:
    assert on(report, "late")["kda_verify"].status == PASSED
