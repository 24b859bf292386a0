"""Every declared combination is tried: what is claimed and wrong has failed, what passes undeclared is told."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import pytest
from conformance_runs import once
from plugin_package import installed, write

from kimi_hal import ops
from kimi_hal.dispatch import fields
from kimi_hal.dispatch.contract import Capability, Implementation, Properties, TensorCap
from kimi_hal.dispatch.matching import Target
from kimi_hal.domain import OneOf, Range
from kimi_hal.errors import UnknownNameError
from kimi_hal.reference.capabilities import implementation
from kimi_hal.triton.capabilities import implementations
from kimi_hal_conformance import case as cases
from kimi_hal_conformance import suite
from kimi_hal_conformance.cases import load
from kimi_hal_conformance.claims.cover import covering
from kimi_hal_conformance.claims.made import Made, case
from kimi_hal_conformance.claims.values import tried
from kimi_hal_conformance.claims.walk import ALL, SAMPLE, Walk, walk
from kimi_hal_conformance.operands import RECIPES
from kimi_hal_conformance.request import Request
from kimi_hal_conformance.schema import Report
from kimi_hal_conformance.verdict import FAILED, PASSED, REFUSED, Verdict

load()
ANYWHERE = Target(foreign=True)
FP8 = "latent.fp8.e4m3fn.tensor"

# --- which values and rows ------------------------------------------------------------------------------


def test_of_a_list_every_value_is_tried_and_of_a_range_its_ends_the_models_and_an_awkward_one() -> None:
    assert tried(OneOf(("float32", "bfloat16")), "bfloat16", None) == ["bfloat16", "float32"]
    assert tried(Range(1, 128), 3, 12) == [3, 5, 12, 1, 128]
    assert tried(Range(8, 100, multiple=8), 3, 12) == [40, 8, 96]
    assert tried(Range(0.0, 1.0), 0.5, None) == [0.5, 0.37, 0.0, 1.0]
    assert tried(Range(-float("inf"), float("inf")), 0.0, -5.0) == [0.0, -5.0]


def test_a_flag_is_no_number() -> None:
    assert tried(OneOf((False, True, 0)), False, None) == [False, True, 0]


def test_rows_hold_every_pair_and_are_fewer_than_all_combinations() -> None:
    values = {"a": [0, 1, 2], "b": [0, 1, 2], "c": [0, 1], "d": [0, 1, 2, 3]}
    found = covering(values, 2, lambda row, kept: row)
    held = {frozenset(pair) for row in found.rows for pair in combinations(row.items(), 2)}
    wanted = {
        frozenset(((m, x), (n, y))) for m, n in combinations(values, 2) for x in values[m] for y in values[n]
    }
    assert held == wanted
    assert len(found.rows) <= 16 < 3 * 3 * 2 * 4
    assert found.rows == covering(values, 2, lambda row, kept: row).rows


def test_a_combination_that_is_too_large_is_left_out_and_counted() -> None:
    def settle(row: dict[str, int], kept: dict[str, int]) -> dict[str, int] | str | None:
        if row["a"] == row["b"] == 1:
            return None  # no Spec has both
        return "large" if row["a"] == row["c"] == 1 else row

    found = covering({"a": [0, 1], "b": [0, 1], "c": [0, 1]}, 2, settle)
    assert found.left_out == {(("a", 1), ("c", 1)): "large"}
    assert found.wanted == 11  # of twelve pairs one is no claim


# --- the walk over an implementation --------------------------------------------------------------------


def values_of(found: Walk) -> dict[str, set[object]]:
    seen: dict[str, set[object]] = {}
    for made in found.made:
        spec = ops.get(made.operator).spec_type.from_json(made.spec)
        for name, value in fields.values(spec).items():
            seen.setdefault(name, set()).add(value)
    return seen


@pytest.mark.parametrize("operator", sorted(ops.OPERATORS))
def test_every_declared_value_of_every_operator_is_tried_or_said_to_be_left_out(operator: str) -> None:
    declared = implementation(ops.get(operator))
    found = walk(declared, ANYWHERE, "quick")
    assert found.failed == ()
    seen, said = values_of(found), " ".join(f"{label} {why}" for label, why in found.left_out)
    domains = {n: d for c in declared.capabilities for n, d in c.spec.items() if isinstance(d, OneOf)}
    tied = RECIPES[operator].tied
    for name, domain in domains.items():
        leaf = fields.leaves(ops.get(operator).spec_type)[name]
        if leaf.record is None and name not in tied:
            missing = set(domain.values) - seen.get(name, set()) - {"slot"}  # which dsa_decode's Spec refuses
            assert all(f"{name}={value}" in said for value in missing), (name, missing)


def test_a_walk_is_the_same_each_time_and_every_id_is_its_own() -> None:
    declared = implementation(ops.get("sparse_mla"))
    first, second = (walk(declared, ANYWHERE, "standard") for _ in range(2))
    assert first == second
    assert len({made.id for made in first.made}) == len(first.made) > 20


def test_the_profiles_try_each_value_once_then_pairs_then_all() -> None:
    declared = Implementation(
        "topk_select",
        "fast",
        "nowhere:build",
        (
            Capability(
                ("*",), {"topk": Range(1, 64), "ordered": OneOf((False, True)), "score": OneOf(("float32",))}
            ),
        ),
    )
    counts = [len(walk(declared, ANYWHERE, profile).made) for profile in ("quick", "standard", "full")]
    assert counts == sorted(counts)
    assert counts[0] == 3  # the first, an end and the other end
    assert counts[2] == 3 * 2 * 2  # values of topk, of ordered, both placements
    assert walk(declared, ANYWHERE, "full").left_out == ()


def pairs_of(found: Walk) -> set[tuple[str, object, str, object]]:
    rows = [fields.values(ops.get(m.operator).spec_type.from_json(m.spec)) for m in found.made]
    return {(m, row[m], n, row[n]) for row in rows for m, n in combinations(sorted(row), 2)}


FLAGS = ("ordered", "return_selected", "has_row_start")
SMALL = Implementation(
    "topk_select",
    "fast",
    "nowhere:build",
    (Capability(("*",), {"topk": Range(1, 64), **{name: OneOf((False, True)) for name in FLAGS}}),),
)


def test_an_interpreter_tries_some_pairs_beside_each_value_and_says_how_many_it_leaves() -> None:
    each, interp = (walk(SMALL, ANYWHERE, profile) for profile in ("quick", "interp"))
    assert len(each.made) < len(interp.made) <= len(each.made) + SAMPLE["interp"]
    assert pairs_of(interp) > pairs_of(each)
    said = dict(interp.left_out)["pairs"]
    assert said.startswith("4 combinations are tried that hold pairs of values; ")
    assert said.endswith("are left to the quick profile")
    assert walk(SMALL, ANYWHERE, "interp") == interp


def test_interpreted_the_quick_profile_tries_every_pair() -> None:
    found = walk(SMALL, ANYWHERE, "quick", pairs=True)
    assert "pairs" not in dict(found.left_out)
    assert pairs_of(found) == pairs_of(walk(SMALL, ANYWHERE, "standard"))
    assert walk(SMALL, ANYWHERE, "interp", pairs=True) == walk(SMALL, ANYWHERE, "interp")
    assert walk(SMALL, ANYWHERE, "standard", pairs=True) == walk(SMALL, ANYWHERE, "standard")


def test_so_many_rows_hold_what_they_can_and_the_rest_is_counted() -> None:
    values = {"a": [0, 1, 2], "b": [0, 1, 2], "c": [0, 1]}
    whole = covering(values, 2, lambda row, kept: row)
    some = covering(values, 2, lambda row, kept: row, most=4)
    assert some.rows == whole.rows[:4]
    assert some.wanted + some.untried == whole.wanted == 9 + 6 + 6


def test_what_a_range_has_too_large_is_said_and_something_smaller_is_tried() -> None:
    found = walk(implementation(ops.get("store_latent")), ANYWHERE, "quick")
    said = dict(found.left_out)
    assert said["page=1048576"] == "too large: about 36864 MiB, 16 at most here; page=256 is"
    assert 256 in values_of(found)["page"]


def test_all_combinations_end_at_a_stated_number() -> None:
    found = walk(implementation(ops.get("topk_select")), ANYWHERE, "full")
    said = dict(found.left_out)
    assert len(found.made) == ALL
    assert said["all"].endswith(f"{ALL} are tried: no more than {ALL} of a capability, every pair among them")


def test_what_is_claimed_for_another_architecture_is_left_out_with_the_reason() -> None:
    declared = next(i for i in implementations(("sm_90",)) if i.operator == "store_latent")
    found = walk(declared, Target(arch="sm_100", facts={"triton": "3.9.0"}), "quick")
    assert found.made == ()
    assert found.left_out == (("everything", "not tried here: arch sm_100 is not sm_90"),)


def test_a_capability_that_covers_no_spec_has_failed() -> None:
    declared = Implementation(
        "store_latent", "fast", "nowhere:build", (Capability(("*",), {"page": OneOf((64,))}),)
    )
    assert [why for _, why in walk(declared, ANYWHERE, "quick").failed] == [
        "it claims no Spec that can be made: a required field is not named, or no value fits"
    ]


def test_dtypes_and_the_least_alignment_of_operands_are_tried() -> None:
    declared = Implementation(
        "store_latent",
        "fast",
        "nowhere:build",
        (
            Capability(
                ("*",),
                {"latent": OneOf((FP8,))},
                tensors={"kv_c": TensorCap(dtypes=("bfloat16",), align=32)},
            ),
        ),
    )
    made = walk(declared, ANYWHERE, "standard").made
    assert {m.dtypes["kv_c"] for m in made} == {"bfloat16"}
    assert {m.dtypes["k_pe"] for m in made} == {"bfloat16", "float32"}
    tight = next(m for m in made if m.shifts)
    assert tight.shifts["kv_c"] == tight.gaps["kv_c"] == 32
    assert tight.shifts["slots"] == 1
    operands = case(tight).make(cases.generator(case(tight), 0))
    assert operands["kv_c"].stride(0) == 512 + 16


def test_limits_are_walked_too_and_static_rows_get_their_bucket() -> None:
    declared = Implementation(
        "kda_decode",
        "fast",
        "nowhere:build",
        (
            Capability(
                ("*",),
                {"num_heads": OneOf((2,))},
                limits={"max_rows": Range(2, 128)},
                properties=Properties(static_rows=True),
            ),
        ),
    )
    made = walk(declared, ANYWHERE, "quick").made
    limits = [cases.Limits.from_json(m.limits) for m in made]
    assert {one.max_rows for one in limits} >= {2, 128}
    assert all(one.row_buckets == (m.rows,) for one, m in zip(limits, made, strict=True))
    assert all(m.rows <= one.max_rows for one, m in zip(limits, made, strict=True))


# --- a run ----------------------------------------------------------------------------------------------

IMPLEMENTATIONS = """
DTYPES = OneOf(("float32", "bfloat16"))
SIZES = {"parts": Range(1, 4), "num_heads": Range(1, 6), "dim": Range(1, 256)}


def some(name, **spec):
    return covering("merge_attn_states", name, capabilities=(Capability(("*",), SIZES | spec),))


IMPLEMENTATIONS = (
    some("honest", dtype=DTYPES, return_lse=OneOf((False, True))),
    some("bold", dtype=DTYPES),
    some("sorry", dtype=DTYPES),
    some("modest", dtype=OneOf(("bfloat16",))),
    covering("merge_attn_states", "empty", capabilities=(Capability(("*",), {"parts": OneOf((2,))}),)),
)
"""

KERNELS = """
import os
from kimi_hal.errors import ContractError
from kimi_hal.reference.backend import build as reference

honest = modest = empty = reference


def bold(ctx):
    right = reference(ctx)

    def run(outs, lses, *, out=None, lse_out=None):
        found = right(outs, lses, out=out, lse_out=lse_out)
        if ctx.spec.dim == 256:
            found[0][..., 200:] = 0
        return found

    return run


def sorry(ctx):
    if ctx.spec.num_heads == 6:
        raise ContractError("merge_attn_states", ["six heads are too many for this kernel"])
    return reference(ctx)
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Report]:
    folder = tmp_path_factory.mktemp("claims")
    write(folder, "boasts", IMPLEMENTATIONS, KERNELS)
    with installed(folder):
        yield once(tmp_path_factory, "boasts", lambda: suite.run(Request("boasts", undeclared=True)))


def of(report: Report, name: str) -> list[Verdict]:
    return [v for v in report.verdicts if v.implementation == f"boasts.{name}" and "/claims/" in v.case]


def test_what_is_claimed_and_right_passes(report: Report) -> None:
    assert {v.status for v in of(report, "honest")} == {PASSED}
    assert len(of(report, "honest")) >= 4


def test_what_is_claimed_and_wrong_has_failed_and_the_claim_is_named(report: Report) -> None:
    failed = [v for v in of(report, "bold") if v.status == FAILED]
    assert failed
    assert all(v.problems[0].startswith("claimed (parts=") for v in failed)
    assert all("dim=256" in v.problems[0] and ", but out: error " in v.problems[0] for v in failed)
    assert all(v.level == 1 for v in failed)


def test_what_is_claimed_and_refused_has_failed(report: Report) -> None:
    failed = [v for v in of(report, "sorry") if v.status == FAILED]
    assert failed
    assert all("num_heads=6" in v.problems[0] for v in failed)
    assert all("six heads are too many for this kernel" in v.problems[0] for v in failed)


def test_a_capability_without_a_spec_fails_the_run(report: Report) -> None:
    assert [(v.case, v.status) for v in of(report, "empty")] == [("merge_attn_states/claims/*", FAILED)]
    assert not report.ok


def test_what_passes_and_is_not_claimed_could_be(report: Report) -> None:
    could = [c for c in report.could_be_claimed if c.implementation == "boasts.modest"]
    assert any("dtype='float32' is not 'bfloat16'" in " ".join(c.refusals) for c in could)
    assert any("parts=5" in c.spec for c in could)
    refused = {v.case for v in report.verdicts if v.implementation == "boasts.modest" and v.status == REFUSED}
    assert {c.case for c in could if c.refusals} == refused


def test_a_claims_case_can_be_replayed(report: Report) -> None:
    failed = next(v for v in of(report, "bold") if v.status == FAILED)
    assert failed.case in failed.replay
    assert "--implementation boasts.bold" in failed.replay
    again = suite.run(Request("boasts", only=(failed.case,), implementation="boasts.bold"))
    assert [(v.case, v.status) for v in again.verdicts] == [(failed.case, FAILED)]


def test_an_id_that_no_claim_stands_behind_is_an_error(report: Report) -> None:
    with pytest.raises(UnknownNameError) as error:
        suite.run(Request("boasts", only=("merge_attn_states/claims/00000000",)))
    assert str(error.value) == (
        "no implementation of boasts that is on trial claims what 'merge_attn_states/claims/00000000' "
        "stands for; run its profile again for the ids of its claims"
    )


@pytest.mark.parametrize("case", ["merge_attn_states/claims/left-out", "merge_attn_states/claims/*"])
def test_what_is_said_of_claims_is_no_case(case: str) -> None:
    with pytest.raises(UnknownNameError) as error:
        suite.run(Request("boasts", only=(case,)))
    assert str(error.value) == (
        f"{case!r} is no case: it stands in a report for claims of which none is tried, and names each"
    )


def test_a_case_of_a_claim_says_which_claim_it_tries(report: Report) -> None:
    failed = next(v for v in of(report, "bold") if v.status == FAILED)
    claim = failed.problems[0].partition("claimed (")[2].partition("), but ")[0]
    assert cases.get(failed.case).why == f"What an implementation claims is tried: {claim}."


def test_an_id_is_of_what_is_tried_and_of_nobody() -> None:
    made = Made(operator="topk_select", spec="{}", limits="{}", rows=1, differs="topk=3")
    assert made.id == Made(operator="topk_select", spec="{}", limits="{}", rows=1).id
    assert made.id != Made(operator="topk_select", spec="{}", limits="{}", rows=2).id
