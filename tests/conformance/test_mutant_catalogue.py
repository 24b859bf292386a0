"""The mutants themselves: each is a right implementation but for one line, and looks right to the field."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

from kimi_hal import ops
from kimi_hal.errors import UnknownNameError
from kimi_hal.reference import sparse_mla
from kimi_hal_conformance.mutants import catalogue
from kimi_hal_conformance.mutants.accepted import SAME, accepted, real
from kimi_hal_conformance.mutants.builders import clone
from kimi_hal_conformance.mutants.clone import OPERATOR_PARTS, Clone
from kimi_hal_conformance.mutants.document import lines
from kimi_hal_conformance.mutants.implementations import IMPLEMENTATIONS
from kimi_hal_conformance.mutants.mutant import MUTANTS, Mutant, get
from kimi_hal_conformance.mutants.plain import PLAIN
from kimi_hal_conformance.mutants.tolerances import FIELD
from kimi_hal_conformance.properties import AREAS, PROPERTIES, USES
from kimi_hal_conformance.properties.property import violation

EVERY = list(catalogue.load().values())
DOCS = Path(__file__).parents[2] / "docs"


def first_of_each_kind() -> list[Mutant]:
    """Return the first mutant of each operator and of each area."""
    kinds = [*ops.OPERATORS, *AREAS]
    found = {kind: next((m for m in EVERY if kind in (*m.operators, *m.areas)), None) for kind in kinds}
    return list({m.id: m for m in found.values() if m is not None}.values())


def by_id(mutant: Mutant) -> str:
    return mutant.id


def test_there_are_enough_of_them() -> None:
    assert len(EVERY) >= 60


def test_they_are_spread_over_every_operator_and_area() -> None:
    assert {o for m in EVERY for o in m.operators} == set(ops.OPERATORS)
    assert {a for m in EVERY for a in m.areas} == set(AREAS)
    roots = {m.file.partition("/")[0] for m in EVERY}
    assert roots == {"reference", "formats", "parallel", "dispatch", "ops", "cache", "settings.py"}


def test_every_protocol_of_the_merge_has_some() -> None:
    text = " ".join(m.old for m in EVERY if m.file == "reference/protocols.py")
    assert "position.int()" in text  # full
    assert "undecided(" in text  # compact
    assert "ordinals, none" in text  # scores_only


@pytest.mark.parametrize("mutant", EVERY, ids=by_id)
def test_a_mutant_changes_one_line_of_what_is_there(mutant: Mutant) -> None:
    mutant.source()  # raises unless what is replaced stands there exactly once
    old, new = mutant.old.splitlines(), mutant.new.splitlines()
    assert len(old) == len(new)
    assert sum(a != b for a, b in zip(old, new, strict=True)) == 1


@pytest.mark.parametrize("mutant", EVERY, ids=by_id)
def test_a_mutant_says_what_it_is(mutant: Mutant) -> None:
    assert mutant.breaks.endswith(".")
    assert mutant.breaks.count(". ") == 0
    parts = mutant.imitates.removeprefix("https://github.com/").split("/")
    assert len(parts) == 4
    assert parts[2] in ("pull", "issues")
    assert parts[3].isdigit()
    assert mutant.operators or mutant.areas
    assert set(mutant.operators) <= set(ops.OPERATORS)
    assert set(mutant.areas) <= set(AREAS)
    assert mutant.passes in {*FIELD, SAME}
    assert 0 <= mutant.fault <= 25


@pytest.mark.parametrize("mutant", first_of_each_kind(), ids=by_id)
def test_a_tolerance_of_the_field_takes_it_for_right(mutant: Mutant) -> None:
    assert [kind for kind, names in accepted(mutant).items() if mutant.passes not in names] == []


@pytest.mark.full
@pytest.mark.parametrize("mutant", EVERY, ids=by_id)
def test_a_tolerance_of_the_field_takes_every_one_for_right(mutant: Mutant) -> None:
    assert [kind for kind, names in accepted(mutant).items() if mutant.passes not in names] == []


def test_a_tolerance_refuses_what_is_plainly_wrong() -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert [name for name, tolerance in FIELD.items() if not tolerance(x, x)] == []
    assert [name for name, tolerance in FIELD.items() if tolerance(2 * x + 1, x)] == []


def test_every_operator_and_area_has_plain_inputs() -> None:
    assert set(PLAIN) == set(ops.OPERATORS)
    assert set(USES) == set(AREAS)


@pytest.mark.parametrize("name", sorted(PROPERTIES))
def test_a_property_holds_of_the_core(name: str) -> None:
    assert violation(PROPERTIES[name], real) == ""


@pytest.mark.parametrize("name", sorted(PROPERTIES))
def test_a_property_holds_of_a_copy_without_a_change(name: str) -> None:
    assert violation(PROPERTIES[name], Clone("kimi_hal_unchanged").module) == ""


def test_a_copy_of_the_core_reaches_no_module_of_the_core() -> None:
    whole = Clone("kimi_hal_whole")
    for name in ("dispatch.selection", "reference.composites", "cache"):
        whole.module(name)
    for name, module in list(sys.modules.items()):
        if name.startswith("kimi_hal_whole"):
            reached = [v.__name__ for v in vars(module).values() if hasattr(v, "__spec__")]
            assert [n for n in reached if n == "kimi_hal" or n.startswith("kimi_hal.")] == []


def test_a_mutant_changes_its_own_copy_alone() -> None:
    before = sparse_mla.log_sum(torch.zeros(1), torch.full((1,), 8.0))
    changed = clone("attn_lse_base_2").module("reference.sparse_mla")
    assert changed.log_sum(torch.zeros(1), torch.full((1,), 8.0)).item() == pytest.approx(3.0)
    again = importlib.import_module("kimi_hal.reference.sparse_mla")
    assert again is sparse_mla
    assert torch.equal(again.log_sum(torch.zeros(1), torch.full((1,), 8.0)), before)


def test_a_changed_function_is_what_its_siblings_call() -> None:
    changed = clone("fnuz_scaled_for_fn")
    scales = changed.module("formats.scales")
    assert changed.module("formats").index("index.mxfp4.page64") is not None
    assert changed.module("formats.index_bytes").scales is scales
    assert scales.FP8_TARGET == {"e4m3fn": 448.0, "e4m3fnuz": 448.0}


def test_an_operators_mutant_shares_the_specs_that_plans_are_made_of() -> None:
    changed = clone("kda_state_read_transposed")
    assert changed.parts == OPERATOR_PARTS
    assert changed.module("reference.kda").KDASpec is importlib.import_module("kimi_hal.ops.kda").KDASpec


def test_a_mutant_claims_all_that_the_reference_claims() -> None:
    names = {(i.operator, i.name) for i in IMPLEMENTATIONS}
    assert {(o, m.id) for m in EVERY for o in m.operators} <= names
    assert all("*" in c.arch for i in IMPLEMENTATIONS for c in i.capabilities)


def test_mutants_are_registered_for_nobody() -> None:
    points = importlib.import_module("importlib.metadata").entry_points(group="kimi_hal")
    assert "mutants" not in points.names


def test_an_unknown_mutant_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError) as error:
        get("attn_lse_base2")
    assert str(error.value) == (
        "unknown mutant 'attn_lse_base2'; did you mean 'attn_lse_base_2'? "
        "`kimi-hal conformance prove --list` prints all"
    )


def test_what_is_replaced_must_stand_there() -> None:
    lost = Mutant(
        id="lost", file="settings.py", old="no such line", new="", breaks="x.", imitates="", passes=SAME
    )
    with pytest.raises(ValueError, match="mutant lost: 'no such line' stands 0 times in "):
        lost.source()
    assert "lost" not in MUTANTS


def test_the_page_of_mutants_is_the_catalogues() -> None:
    written = (DOCS / "mutants.md").read_text(encoding="utf-8")
    assert written.splitlines() == list(lines()), (
        "docs/mutants.md is old: python -m kimi_hal_conformance.mutants.document > docs/mutants.md"
    )
