"""The suite finds cases for what each implementation claims on an H200, without one."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kimi_hal.dispatch.contract import Implementation
from kimi_hal.dispatch.matching import Target
from kimi_hal.domain import Domain, OneOf, Range
from kimi_hal_conformance.claims.walk import walk
from kimi_hal_nvidia.implementations import IMPLEMENTATIONS

H200 = Target(arch="sm_90", facts={"nvidia-driver": "580.159.4", "triton": "3.6.0"})
OWN = [each for each in IMPLEMENTATIONS if each.name in ("cuda", "cuda_fp8_sum")]


@pytest.mark.parametrize("implementation", OWN, ids=lambda each: f"{each.operator}={each.name}")
def test_claims_on_an_h200_have_cases(implementation: Implementation) -> None:
    found = walk(implementation, H200, "standard")
    assert found.made
    assert not found.failed


def test_several_ranks_are_tried_where_a_claim_leaves_open_whose_keys_are_whose() -> None:
    own = next(each for each in OWN if each.operator == "dsa_decode")
    capability, ranks = own.capabilities[0], OneOf((1, 2))
    more: dict[str, Domain] = {
        **{f"{part}.dcp.world": ranks for part in ("attn", "indexer", "merge")},
        "merge.topk": Range(1, 2048),
        "attn.has_index_len": OneOf((False, True)),
    }
    spread = replace(capability, spec={**capability.spec, **more})
    made = walk(replace(own, capabilities=(spread,)), H200, "quick").made
    assert {json.loads(one.spec)["attn"]["dcp"]["world"] for one in made} == {1, 2}
