from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from index_cases import MXFP4, POW2, Index, int32

from kimi_hal.errors import SpecError
from kimi_hal.ops import indexer_logits, indexer_topk, quantize_index_query, store_index_keys
from kimi_hal.ops.check import problems
from kimi_hal.ops.indexer import IndexerSpec, IndexerTopKSpec, IndexQuerySpec, StoreIndexSpec
from kimi_hal.ops.operator import Operator, output_shapes
from kimi_hal.ops.spec import DCP, Spec


def scored(rows: int = 2, name: str = POW2, **changes: Any) -> dict[str, Any]:
    """Return operands of ``indexer_logits`` over two requests of 100 and 20 keys."""
    index = Index([100, 20], name)
    index.table[index.table == 1 << 30] = 0
    q, q_scale, weights = index.query(rows)
    given = {
        "q": q,
        "q_scale": q_scale,
        "weights": weights,
        "cache": index.cache,
        "block_table": index.table,
        "row_req": int32([0, 1][:rows]),
        "row_len": int32([100, 20][:rows]),
    }
    return given | changes


SPEC = IndexerSpec(index=POW2, num_heads=4)
TOPK = IndexerTopKSpec(index=POW2, num_heads=4, topk=16)


def wrong_values(op: Operator, spec: Spec, given: Mapping[str, Any]) -> list[str]:
    assert op.values is not None
    return list(op.values(spec, None, {name: given.get(name) for name in op.signature.parameters}))


# --- Specs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [IndexQuerySpec, StoreIndexSpec, IndexerSpec, IndexerTopKSpec])
def test_an_unknown_format_names_the_nearest(spec: type[Spec]) -> None:
    with pytest.raises(SpecError, match=r"unknown index format .*; did you mean 'index\.mxfp4\.page64'"):
        spec(index="index.mxfp4.page46")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"score": "bf16"}, "score='bf16' is not 'float32' | 'bfloat16'; did you mean 'bfloat16'?"),
        ({"num_heads": 0}, "num_heads=0 is not 1 to 128"),
        ({"head_dim": 64}, "head_dim=64 is not 128"),
        ({"topk": 0}, "topk=0 is not 1 to 1048576"),
        ({"emit": "slots"}, "emit='slots' is not 'local' | 'slot'; did you mean 'slot'?"),
        (
            {"emit": "slot", "dcp": DCP(world=2)},
            "emit='slot' needs all keys on this rank; with sharded keys emit='local' and merge",
        ),
    ],
)
def test_a_field_outside_its_domain_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(SpecError) as caught:
        IndexerTopKSpec(index=POW2, **fields)
    assert str(caught.value) == f"IndexerTopKSpec: {reason}"


def test_replicated_keys_may_be_emitted_as_slots() -> None:
    assert IndexerTopKSpec(index=POW2, emit="slot", dcp=DCP(world=2, index="replicated")).emit == "slot"


def test_defaults_are_the_models() -> None:
    spec = IndexerTopKSpec(index=POW2)
    assert (spec.num_heads, spec.topk, spec.score, spec.ordered, spec.emit) == (
        32,
        2048,
        "float32",
        False,
        "local",
    )


def test_a_spec_survives_its_key() -> None:
    spec = IndexerTopKSpec(index=MXFP4, score="bfloat16", dcp=DCP(world=8, rank=3, interleave=64))
    assert IndexerTopKSpec.from_json(spec.key()) == spec


def test_the_default_weight_scale_is_of_the_true_heads() -> None:
    assert IndexQuerySpec(index=POW2).folded_scale == pytest.approx(1 / 64)
    assert IndexQuerySpec(index=POW2, num_heads=24).folded_scale == pytest.approx((128 * 24) ** -0.5)
    assert IndexQuerySpec(index=POW2, weight_scale=0.25).folded_scale == 0.25


def test_the_operators_import_no_torch() -> None:
    code = "import sys; from kimi_hal.ops import indexer_topk, topk_merge, all_gather; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# --- shapes and dtypes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype", "width", "scales"),
    [
        (POW2, "float8_e4m3fn", 128, 0),
        ("index.fp8.e4m3fnuz.f32.page64", "float8_e4m3fnuz", 128, 0),
        (MXFP4, "uint8", 64, 4),
    ],
)
def test_a_quantised_query_has_its_formats_shape(name: str, dtype: str, width: int, scales: int) -> None:
    spec = IndexQuerySpec(index=name, num_heads=24, weights_dtype="bfloat16")
    given = {"q": torch.empty(5, 24, 128), "weights": torch.empty(5, 24)}
    shapes = output_shapes(quantize_index_query, spec, None, given)
    assert [(s.keyword, s.shape, s.dtype) for s in shapes] == [
        ("q_out", (5, 24, width), dtype),
        ("q_scale_out", (5, 24, scales), "uint8"),
        ("weights_out", (5, 24), "bfloat16"),
    ]


@pytest.mark.parametrize(("selected", "width"), [(False, 0), (True, 16)])
def test_a_selection_has_k_columns(selected: bool, width: int) -> None:
    spec = IndexerTopKSpec(index=POW2, num_heads=4, topk=16, score="bfloat16", return_selected=selected)
    shapes = output_shapes(indexer_topk, spec, None, scored())
    assert [(s.shape, s.dtype) for s in shapes] == [((2, 16), "int32"), ((2, width), "bfloat16")]


def test_logits_are_as_wide_as_the_given_buffer() -> None:
    shapes = output_shapes(indexer_logits, SPEC, None, scored(out=torch.empty(2, 77)))
    assert shapes[0].shape == (2, 77)


def test_the_test_entry_is_declared() -> None:
    assert [out.keyword for out in indexer_topk.tested] == ["all_scores_out"]
    assert "all_scores_out" not in indexer_topk.signature.parameters


# --- metadata ---------------------------------------------------------------------------------------------


def test_right_operands_pass() -> None:
    assert problems(indexer_logits, SPEC, scored()) == []
    assert problems(indexer_topk, TOPK, scored()) == []
    four = IndexerSpec(index=MXFP4, num_heads=4)
    assert problems(indexer_logits, four, scored(name=MXFP4)) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"row_len": torch.zeros(2, dtype=torch.int64)}, "row_len must be int32, got int64"),
        ({"block_table": torch.zeros(2, 2, dtype=torch.int64)}, "block_table must be int32, got int64"),
        ({"weights": torch.zeros(2, 4).bfloat16()}, "weights must be float32, got bfloat16"),
        ({"q": torch.zeros(2, 4, 128)}, "q must be float8_e4m3fn, got float32"),
        ({"row_req": int32([0])}, "row_req must be [T] with T=2, got shape [1]"),
        (
            {"cache": torch.zeros(3, 132, dtype=torch.uint8)},
            "cache must be [pages page_bytes] with page_bytes=8448, got shape [3, 132]",
        ),
        ({"q_scale": None}, "q_scale is required by this Spec"),
        (
            {"q_scale": torch.zeros(2, 4, 4, dtype=torch.uint8)},
            "q_scale must be [T H S] with S=0, got shape [2, 4, 4]",
        ),
    ],
)
def test_wrong_operands_are_named(changes: dict[str, Any], reason: str) -> None:
    assert problems(indexer_logits, SPEC, scored(**changes)) == [reason]


def test_strided_rows_are_accepted() -> None:
    wide = torch.zeros(2, 3, dtype=torch.int32)
    assert problems(indexer_topk, TOPK, scored(row_len=wide[:, 1], row_req=wide[:, 2])) == []


def test_keys_may_have_more_rows_than_slots_but_not_fewer() -> None:
    spec, cache = StoreIndexSpec(index=POW2), torch.zeros(1, 8448, dtype=torch.uint8)
    given = {"k": torch.zeros(8, 128), "slots": torch.zeros(5, dtype=torch.int64), "cache": cache}
    assert problems(store_index_keys, spec, given) == []
    given["k"] = torch.zeros(4, 128)
    assert problems(store_index_keys, spec, given) == ["k must be [>=T D] with T=5, got shape [4, 128]"]


def test_write_slots_are_int64() -> None:
    given = {
        "k": torch.zeros(4, 128),
        "slots": int32([1, 2, 3, 4]),
        "cache": torch.zeros(1, 8448, dtype=torch.uint8),
    }
    assert problems(store_index_keys, StoreIndexSpec(index=POW2), given) == ["slots must be int64, got int32"]


# --- values -----------------------------------------------------------------------------------------------


def test_right_values_pass() -> None:
    assert wrong_values(indexer_logits, SPEC, scored(out=torch.empty(2, 128))) == []
    assert wrong_values(indexer_topk, TOPK, scored()) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"row_len": int32([100, -2])}, "row_len holds -2, below 0"),
        (
            {"row_len": int32([500, 0])},
            "row_len asks for 500 keys on this rank, beyond the block table's tokens (192)",
        ),
        ({"row_req": int32([0, 2])}, "row_req holds 2, beyond 1"),
        (
            {"block_table": int32([[0, 99, 0], [0, 0, 0]])},
            "block_table holds 99, beyond the cache's pages (4)",
        ),
    ],
)
def test_wrong_values_are_named(changes: dict[str, Any], reason: str) -> None:
    assert wrong_values(indexer_topk, TOPK, scored(**changes)) == [reason]


def test_padded_rows_and_table_tails_are_not_looked_at() -> None:
    table = int32([[0, 1, 1 << 30], [1 << 30] * 3])
    given = scored(block_table=table, row_req=int32([0, 77]), row_len=int32([100, 0]))
    assert wrong_values(indexer_topk, TOPK, given) == []


def test_a_length_beyond_the_given_columns_is_named() -> None:
    assert wrong_values(indexer_logits, SPEC, scored(out=torch.empty(2, 64))) == [
        "row_len asks for 100 keys on this rank, beyond the columns of out (64)"
    ]


def test_under_dcp_lengths_are_global() -> None:
    spec = IndexerTopKSpec(index=POW2, num_heads=4, topk=16, dcp=DCP(world=4, rank=0))
    assert (
        wrong_values(indexer_topk, spec, scored(row_len=int32([400, 0]), block_table=int32([[0, 1]] * 2)))
        == []
    )
    assert wrong_values(
        indexer_topk, spec, scored(row_len=int32([513, 0]), block_table=int32([[0, 1]] * 2))
    ) == ["row_len asks for 129 keys on this rank, beyond the block table's tokens (128)"]


def stored(slots: list[int], **fields: Any) -> list[str]:
    cache = torch.zeros(2, 8448, dtype=torch.uint8)
    given = {"k": torch.zeros(len(slots), 128), "slots": torch.tensor(slots), "cache": cache}
    return wrong_values(store_index_keys, StoreIndexSpec(index=POW2, **fields), given)


def test_repeated_and_outlying_slots_are_named() -> None:
    assert stored([3, -1, -1, 127]) == []
    assert stored([3, 128]) == ["slots holds 128, beyond the cache's tokens (128)"]
    assert stored([3, 5, 3]) == ["slots names 3 twice"]


def test_the_dump_slot_may_repeat() -> None:
    assert stored([4, 0, 0], dump_slot=0) == []
    assert stored([4, 0, 0]) == ["slots names 0 twice"]


def test_outputs_that_overlap_an_operand_are_named() -> None:
    given = scored()
    pool = torch.zeros(2, 32, dtype=torch.int32)
    given["row_len"] = pool[:, 0]
    given["out"] = pool[:, :16]
    assert wrong_values(indexer_topk, TOPK, given) == ["out overlaps row_len"]
