"""The portable KDA kernels, interpreted and on a GPU: each check of ``portable_kda.py`` is a test."""

from __future__ import annotations

import pytest
from interpreted import names, outcomes

pytest.importorskip("triton", reason="Triton is not installed: its CPU interpreter cannot run")

CHECKS = names("portable_kda")


@pytest.mark.parametrize("check", CHECKS)
def test_kda(check: str) -> None:
    assert outcomes("portable_kda", CHECKS)[check] == ""


@pytest.mark.gpu
@pytest.mark.parametrize("check", CHECKS)
def test_kda_on_a_gpu(check: str) -> None:
    assert outcomes("portable_kda", CHECKS, device="cuda")[check] == ""
