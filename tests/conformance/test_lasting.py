"""Results of calls without given buffers last: who hands one out again, or writes into it later, fails by name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from conformance_runs import once
from plugin_package import installed, write

from kimi_hal.ops.operator import OutputShape
from kimi_hal_conformance import calls, suite
from kimi_hal_conformance import case as cases
from kimi_hal_conformance.cases import load
from kimi_hal_conformance.levels import LASTING
from kimi_hal_conformance.promises import Allowance, Effort, operand_names
from kimi_hal_conformance.request import Request
from kimi_hal_conformance.schema import Report
from kimi_hal_conformance.verdict import FAILED, PASSED, Verdict

MERGE = "merge_attn_states/parts3/heads5/dim130/float32/rows7"
PREPARE = "prepare_moe_weights/small"
GATHER = "all_gather/token_order/int32/world2-interleave1"
CASES = (MERGE, PREPARE, GATHER)
IMPLEMENTATIONS = """
WEIGHTS = "kimi_hal.reference.weights:weights"
IMPLEMENTATIONS = (
    covering("merge_attn_states", "right"),
    covering("merge_attn_states", "one_buffer"),
    covering("merge_attn_states", "two_buffers"),
    covering("merge_attn_states", "tidies_up"),
    covering("all_gather", "right"),
    covering("all_gather", "one_window"),
    covering("prepare_moe_weights", "one_arena", weights_format="tensors"),
    covering("moe_experts", "right", weights_format="tensors", weights=WEIGHTS),
)
"""
#: Each is the reference, but for where its results stand.
KERNELS = """
from kimi_hal.dispatch import signatures
from kimi_hal.ops import get
from kimi_hal.reference.backend import build as right


def kept(ctx, number):
    op, reference = get(ctx.operator), right(ctx)
    calls, buffers = [], {}

    def call(given):
        results = signatures.apply(op, reference, given)
        if given[op.outs[0].keyword] is not None:
            return results
        calls.append(0)
        many = results if isinstance(results, tuple) else (results,)
        mine = buffers.setdefault(len(calls) % number, [t.clone() for t in many])
        found = tuple(t.copy_(new) for t, new in zip(mine, many))
        return found if isinstance(results, tuple) else found[0]

    return signatures.function(op, op.name, call)


def one_buffer(ctx):
    return kept(ctx, 1)


def two_buffers(ctx):
    return kept(ctx, 2)


one_window = one_buffer


def tidies_up(ctx):
    # Memory of its own for each call; what it gave before is emptied, as memory that is not needed any more.
    op, reference = get(ctx.operator), right(ctx)
    before = []

    def call(given):
        results = signatures.apply(op, reference, given)
        if given["out"] is None:
            for old in before:
                old.zero_()
            before[:] = results
        return results

    return signatures.function(op, op.name, call)


ARENA = []


def one_arena(ctx):
    op, reference = get(ctx.operator), right(ctx)

    def call(given):
        found = signatures.apply(op, reference, given)
        if not ARENA:
            ARENA[:] = [t.clone() for t in found]
        return [mine.copy_(new) for mine, new in zip(ARENA, found)]

    return signatures.function(op, op.name, call)
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Report]:
    folder = tmp_path_factory.mktemp("lasting")
    write(folder, "lasting", IMPLEMENTATIONS, KERNELS)
    with installed(folder):
        yield once(tmp_path_factory, "lasting", lambda: suite.run(Request("lasting", only=CASES)))


@pytest.fixture
def verdicts(report: Report) -> dict[tuple[str, str], Verdict]:
    return {(v.operator, v.implementation.partition(".")[2]): v for v in report.verdicts}


@pytest.mark.parametrize("operator", ["merge_attn_states", "all_gather"])
def test_who_gives_new_memory_each_time_passes(
    verdicts: dict[tuple[str, str], Verdict], operator: str
) -> None:
    found = verdicts[operator, "right"]
    assert (found.status, found.problems) == (PASSED, ())
    assert LASTING in found.promises


AGAIN = (
    "without given buffers, {0} of call {2} is in the memory of {0} of call {1}, which its caller still holds"
)


@pytest.mark.parametrize(
    ("operator", "name", "problem"),
    [
        ("merge_attn_states", "one_buffer", AGAIN.format("out", 1, 2)),
        ("merge_attn_states", "two_buffers", AGAIN.format("out", 1, 3)),
        (
            "merge_attn_states",
            "tidies_up",
            "out of call 1, made without given buffers, was overwritten by a later call",
        ),
        ("all_gather", "one_window", "rank 0: " + AGAIN.format("out", 1, 2)),
        ("prepare_moe_weights", "one_arena", AGAIN.format("weights[0]", 1, 2)),
    ],
)
def test_results_that_do_not_last_fail_at_level_2(
    verdicts: dict[tuple[str, str], Verdict], operator: str, name: str, problem: str
) -> None:
    found = verdicts[operator, name]
    assert (found.status, found.level, found.promises[-1:]) == (FAILED, 2, (LASTING,))
    assert found.problems[0] == problem


def test_one_case_shows_it_even_where_no_relation_is_tried() -> None:
    left = Allowance(0)
    assert left.effort(0) == Effort(0, lasting=True)
    left.spend(["deterministic"])
    assert left.effort(0) == Effort(0, lasting=True)
    left.spend([LASTING])
    assert left.effort(0) == Effort(0)


def test_relations_bring_it_with_them() -> None:
    left = Allowance(1)
    left.spend([LASTING, "purity"])
    assert left.effort(1) == Effort(1, relations=True, lasting=True)
    left.spend([LASTING, "split"])
    assert left.effort(1) == Effort(1)


def test_relations_are_tried_where_an_operand_is_given_for_the_first_time() -> None:
    left, plain = Allowance(1), {"x"}
    left.spend([LASTING, "purity", "split"], plain)
    assert left.effort(0, plain) == Effort(0)
    assert left.effort(0, plain | {"scale"}) == Effort(0, relations=True, lasting=True)
    left.spend(["purity"], plain | {"scale"})  # no rows: not shown yet
    assert left.effort(0, plain | {"scale"}).relations
    left.spend(["purity", "split"], plain | {"scale"})
    assert left.effort(0, plain | {"scale"}) == Effort(0)


def test_an_operand_brings_no_relations_where_none_are_to_be_tried() -> None:
    left = Allowance(0, lasting=False)
    left.spend(["deterministic"], {"x"})
    assert left.effort(1, {"x", "scale"}) == Effort(1)


def test_cases_of_gigabytes_name_no_operands_and_those_of_ranks_the_size_of_their_group() -> None:
    load()
    assert operand_names(next(c for c in cases.CASES.values() if c.sparse), 0) == frozenset()
    assert operand_names(cases.CASES[GATHER], 0) == {"x of 2 ranks"}
    assert "k_scale" in operand_names(cases.CASES["sparse_mla/fields/softmax-scale"], 0)


def test_memory_that_is_handed_out_next_holds_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch.ones(64)

    def again(*shape: object, **kind: object) -> torch.Tensor:
        return right  # what an earlier call gave and its caller freed

    shapes = [OutputShape("out", (64,), "float32")]
    monkeypatch.setattr(calls.torch, "empty", again)
    calls.spoil(shapes, "cpu")
    assert right.isnan().all()
