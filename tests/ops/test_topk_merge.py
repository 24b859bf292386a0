from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from index_cases import int32

from kimi_hal.errors import SpecError
from kimi_hal.ops import topk_merge, topk_select
from kimi_hal.ops.check import problems
from kimi_hal.ops.operator import Operator, output_shapes
from kimi_hal.ops.spec import DCP, Spec
from kimi_hal.ops.topk_merge import TopKMergeSpec, TopKSpec


def wrong_values(op: Operator, spec: Spec, given: Mapping[str, Any]) -> list[str]:
    assert op.values is not None
    return list(op.values(spec, None, {name: given.get(name) for name in op.signature.parameters}))


def merged(**fields: Any) -> TopKMergeSpec:
    return TopKMergeSpec(**{"dcp": DCP(world=2), "topk": 4, **fields})


# --- Specs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (
            {"protocol": "compact"},
            "protocol='compact' sends 16 bits of score and needs score='bfloat16', got 'float32'",
        ),
        ({"protocol": "scores_only"}, "protocol='scores_only' keeps ids local and needs return_global=False"),
        ({"quota": 3}, "quota=3 is for protocol='compact', got protocol='full'"),
        (
            {"protocol": "compacted"},
            "protocol='compacted' is not 'full' | 'compact' | 'scores_only'; did you mean 'compact'?",
        ),
    ],
)
def test_a_protocol_that_cannot_serve_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(SpecError) as caught:
        merged(**fields)
    assert str(caught.value) == f"TopKMergeSpec: {reason}"


@pytest.mark.parametrize(
    ("world", "topk", "quota", "sent"),
    [
        (8, 2048, None, 384),
        (2, 2048, None, 1536),
        (3, 100, None, 50),
        (1, 16, None, 16),
        (8, 64, 7, 7),
        (2, 4, 9, 4),
    ],
)
def test_the_quota_is_one_and_a_half_shares(world: int, topk: int, quota: int | None, sent: int) -> None:
    spec = merged(dcp=DCP(world=world), topk=topk, protocol="compact", score="bfloat16", quota=quota)
    assert spec.candidates == sent


def test_the_defaults_of_a_selection() -> None:
    spec = TopKSpec()
    assert (spec.topk, spec.score, spec.scores_dtype, spec.has_row_start) == (
        2048,
        "float32",
        "float32",
        False,
    )


# --- shapes and metadata ----------------------------------------------------------------------------------


def test_a_selection_has_k_columns() -> None:
    spec = TopKSpec(topk=8, score="bfloat16", return_selected=True)
    given = {"scores": torch.empty(3, 100), "row_len": int32([1, 2, 3])}
    assert [s.shape for s in output_shapes(topk_select, spec, None, given)] == [(3, 8), (3, 8)]
    assert problems(topk_select, spec, given) == []


def test_a_start_is_there_if_and_only_if_the_spec_says_so() -> None:
    given = {"scores": torch.empty(1, 9), "row_len": int32([1])}
    assert problems(topk_select, TopKSpec(topk=2, has_row_start=True), given) == [
        "row_start is required by this Spec"
    ]
    given["row_start"] = int32([0])
    assert problems(topk_select, TopKSpec(topk=2), given) == ["row_start is refused by this Spec"]


def test_scores_have_the_dtype_of_the_spec() -> None:
    given = {"scores": torch.empty(1, 9), "row_len": int32([1])}
    reason = "scores must be bfloat16, got float32"
    assert problems(topk_select, TopKSpec(topk=2, scores_dtype="bfloat16"), given) == [reason]


def test_scores_with_a_strided_column_are_refused() -> None:
    given = {"scores": torch.empty(9, 4).t(), "row_len": torch.zeros(4, dtype=torch.int32)}
    (reason,) = problems(topk_select, TopKSpec(topk=2), given)
    assert reason == "scores must have stride 1 in its last dimension, got strides [1, 4]"


@pytest.mark.parametrize(("wanted", "width"), [(True, 4), (False, 0)])
def test_a_merge_returns_local_length_and_global(wanted: bool, width: int) -> None:
    given = {"scores": torch.empty(3, 4), "indices": torch.empty(3, 4).int(), "row_len": int32([1, 2, 3])}
    shapes = output_shapes(topk_merge, merged(return_global=wanted), None, given)
    assert [(s.keyword, s.shape, s.dtype) for s in shapes] == [
        ("local_out", (3, 4), "int32"),
        ("len_out", (3,), "int32"),
        ("global_out", (3, width), "int32"),
    ]


def test_a_merge_takes_k_candidates() -> None:
    given = {"scores": torch.empty(1, 3), "indices": torch.empty(1, 4).int(), "row_len": int32([1])}
    assert problems(topk_merge, merged(), given) == ["scores must be [T k] with k=4, got shape [1, 3]"]


def test_the_merge_needs_a_group() -> None:
    assert topk_merge.grouped
    assert not topk_select.grouped


# --- values -----------------------------------------------------------------------------------------------


def selecting(row_len: list[int], start: list[int] | None = None) -> list[str]:
    spec = TopKSpec(topk=2, has_row_start=start is not None)
    given = {"scores": torch.zeros(len(row_len), 10), "row_len": int32(row_len)}
    return wrong_values(topk_select, spec, given if start is None else given | {"row_start": int32(start)})


def test_lengths_and_starts_are_checked_against_the_row() -> None:
    assert selecting([10, 0]) == []
    assert selecting([3, 3], [7, 0]) == []
    assert selecting([-1, 0]) == ["row_len holds -1, below 0"]
    assert selecting([11, 0]) == ["row_len reaches column 11, beyond the row's 10 scores"]
    assert selecting([9, 0], [7, 0]) == ["row_len reaches column 16, beyond the row's 10 scores"]
    assert selecting([0, 0], [11, 0]) == [
        "row_start holds 11, beyond 10",
        "row_len reaches column 11, beyond the row's 10 scores",
    ]


def merging(indices: list[int], length: int) -> list[str]:
    given = {"scores": torch.zeros(1, 4), "indices": int32([indices]), "row_len": int32([length])}
    return wrong_values(topk_merge, merged(), given)


def test_candidates_are_checked_against_the_local_length() -> None:
    assert merging([3, 0, -1, -1], 8) == []
    assert merging([4, 0, -1, -1], 8) == ["indices holds 4, beyond the local length of its row"]
    assert merging([2, 0, 2, -1], 8) == ["indices names 2 twice in a row"]
    assert merging([-1] * 4, -3) == ["row_len holds -3, below 0"]


def test_outputs_that_overlap_are_named() -> None:
    pool = torch.zeros(1, 4, dtype=torch.int32)
    given = {"scores": torch.zeros(1, 4), "indices": pool, "row_len": int32([8]), "local_out": pool}
    assert wrong_values(topk_merge, merged(), given)[-1] == "local_out overlaps indices"
