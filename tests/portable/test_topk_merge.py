"""The portable selection, interpreted: each check of ``tests/portable_topk.py`` is a test."""

from __future__ import annotations

import pytest
from interpreted import names, outcomes

pytest.importorskip("triton", reason="Triton is not installed: its CPU interpreter cannot run")

CHECKS = names("portable_topk")


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    return outcomes("portable_topk", CHECKS)


@pytest.mark.parametrize("check", CHECKS)
def test_selection(check: str, found: dict[str, str]) -> None:
    assert found[check] == "", found[check]
