"""The suite finds cases for what each implementation claims on an H200, without one."""

from __future__ import annotations

import pytest

from kimi_hal.dispatch.contract import Implementation
from kimi_hal.dispatch.matching import Target
from kimi_hal_conformance.claims.walk import walk
from kimi_hal_nvidia.implementations import IMPLEMENTATIONS

H200 = Target(arch="sm_90", facts={"nvidia-driver": "580.159.4", "triton": "3.6.0"})
OWN = [each for each in IMPLEMENTATIONS if each.name in ("cuda", "cuda_fp8_sum")]


@pytest.mark.parametrize("implementation", OWN, ids=lambda each: f"{each.operator}={each.name}")
def test_claims_on_an_h200_have_cases(implementation: Implementation) -> None:
    found = walk(implementation, H200, "standard")
    assert found.made
    assert not found.failed
