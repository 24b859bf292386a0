"""The portable indexer, interpreted and on a GPU: each check of ``tests/portable_indexer.py`` is a test."""

from __future__ import annotations

import pytest
from interpreted import names, outcomes

pytest.importorskip("triton", reason="Triton is not installed: its CPU interpreter cannot run")

CHECKS = names("portable_indexer")


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    return outcomes("portable_indexer", CHECKS)


@pytest.mark.parametrize("check", CHECKS)
def test_indexer(check: str, found: dict[str, str]) -> None:
    assert found[check] == "", found[check]


@pytest.fixture(scope="module")
def found_on_gpu() -> dict[str, str]:
    return outcomes("portable_indexer", CHECKS, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("check", CHECKS)
def test_indexer_on_a_gpu(check: str, found_on_gpu: dict[str, str]) -> None:
    assert found_on_gpu[check] == "", found_on_gpu[check]
