"""The list of cases: which there are, from which profile on, and why each exists."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner, Result

from kimi_hal_conformance.asked import PROFILE_NAMES
from kimi_hal_conformance.case import CASES, INTERP, PROFILES
from kimi_hal_conformance.cases import load
from kimi_hal_conformance.cli import cli

load()


def listed(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["list", *arguments])


def ids(result: Result) -> set[str]:
    assert result.exit_code == 0, result.output
    return {line.partition(" ")[0] for line in result.output.splitlines()}


def test_every_case_is_listed_with_a_reason() -> None:
    result = listed()
    assert ids(result) == set(CASES)
    for line in result.output.splitlines():
        case = CASES[line.partition(" ")[0]]
        assert re.fullmatch(r"\S+ +\S+ +(fault \d+)? +\S.*\.", line), line
        assert line.endswith(case.why)


def test_an_operators_cases_alone() -> None:
    assert ids(listed("--operator", "kda_gate")) == {c.id for c in CASES.values() if c.operator == "kda_gate"}


def test_a_profiles_cases_alone() -> None:
    assert ids(listed("--profile", "interp")) == {c.id for c in CASES.values() if c.runs_in(INTERP)}


def test_a_faults_cases_alone_name_the_class() -> None:
    result = listed("--fault", "14", "--operator", "kda_gate")
    assert ids(result) == {c.id for c in CASES.values() if c.fault == 14 and c.operator == "kda_gate"}
    assert all("  fault 14  " in line for line in result.output.splitlines())


def test_the_options_know_every_profile() -> None:
    assert PROFILE_NAMES == PROFILES


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--operator", "sparse_mha"), "unknown operator 'sparse_mha'; did you mean 'sparse_mla'?"),
        (("--fault", "99"), "Error: unknown class of fault 99: docs/faults.md has 1 to "),
        (("--profile", "fast"), "Error: Invalid value for '--profile': 'fast' is not one of"),
        (("--operator", "kda_gate", "--fault", "5"), "Error: no case is of all that was asked for"),
    ],
)
def test_a_wrong_call_is_status_2_and_names_what_is_possible(
    arguments: tuple[str, ...], message: str
) -> None:
    result = listed(*arguments)
    assert result.exit_code == 2
    assert message in result.output
