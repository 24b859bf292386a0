"""Version numbers: their order, and specifiers."""

from __future__ import annotations

import pytest

from kimi_hal.dispatch import versions


def test_versions_are_ordered():
    ordered = [
        "3.6.dev1",
        "3.6a1",
        "3.6b2",
        "3.6rc1.dev3",
        "3.6rc1",
        "3.6",
        "3.6.post1",
        "3.6.1",
        "3.10",
        "12",
    ]
    assert sorted(sorted(ordered), key=versions.key) == ordered


@pytest.mark.parametrize(
    ("version", "specifier", "expected"),
    [
        ("3.6.0", "==3.6", True),
        ("3.6.1", "!=3.6", True),
        ("3.6", ">=3.6", True),
        ("3.5.9", ">=3.6", False),
        ("3.10", ">3.9", True),
        ("4.0", ">=3.6,<4", False),
        ("3.9", ">=3.6, <4", True),
        ("3.6rc1", ">=3.6", False),
        ("3.6.3", "~=3.6.1", True),
        ("3.7", "~=3.6.1", False),
        ("3.9", "~=3.6", True),
        ("4", "~=3.6", False),
        ("2.13.0+cu130", "==2.13.0", True),
        ("580.65.06", ">=580", True),
        ("v1.2", "<=1.2", True),
    ],
)
def test_a_specifier_is_met_or_not(version, specifier, expected):
    assert versions.satisfies(version, specifier) is expected


def test_a_specifier_that_can_be_read_has_no_problem():
    assert versions.problem(">=3.6,<4") is None


@pytest.mark.parametrize(
    ("specifier", "sentence"),
    [
        ("3.6", "'3.6' is not a version specifier; write '>=3.6' or '>=3.6,<4'"),
        ("=>3.6", "'=>3.6' is not a version specifier; write '>=3.6' or '>=3.6,<4'"),
        ("==3.*", "'3.*' is not a version number"),
        ("", "'' is not a version specifier; write '>=3.6' or '>=3.6,<4'"),
    ],
)
def test_a_specifier_that_cannot_be_read_is_a_sentence(specifier, sentence):
    assert versions.problem(specifier) == sentence
