"""Relations between calls: each kills an implementation whose single calls are all right, and lets right ones pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from conformance_runs import once
from plugin_package import installed, write

from kimi_hal_conformance import suite
from kimi_hal_conformance.promises import PATIENT, Allowance
from kimi_hal_conformance.request import Request
from kimi_hal_conformance.schema import Report
from kimi_hal_conformance.verdict import FAILED, PASSED, Verdict

MERGE = "merge_attn_states/parts3/heads5/dim130/float32/rows7"
DECODE, PREFILL, RANKS = (
    "kda_decode/tp32/rows6",
    "kda_prefill/tp32/ragged",
    "topk_merge/full/world2-interleave1/ties",
)
SCORED = "indexer_topk/ordered-with-scores"
CASES = (MERGE, DECODE, PREFILL, SCORED, RANKS)
IMPLEMENTATIONS = """
from kimi_hal.dispatch.contract import Properties


def promising(operator, name, prepare=None, **promises):
    promises = {"deterministic": True} | promises
    capabilities = tuple(
        Capability(("*",), covered, properties=Properties(**promises)) for covered in coverage(get(operator).spec_type)
    )
    own = {"prepare": prepare, "size": "related_kernels:sixteen_bytes"} if prepare else {}
    return Implementation(operator, name, build="related_kernels:" + name, capabilities=capabilities, **own)


IMPLEMENTATIONS = (
    promising("merge_attn_states", "right", batch_invariant=True),
    promising("merge_attn_states", "modest", deterministic=False),
    promising("merge_attn_states", "remembers"),
    promising("merge_attn_states", "second_row", batch_invariant=True),
    promising("merge_attn_states", "few_rows"),
    promising("merge_attn_states", "adds_up"),
    promising("merge_attn_states", "first_size"),
    promising("merge_attn_states", "largest"),
    promising("merge_attn_states", "every_256th"),
    promising("merge_attn_states", "only_where_unwritten"),
    promising("merge_attn_states", "two_at_once", concurrent=True),
    promising("merge_attn_states", "shares", concurrent=True),
    promising("merge_attn_states", "one_at_a_time", concurrent=True),
    promising("kda_decode", "right"),
    promising("kda_decode", "last_slot"),
    promising("kda_decode", "biased"),
    promising("kda_prefill", "right"),
    promising("kda_prefill", "all_new"),
    promising("kda_prefill", "multiplies"),
    promising("indexer_topk", "right", batch_invariant=True),
    promising("indexer_topk", "of_four", batch_invariant=True),
    promising("indexer_topk", "with_a_step", prepare="related_kernels:ones"),
    promising("indexer_topk", "prepared_once", prepare="related_kernels:ones_once"),
    promising("indexer_topk", "uses_its_step_up", prepare="related_kernels:ones"),
    promising("indexer_topk", "takes_its_mark", prepare="related_kernels:ones"),
    promising("topk_merge", "right"),
    promising("topk_merge", "tires"),
)
"""
#: Each is the reference but for what its name says.
KERNELS = """
import time
from dataclasses import replace

from kimi_hal.dispatch import signatures
from kimi_hal.dispatch.contract import Sizes
from kimi_hal.ops import get
from kimi_hal.reference.backend import build as right

modest = two_at_once = right


def around(ctx, change, before=lambda given: None):
    op, reference = get(ctx.operator), right(ctx)

    def call(given):
        before(given)
        return change(given, signatures.apply(op, reference, given))

    return signatures.function(op, op.name, call)


def remembers(ctx):
    # What was made of the inputs is kept by address, as a descriptor is.
    kept = {}

    def before(given):
        given["outs"] = kept.setdefault(given["outs"].data_ptr(), given["outs"].clone())

    return around(ctx, lambda given, results: results, before)


def second_row(ctx):
    # One more float32 rounding in the second program.
    def change(given, results):
        results[0][1:2].mul_(1 + 2.0**-23)
        return results

    return around(ctx, change)


def few_rows(ctx):
    # A kernel of its own for three and four rows, which leaves out the last part.
    def before(given):
        if given["outs"].shape[1] in (3, 4):
            given["lses"] = given["lses"].clone()
            given["lses"][-1] = float("-inf")

    return around(ctx, lambda given, results: results, before)


def adds_up(ctx):
    # The sum is gathered in the output, which is emptied first.
    def before(given):
        if given["out"] is not None:
            given["out"].zero_()

    return around(ctx, lambda given, results: results, before)


def first_size(ctx):
    # What it returns without a buffer is made for the rows of the first call.
    rows = []

    def change(given, results):
        rows.append(given["outs"].shape[1])
        if given["out"] is None and rows[-1] < rows[0]:
            results[0][-1] = 0.0
        return results

    return around(ctx, change)


def every_256th(ctx):
    # A counter of one byte comes round.
    calls = []

    def change(given, results):
        calls.append(1)
        if len(calls) % 256 == 0:
            results[0].mul_(2)
        return results

    return around(ctx, change)


def largest(ctx):
    # A largest value is gathered in the output, which nobody empties.
    held = {}

    def before(given):
        held["out"] = None if given["out"] is None else given["out"].clone()

    def change(given, results):
        if held["out"] is not None:
            results[0].copy_(results[0].fmax(held["out"]))
        return results

    return around(ctx, change, before)


def only_where_unwritten(ctx):
    # An entry of the output that is a number counts as done.
    held = {}

    def before(given):
        held["out"] = None if given["out"] is None else given["out"].clone()

    def change(given, results):
        if held["out"] is not None:
            results[0].copy_(results[0].where(held["out"].isnan(), held["out"]))
        return results

    return around(ctx, change, before)


def sixteen_bytes(spec, limits, arch):
    return Sizes(step=16, workspace=16)


def ones(ctx):
    return lambda *known, step, **more: step.fill_(1)


def ones_once(ctx):
    # What stands in the step says that it is prepared: for an earlier one. The second byte counts that.
    def prepare(*known, step, **more):
        done = bool((step[2:] == 1).all())
        step.fill_(1)
        step[1] = 0 if done else 1

    return prepare


def with_a_step(ctx):
    op, reference = get(ctx.operator), right(ctx)

    def call(given):
        live = bool(given["step"][1])
        return signatures.apply(op, reference, given if live else given | {"row_len": given["row_len"] * 0})

    run = signatures.function(op, op.name, call)
    run.return_scores = reference.return_scores
    return run


prepared_once = with_a_step


def uses_its_step_up(ctx):
    op, reference = get(ctx.operator), with_a_step(ctx)

    def call(given):
        results = signatures.apply(op, reference, given)
        given["step"].zero_()
        return results

    run = signatures.function(op, op.name, call)
    run.return_scores = reference.return_scores
    return run


def takes_its_mark(ctx):
    # The workspace is set up by the first call that finds no mark there.
    op, reference = get(ctx.operator), right(ctx)

    def call(given):
        mark = given["workspace"][:8]
        seen = bool((mark == 42).all())
        mark.fill_(42)
        return signatures.apply(op, reference, given | {"row_len": given["row_len"] * 0} if seen else given)

    run = signatures.function(op, op.name, call)
    run.return_scores = reference.return_scores
    return run


def shares(ctx):
    # The inputs stand in scratch of the plan.
    scratch = {}

    def before(given):
        scratch["outs"] = given["outs"]
        time.sleep(0.002)
        if scratch["outs"].shape == given["outs"].shape:
            given["outs"] = scratch["outs"]

    return around(ctx, lambda given, results: results, before)


def one_at_a_time(ctx):
    running = []

    def before(given):
        running.append(1)
        time.sleep(0.002)
        if len(running) > 1:
            raise RuntimeError("two calls at once")

    def change(given, results):
        running.pop()
        return results

    return around(ctx, change, before)


def last_slot(ctx):
    # Without a live row the highest one is slot -1.
    def change(given, results):
        if int(given["state_ids"].max()) < 0:
            given["state"][given["state_ids"][:1].long()] *= 0.5
        return results

    return around(ctx, change)


def biased(ctx):
    # Every step rounds the state up, by less than a budget each.
    def change(given, results):
        ids = given["state_ids"]
        live = (ids >= 0) & (ids < given["state"].shape[0])
        given["state"][ids[live].long()] *= 1 + {BIAS}
        return results

    return around(ctx, change)


def all_new(ctx):
    # Where nothing is told apart, every sequence is taken to be new.
    def before(given):
        flags = given["has_initial_state"]
        if flags is not None and bool(flags.all()):
            given["has_initial_state"] = ~flags

    return around(ctx, lambda given, results: results, before)


def multiplies(ctx):
    # A slot is read as zero by multiplying with the flag.
    def before(given):
        flags = given["has_initial_state"]
        if flags is not None:
            flags = flags | (given["cu_seqlens"].diff() == 0)
            live = given["state_ids"] >= 0
            ids = given["state_ids"][live].long()
            given["state"][ids] *= flags[live][:, None, None, None]
            given["has_initial_state"] = None

    return around(ctx, lambda given, results: results, before)


def of_four(ctx):
    # A rank of more than four is taken modulo four.
    dcp = ctx.spec.dcp
    taken = replace(dcp, rank=dcp.rank % 4)
    return right(replace(ctx, spec=replace(ctx.spec, dcp=taken)))


CALLS = []


def tires(ctx):
    # The order of a selection is free, and other bits from the third call of a rank on.
    def change(given, results):
        CALLS.append(0)
        if len(CALLS) > 4:
            return tuple(t.flip(-1) if t.ndim == 2 else t for t in results)
        return results

    return around(ctx, change)
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Report]:
    folder = tmp_path_factory.mktemp("related")
    write(folder, "related", IMPLEMENTATIONS, KERNELS.replace("{BIAS}", "4.5e-7"))
    with installed(folder):
        yield once(tmp_path_factory, "related", lambda: suite.run(Request("related", only=CASES)))


@pytest.fixture
def verdicts(report: Report) -> dict[tuple[str, str], Verdict]:
    return {(v.operator, v.implementation.partition(".")[2]): v for v in report.verdicts}


@pytest.mark.parametrize(
    ("operator", "tried"),
    [
        (
            "merge_attn_states",
            (
                "deterministic",
                "batch_invariant",
                "lasting",
                "purity",
                "permutation_bits",
                "split_bits",
                "in_place",
            ),
        ),
        ("kda_decode", ("deterministic", "lasting", "purity", "padding", "permutation", "split", "steps")),
        (
            "kda_prefill",
            ("deterministic", "lasting", "purity", "padding", "permutation", "split", "chunks", "reuse"),
        ),
        (
            "indexer_topk",
            (
                "deterministic",
                "batch_invariant",
                "lasting",
                "purity",
                "padding",
                "permutation_bits",
                "split_bits",
                "shards",
            ),
        ),
        ("topk_merge", ("deterministic", "lasting", "purity_on_ranks")),
    ],
)
def test_a_right_one_passes_all_that_its_operator_has(
    verdicts: dict[tuple[str, str], Verdict], operator: str, tried: tuple[str, ...]
) -> None:
    found = verdicts[operator, "right"]
    assert (found.status, found.problems, found.promises) == (PASSED, (), tried)


def test_a_plan_that_may_run_twice_at_once_is_made_to(verdicts: dict[tuple[str, str], Verdict]) -> None:
    found = verdicts["merge_attn_states", "two_at_once"]
    assert (found.status, found.promises[-1]) == (PASSED, "concurrent")


def test_a_step_is_prepared_anew_for_each_step(verdicts: dict[tuple[str, str], Verdict]) -> None:
    assert verdicts["indexer_topk", "with_a_step"].status == PASSED


def test_a_call_may_not_change_its_step(verdicts: dict[tuple[str, str], Verdict]) -> None:
    found = verdicts["indexer_topk", "uses_its_step_up"]
    assert (found.status, found.promises[-1]) == (FAILED, "purity")
    assert found.problems[0] == "call 1 of one plan, new data at the same addresses: step was modified"


def test_who_declares_no_bits_is_held_to_the_oracle(verdicts: dict[tuple[str, str], Verdict]) -> None:
    found = verdicts["merge_attn_states", "modest"]
    assert (found.status, found.promises) == (
        PASSED,
        ("lasting", "purity", "permutation", "split", "in_place"),
    )


@pytest.mark.parametrize(
    ("operator", "name", "killed_by", "level", "problem"),
    [
        (
            "merge_attn_states",
            "remembers",
            "purity",
            2,
            "call 3 of one plan, new data at the same addresses, over what the call before left in its scratch "
            "and large numbers in its outputs: out has other bits than in new memory",
        ),
        (
            "merge_attn_states",
            "second_row",
            "permutation_bits",
            3,
            "declared batch_invariant, but with the rows backwards out has other bits",
        ),
        ("merge_attn_states", "few_rows", "split", 2, "the rows in two calls: out: "),
        ("merge_attn_states", "adds_up", "in_place", 2, "out in outs[0]: out: "),
        (
            "merge_attn_states",
            "first_size",
            "purity",
            2,
            "one plan, another size, without given buffers: out has other bits than in new memory",
        ),
        (
            "merge_attn_states",
            "largest",
            "purity",
            2,
            "call 2 of one plan, new data at the same addresses, over zeros in its scratch "
            "and zeros in its outputs: out has other bits than in new memory",
        ),
        ("merge_attn_states", "only_where_unwritten", "purity", 2, "call 2 of one plan"),
        (
            "indexer_topk",
            "prepared_once",
            "purity",
            2,
            "call 3 of one plan, new data at the same addresses, over what the call before left in its scratch "
            "and large numbers in its outputs: out has other bits than in new memory",
        ),
        (
            "indexer_topk",
            "takes_its_mark",
            "purity",
            2,
            "call 1 of one plan, new data at the same addresses, the second on one prepared step: "
            "out has other bits than in new memory",
        ),
        ("merge_attn_states", "shares", "concurrent", 2, "call "),
        (
            "merge_attn_states",
            "one_at_a_time",
            "concurrent",
            2,
            "one plan in two threads: RuntimeError: two calls at once",
        ),
        ("kda_decode", "last_slot", "padding", 2, "every row is padding: state: error"),
        ("kda_decode", "biased", "steps", 2, "token by token: state: "),
        ("kda_prefill", "all_new", "chunks", 2, "in two chunks: out: "),
        ("kda_prefill", "multiplies", "reuse", 2, "a slot is used again: out: "),
        ("indexer_topk", "of_four", "shards", 5, "over 8 ranks 1 of 3 rows select otherwise, the first: 1"),
        (
            "topk_merge",
            "tires",
            "deterministic",
            3,
            "declared deterministic, but local_out of rank 0 of call 2 has other bits than of call 1",
        ),
    ],
)
def test_a_relation_kills_what_every_plain_call_lets_pass(
    verdicts: dict[tuple[str, str], Verdict],
    operator: str,
    name: str,
    killed_by: str,
    level: int,
    problem: str,
) -> None:
    found = verdicts[operator, name]
    assert found.status == FAILED
    assert found.promises[-1:] == (killed_by,), found.problems
    assert found.level == level
    assert found.problems[0].startswith(problem), found.problems


def test_one_small_call_of_a_plan_is_made_hundreds_of_times_in_standard(tmp_path: Path) -> None:
    write(tmp_path, "related", IMPLEMENTATIONS, KERNELS.replace("{BIAS}", "4.5e-7"))
    with installed(tmp_path):
        few = Request("related", only=(MERGE,), implementation="related.every_256th")
        assert [v.status for v in suite.run(few).verdicts] == [PASSED]
        (found,) = suite.run(replace(few, repeats=PATIENT)).verdicts
    assert (found.status, found.promises[-1], found.level) == (FAILED, "often", 2)
    assert found.problems[0] == "call 256 of one plan: out has other bits than of call 1"


def test_relations_leave_out_what_is_heavy_where_not_every_case_is_asked_for() -> None:
    assert not Allowance(16).effort(0, heavy=True).relations
    assert Allowance(1 << 20).effort(0, heavy=True).relations
