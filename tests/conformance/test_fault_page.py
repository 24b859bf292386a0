"""The page of faults names cases that exist, of the class under which they stand, and leaves no operator out."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from kimi_hal import ops
from kimi_hal_conformance.case import CASES
from kimi_hal_conformance.cases import load
from kimi_hal_conformance.fault_classes import CLASSES

load()
PAGE = (Path(__file__).parents[2] / "docs/faults.md").read_text(encoding="utf-8")
SECTION = re.compile(r"^## (\d+)\. .*?(?=^## )", re.DOTALL | re.MULTILINE)
SECTIONS = {int(m[1]): m[0] for m in SECTION.finditer(PAGE)}


def cases_named(section: str) -> list[str]:
    """Return the ids, some with a star for any text, that a section gives as its cases."""
    found = re.search(r"^\* \*Cases\.\* (.*?)(?=^\* )", section, re.DOTALL | re.MULTILINE)
    return re.findall(r"`([^`]+)`", found[1]) if found else []


def meant(name: str) -> list[str]:
    """Return the ids that a name stands for."""
    return [case for case in CASES if fnmatchcase(case, name)]


def test_every_class_has_a_section() -> None:
    assert list(SECTIONS) == list(CLASSES)


@pytest.mark.parametrize("number", CLASSES)
def test_a_section_has_a_right_answer_reports_and_what_it_does_not_concern(number: int) -> None:
    section = SECTIONS[number]
    assert "* *Right answer.* " in section
    assert len(re.findall(r"https://github\.com/[\w.-]+/[\w.-]+/(?:issues|pull)/\d+", section)) >= 2
    assert "* *Not applicable elsewhere.* " in section


@pytest.mark.parametrize("number", CLASSES)
def test_the_cases_of_a_section_exist_and_are_those_of_its_class(number: int) -> None:
    named = {name: meant(name) for name in cases_named(SECTIONS[number])}
    assert [name for name, found in named.items() if not found] == []
    found = {case for ids in named.values() for case in ids}
    own = {case.id for case in CASES.values() if case.fault == number}
    assert own - found == set()
    assert {case for case in found if CASES[case].fault not in (0, number)} == set()


@pytest.mark.parametrize("number", CLASSES)
def test_an_operator_in_a_sections_text_exists(number: int) -> None:
    names = re.findall(
        r"`((?:kda|moe|store|topk|indexer|sparse|merge|dsa|all|prepare|quantize)_\w+)[`/]", SECTIONS[number]
    )
    assert set(names) <= set(ops.OPERATORS)
