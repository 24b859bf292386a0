"""The cases themselves: every operator has some, and they are the same for the same seed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kimi_hal import formats, ops
from kimi_hal.errors import UnknownNameError
from kimi_hal.ops.spec import DCP
from kimi_hal_conformance import case as cases
from kimi_hal_conformance.cases import load, real_text
from kimi_hal_conformance.cases.composites import dsa_spec
from kimi_hal_conformance.draws import close_cut, near_ties
from kimi_hal_conformance.poison import same_bits
from kimi_hal_conformance.ranks import at_rank
from kimi_hal_conformance.schedule import operators_without_cases
from kimi_hal_conformance.sparse import CannotTryError

load()
EVERY = list(cases.CASES.values())


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in nested operands, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for name in value:
            yield from tensors(value[name])
    elif isinstance(value, list):
        for item in value:
            yield from tensors(item)


def drawn(case: cases.Case, seed: int = 0) -> list[torch.Tensor]:
    return list(tensors(case.make(cases.generator(case, seed))))


def test_every_operator_has_cases() -> None:
    assert operators_without_cases() == []


def test_every_operator_has_cases_in_every_profile() -> None:
    for profile in cases.PROFILES:
        assert {c.operator for c in EVERY if c.runs_in(profile)} == set(ops.OPERATORS)


def test_a_profile_has_every_case_of_those_before_it() -> None:
    def runs(profile: str) -> set[str]:
        return {c.id for c in EVERY if c.runs_in(profile)}

    assert runs("interp") < runs("quick") < runs("standard") <= runs("full")
    assert runs("full") == {c.id for c in EVERY}


def test_every_case_says_why_it_exists() -> None:
    for case in EVERY:
        assert case.why.endswith("."), case.id
        assert len(case.why) <= 120, case.id


def test_a_case_without_a_reason_is_a_fault_of_the_suite() -> None:
    silent = dataclasses.replace(EVERY[0], id="sparse_mla/silent", fault=0, why="")
    with pytest.raises(AssertionError, match="case sparse_mla/silent does not say why it exists"):
        cases.add([silent])


def test_the_reason_of_the_narrowest_group_counts() -> None:
    groups = {"sparse_mla/": "Attention.", "sparse_mla/odd": "Odd."}
    odd = dataclasses.replace(EVERY[0], id="sparse_mla/odd/1", fault=0, why="")
    try:
        cases.add([odd], groups)
        assert cases.CASES[odd.id].why == "Odd."
    finally:
        cases.CASES.pop(odd.id, None)


def test_an_id_names_its_operator_first_and_needs_no_quoting() -> None:
    for case in EVERY:
        assert case.id.startswith(f"{case.operator}/")
        assert all(c.isalnum() or c in "/.-_" for c in case.id), case.id


def test_two_cases_of_one_id_are_a_fault_of_the_suite() -> None:
    with pytest.raises(AssertionError, match=f"case {EVERY[0].id} is registered twice"):
        cases.add([EVERY[0]])


def test_an_unknown_case_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError) as error:
        cases.get("kda_decode/tp8/rows7")
    assert str(error.value) == (
        "unknown case 'kda_decode/tp8/rows7'; did you mean 'kda_decode/tp8/rows6'? "
        f"`kimi-hal conformance list` prints all {len(EVERY)}"
    )


@pytest.mark.parametrize("operator", sorted(ops.OPERATORS))
def test_operands_are_the_same_for_the_same_seed_alone(operator: str) -> None:
    mine = [c for c in reversed(EVERY) if c.operator == operator and c.since == cases.INTERP]
    case = next(
        c for c in mine if "/edges/" not in c.id and drawn(c)[0].numel()
    )  # edges may be fixed numbers
    first, again, other = drawn(case, 3), drawn(case, 3), drawn(case, 4)
    assert all(same_bits(a, b) for a, b in zip(first, again, strict=True))
    assert not all(same_bits(a, b) for a, b in zip(first, other, strict=True))


def test_every_operand_of_several_dtypes_is_tried_in_every_combination() -> None:
    from kimi_hal_conformance.cases import operand_dtypes  # made of cases that are loaded

    chosen = {name for name in ops.OPERATORS if operand_dtypes.several(name)}
    assert chosen == set(operand_dtypes.BASES)


def test_every_format_has_cases() -> None:
    specs = [c.spec.key() for c in EVERY]
    for name in formats.names():
        assert any(f'"{name}"' in key for key in specs), name


@pytest.mark.parametrize("operator", [o.name for o in ops.OPERATORS.values() if o.grouped])
def test_operators_of_a_group_are_tried_on_one_rank_and_on_several(operator: str) -> None:
    ranks = {c.ranks for c in EVERY if c.operator == operator}
    assert ranks & {0, 1}
    assert ranks - {0, 1}


def test_a_ranks_spec_has_its_rank_in_every_spec_inside() -> None:
    spec = at_rank(dsa_spec(2, interleave=4), 1)
    assert spec.indexer.dcp == spec.attn.dcp == spec.merge.dcp == DCP(world=2, rank=1, interleave=4)
    assert spec.query == dsa_spec(2).query


def test_a_value_half_way_between_two_bfloat16_numbers_is_near_a_tie() -> None:
    y = torch.tensor([1 + 2**-8, 1 + 2**-8 + 2**-20, 1 + 2**-9, 1.0, 0.0, -(2 + 2**-7)], dtype=torch.float64)
    slack = torch.full_like(y, 2.0**-19)
    assert near_ties(y, slack).tolist() == [True, True, False, False, False, True]


def test_scores_that_are_close_at_the_cut_are_found() -> None:
    scores = torch.tensor(
        [[4.0, 3.0, 2.99999, 1.0], [4.0, 3.99999, 3.0, 1.0], [4.0, 3.0, -torch.inf, -torch.inf]]
    )
    assert close_cut(scores.double(), 2).tolist() == [True, False, False]
    assert close_cut(scores.double(), 4).tolist() == [False, False, False]


def test_a_case_of_real_text_is_not_run_where_the_workload_is_not_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    real_text.text.cache_clear()
    case = cases.get("moe_route/real-text")
    with pytest.raises(CannotTryError) as error:
        case.make(cases.generator(case, 0))
    assert str(error.value) == (
        f"no workload file at {tmp_path}/kimi-hal/workload/activations.safetensors; "
        "build it with: python -m kimi_hal_conformance.workload build"
    )


@pytest.mark.parametrize(
    "case", [c for c in EVERY if c.operator.startswith("kda_") and c.runs_in("quick")], ids=lambda c: c.id
)
def test_no_two_live_sequences_of_a_case_name_one_slot(case: cases.Case) -> None:
    given = case.make(cases.generator(case, 0))
    if "state_ids" not in given:  # kda_gate
        return
    ids = given["state_ids"]
    rows = given["cu_seqlens"].diff() if "cu_seqlens" in given else torch.ones_like(ids)
    live = ids[(rows > 0) & (ids >= 0)].tolist()
    assert len(live) == len(set(live))
