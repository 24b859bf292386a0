"""The portable merge and gather, interpreted and on a GPU: each check of their modules under ``tests/`` is a test."""

from __future__ import annotations

import pytest
from interpreted import names, outcomes

pytest.importorskip("triton", reason="Triton is not installed: its CPU interpreter cannot run")

MODULES = ("portable_merge", "portable_all_gather")
CHECKS = [(module, check) for module in MODULES for check in names(module)]


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, str]]:
    return {module: outcomes(module, names(module)) for module in MODULES}


@pytest.mark.parametrize(("module", "check"), CHECKS)
def test_merge(module: str, check: str, found: dict[str, dict[str, str]]) -> None:
    assert found[module][check] == "", found[module][check]


@pytest.fixture(scope="module")
def found_on_gpu() -> dict[str, dict[str, str]]:
    return {module: outcomes(module, names(module), device="cuda") for module in MODULES}


@pytest.mark.gpu
@pytest.mark.parametrize(("module", "check"), CHECKS)
def test_merge_on_a_gpu(module: str, check: str, found_on_gpu: dict[str, dict[str, str]]) -> None:
    assert found_on_gpu[module][check] == "", found_on_gpu[module][check]
