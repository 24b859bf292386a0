"""The portable selection, interpreted and on a GPU: each check of ``tests/portable_topk.py`` is a test."""

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


@pytest.fixture(scope="module")
def found_on_gpu() -> dict[str, str]:
    return outcomes("portable_topk", CHECKS, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("check", CHECKS)
def test_selection_on_a_gpu(check: str, found_on_gpu: dict[str, str]) -> None:
    assert found_on_gpu[check] == "", found_on_gpu[check]
