"""Scores, and selections from them, by FP8 products: where a Spec admits what they round, else refused in words."""

from __future__ import annotations

from typing import Any

import pytest
from machines import explained

from kimi_hal.dispatch.explain import Explanation
from kimi_hal.ops.indexer import IndexerSpec, IndexerTopKSpec
from kimi_hal.ops.spec import Limits

NAME = "nvidia.cuda_fp8_sum"
FP8, MXFP4 = "index.fp8.e4m3fn.pow2.page64", "index.mxfp4.page64"
SUM = "logits=fp8_sum"
SPECS: dict[str, type[IndexerSpec]] = {"indexer_logits": IndexerSpec, "indexer_topk": IndexerTopKSpec}


def told(
    numerics: tuple[str, ...] = (),
    arch: str = "sm_90",
    name: str | None = None,
    rows: int = 64,
    operator: str = "indexer_logits",
    **fields: Any,
) -> Explanation:
    """Ask for an operator over so many rows of a request on a device of an architecture."""
    spec = SPECS[operator](**{"index": FP8, "numerics": numerics, **fields})
    limits = Limits(max_rows=rows, max_reqs=1, max_context=1024, rows_per_req=rows)
    return explained(operator, spec, limits, arch, name)


def against(found: Explanation) -> list[str]:
    return [reason for c in found.candidates if c.full_name == NAME for reason in c.refusals]


@pytest.mark.parametrize("operator", SPECS)
@pytest.mark.parametrize("rows", [24, 2048])
def test_it_is_taken_where_a_spec_admits_what_it_rounds(operator: str, rows: int) -> None:
    found = told((SUM,), rows=rows, operator=operator)
    assert (found.chosen, found.execution) == (NAME, "native")
    assert told((SUM,), rows=rows, operator=operator, index=MXFP4).chosen == "nvidia.cuda"


@pytest.mark.parametrize("operator", SPECS)
@pytest.mark.parametrize("rows", [1, 2, 23])
def test_for_few_rows_exact_products_are_taken_all_the_same(operator: str, rows: int) -> None:
    assert told((SUM,), rows=rows, operator=operator).chosen == "nvidia.cuda"
    assert told((SUM,), rows=rows, operator=operator, name=NAME).chosen == NAME


@pytest.mark.parametrize("operator", SPECS)
def test_where_a_spec_admits_nothing_exact_products_are_taken(operator: str) -> None:
    found = told(operator=operator)
    assert found.chosen == "nvidia.cuda"
    assert against(found) == [
        "it rounds beyond the contract (logits=fp8_sum); Spec.numerics or its name admits it"
    ]


def test_by_name_it_says_what_it_rounds() -> None:
    found = told(name=NAME)
    assert found.chosen == NAME
    assert "it rounds beyond the contract (logits=fp8_sum)" in found.why


@pytest.mark.parametrize(
    ("arch", "fields", "reason"),
    [
        ("sm_100", {}, "arch sm_100 is not sm_90"),
        ("sm_90", {"num_heads": 96}, "num_heads=96 is not 1 to 64"),
        (
            "sm_90",
            {"index": MXFP4},
            "index='index.mxfp4.page64' is not 'index.fp8.e4m3fn.f32.page64' | "
            "'index.fp8.e4m3fn.pow2.page64' | 'index.fp8.e4m3fn.ue8m0x4.page64'",
        ),
    ],
)
def test_what_it_has_no_product_for_is_refused_by_name(
    arch: str, fields: dict[str, Any], reason: str
) -> None:
    assert against(told((SUM,), arch, **fields)) == [reason]
