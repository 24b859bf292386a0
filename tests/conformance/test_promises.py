"""Declared bits: an implementation that breaks its promise fails, though every value is within its budget."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from conformance_runs import once
from plugin_package import installed, write

from kimi_hal.dispatch.contract import Properties
from kimi_hal_conformance import case as cases
from kimi_hal_conformance import levels, promises, suite
from kimi_hal_conformance.promises import Effort
from kimi_hal_conformance.request import Request
from kimi_hal_conformance.schema import Report
from kimi_hal_conformance.verdict import FAILED, PASSED, Verdict

CASE = "merge_attn_states/parts3/heads5/dim130/float32/rows7"
IMPLEMENTATIONS = """
from kimi_hal.dispatch.contract import Properties


def promising(name, **promises):
    capabilities = tuple(
        Capability(("*",), covered, properties=Properties(**promises))
        for covered in coverage(get("merge_attn_states").spec_type)
    )
    return Implementation(
        "merge_attn_states", name, build="promiser_kernels:" + name, capabilities=capabilities
    )


IMPLEMENTATIONS = (
    promising("steady", deterministic=True, batch_invariant=True),
    promising("drifts", deterministic=True, batch_invariant=True),
    promising("batches", deterministic=True, batch_invariant=True),
    promising("modest"),
)
"""
#: Both errors are a last bit of float32, far within any budget.
KERNELS = """
from kimi_hal.reference.backend import build as steady

CALLS = []


def off_by_a_bit(ctx, wanted):
    reference = steady(ctx)

    def run(outs, lses, *, out=None, lse_out=None):
        result, lse = reference(outs, lses, out=out, lse_out=lse_out)
        if wanted(outs):
            result.mul_(1 + 2.0**-23)
        return result, lse

    return run


def drifts(ctx):
    def later(outs):
        CALLS.append(outs.shape)
        return len(CALLS) % 2

    return off_by_a_bit(ctx, later)


def batches(ctx):
    return off_by_a_bit(ctx, lambda outs: outs.shape[1] > 1)


modest = drifts
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Report]:
    folder = tmp_path_factory.mktemp("promiser")
    write(folder, "promiser", IMPLEMENTATIONS, KERNELS)
    with installed(folder):
        yield once(tmp_path_factory, "promiser", lambda: suite.run(Request("promiser", only=(CASE,))))


@pytest.fixture
def verdicts(report: Report) -> dict[str, Verdict]:
    return {v.implementation.partition(".")[2]: v for v in report.verdicts}


def test_one_that_keeps_both_promises_passes_and_both_were_tried(verdicts: dict[str, Verdict]) -> None:
    found = verdicts["steady"]
    assert (found.status, found.problems) == (PASSED, ())
    assert found.promises[:2] == ("deterministic", "batch_invariant")


def test_other_bits_of_a_repeated_call_break_a_promise(verdicts: dict[str, Verdict]) -> None:
    found = verdicts["drifts"]
    assert (found.status, found.level, found.promises) == (FAILED, 3, ("deterministic",))
    assert found.problems == ("declared deterministic, but out of call 2 has other bits than of call 1",)
    assert found.measures


def test_other_bits_of_a_row_alone_break_a_promise(verdicts: dict[str, Verdict]) -> None:
    found = verdicts["batches"]
    assert (found.status, found.level) == (FAILED, 3)
    assert found.problems == tuple(
        f"declared batch_invariant, but row {n} of out has other bits alone" for n in (0, 3, 6)
    )


def test_who_promises_no_bits_is_held_to_none(verdicts: dict[str, Verdict]) -> None:
    found = verdicts["modest"]
    tried = ("lasting", "purity", "permutation", "split", "in_place")  # by the oracle
    assert (found.status, found.level, found.promises) == (PASSED, levels.of_id(CASE), tried)


def test_a_broken_promise_stops_at_level_3_and_leaves_the_values_alone(report: Report) -> None:
    steps = {s.name: s.steps[2] for s in report.implementations}
    assert steps["promiser.steady"].state == "reached"
    assert steps["promiser.drifts"].why == f"1 of 1 failed, the first: {CASE}"
    assert steps["promiser.modest"].state == "not_tested"


def test_a_level_of_promises_says_that_nothing_was_declared(report: Report) -> None:
    stops = {i.name: [step.why for step in i.steps[2:4]] for i in report.implementations}
    assert stops["promiser.modest"] == [
        "not tested: deterministic is not declared",
        "not tested: capture is not declared",
    ]


@pytest.mark.parametrize("case", [CASE, "prepare_moe_weights/small"])
def test_what_is_declared_and_not_tried_is_told_apart_from_what_is_not_declared(case: str) -> None:
    def why(**declared: Any) -> dict[str, str]:
        return promises.unasked(cases.get(case), Effort(lasting=True), Properties(**declared))

    repeated = "nothing was repeated; --repeats 1 compares the bits of a second call"
    undeclared = "capture is not declared"
    assert why() == {"deterministic": "deterministic is not declared", "capture": undeclared}
    assert why(deterministic=True) == {"deterministic": repeated, "capture": undeclared}
    assert why(deterministic=True, capture="full") == {"deterministic": repeated}
