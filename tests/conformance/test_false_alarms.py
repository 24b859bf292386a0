"""Right implementations that round otherwise than the reference pass: other sums, contraction, declared classes."""

from __future__ import annotations

import pytest

from kimi_hal import ops
from kimi_hal_conformance.case import CASES, INTERP, QUICK, Case
from kimi_hal_conformance.cases import load
from kimi_hal_conformance.otherwise.plugin import IMPLEMENTATIONS
from kimi_hal_conformance.otherwise.trials import DISCRETE, subjects, verdicts
from kimi_hal_conformance.verdict import PASSED

load()
#: Seeds of every test run; each has a third of the small cases, so that each of these is drawn once.
SEEDS = 3
FULL_SEEDS = 30


def alarms(chosen: list[Case], seed: int) -> list[str]:
    ids = {case.id for case in chosen}
    return [
        f"{v.implementation} {v.case}: {v.problems[0]}"
        for v in verdicts(lambda case: case.id in ids, [seed])
        if v.status != PASSED
    ]


def share(seed: int) -> list[Case]:
    """Return the small cases that a seed has in every test run."""
    small = [c for c in CASES.values() if c.since == INTERP and not c.sparse]
    return small[seed::SEEDS]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_small_cases_raise_no_false_alarm(seed: int) -> None:
    assert alarms(share(seed), seed) == []


@pytest.mark.parametrize(
    ("case_id", "seed"), [("dsa_decode/fields/merge", 10), ("dsa_decode/fields/selection", 28)]
)
def test_rows_whose_scores_are_close_at_the_cut_are_drawn_again_until_none_is(
    case_id: str, seed: int
) -> None:
    assert alarms([CASES[case_id]], seed) == []


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(FULL_SEEDS))
def test_the_quick_profile_raises_no_false_alarm(seed: int) -> None:
    assert alarms([c for c in CASES.values() if c.runs_in(QUICK) and not c.sparse], seed) == []


def test_every_operator_is_computed_otherwise_and_those_with_attention_with_narrow_probabilities() -> None:
    found = {(i.operator, i.name): i.numerics for i in IMPLEMENTATIONS}
    assert {operator for operator, name in found if name == "float32"} == set(ops.OPERATORS)
    assert found["sparse_mla", "p16"] == found["dsa_decode", "p16"] == ("attn.p=bf16",)


def test_every_operator_that_computes_has_small_cases() -> None:
    tried = {case.operator for seed in range(SEEDS) for case in share(seed)}
    assert tried >= set(ops.OPERATORS) - set(DISCRETE)
    assert subjects(next(c for c in CASES.values() if c.operator == "sparse_mla"))[-1] == "otherwise.p16"
