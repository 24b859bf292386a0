from __future__ import annotations

import pytest
import torch
from latent_cases import FP8, Latents, int32, queries
from torch import Tensor

from kimi_hal.errors import SpecError
from kimi_hal.ops import merge_attn_states, sparse_mla, store_latent
from kimi_hal.ops.check import problems
from kimi_hal.ops.operator import Operator, output_shapes
from kimi_hal.ops.sparse_mla import MergeSpec, SparseMLASpec, StoreLatentSpec
from kimi_hal.ops.spec import DCP, Spec

Operands = dict[str, Tensor | None]


def operands(rows: int = 2, heads: int = 3, width: int = 4, **changes: Tensor | None) -> Operands:
    latents = Latents()
    given: Operands = {
        "q": queries(rows, heads),
        "cache": latents.cache,
        "indices": torch.zeros(rows, width, dtype=torch.int32),
        "k_scale": latents.k_scale,
    }
    return given | changes


def mla(**fields: object) -> SparseMLASpec:
    return SparseMLASpec(**{"num_heads": 3, "latent": FP8, "page": 16, **fields})


def wrong_values(op: Operator, spec: Spec, given: Operands) -> list[str]:
    assert op.values is not None
    everything = {name: given.get(name) for name in op.signature.parameters}
    return list(op.values(spec, None, everything))


# --- Specs ------------------------------------------------------------------------------------------------


def test_an_unknown_format_names_the_nearest() -> None:
    with pytest.raises(SpecError, match=r"did you mean 'latent\.fp8\.e4m3fn\.tensor'"):
        SparseMLASpec(num_heads=12, latent="latent.fp8.e4m3.tensor")
    with pytest.raises(SpecError, match=r"unknown latent format 'index.mxfp4.page64'"):
        StoreLatentSpec(latent="index.mxfp4.page64")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"num_heads": 0}, "num_heads=0 is not 1 to 128"),
        ({"num_heads": 129}, "num_heads=129 is not 1 to 128"),
        (
            {"index_space": "slots"},
            "index_space='slots' is not 'slot' | 'position' | 'local'; did you mean 'slot'?",
        ),
        ({"q_dtype": "float16"}, "q_dtype='float16' is not 'bfloat16' | 'float8_e4m3fn' | 'float8_e4m3fnuz'"),
        ({"kv_rank": 256}, "kv_rank=256 is not 512"),
        ({"topk": True}, "topk must be int, got bool True"),
    ],
)
def test_a_field_outside_its_domain_is_refused(fields: dict[str, object], reason: str) -> None:
    with pytest.raises(SpecError) as caught:
        mla(**fields)
    assert str(caught.value).startswith(f"SparseMLASpec: {reason}")


def test_specs_survive_json() -> None:
    spec = mla(index_space="position", dcp=DCP(world=8, rank=3, interleave=64), numerics=("attn.p=bf16",))
    assert SparseMLASpec.from_json(spec.key()) == spec


# --- metadata ---------------------------------------------------------------------------------------------


def test_outputs_have_the_specs_dtype_and_an_lse_without_columns_unless_asked() -> None:
    given = operands()
    out, lse = output_shapes(sparse_mla, mla(out_dtype="float32", return_lse=False), None, given)
    assert (out.shape, out.dtype) == ((2, 3, 512), "float32")
    assert (lse.shape, lse.dtype) == ((2, 0), "float32")


@pytest.mark.parametrize(
    ("fields", "changes", "reasons"),
    [
        ({}, {}, []),
        ({"topk": 3}, {}, ["indices must be [T <=topk] with topk=3, got shape [2, 4]"]),
        ({}, {"k_scale": None}, ["k_scale is required by this Spec"]),
        (
            {"latent": "latent.bf16"},
            {},
            [
                "cache must be [pages page_bytes] with page_bytes=18432, got shape [4, 9216]",
                "k_scale is refused by this Spec",
            ],
        ),
        (
            {"q_dtype": "float8_e4m3fn"},
            {},
            ["q must be float8_e4m3fn, got bfloat16", "q_scale is required by this Spec"],
        ),
        ({}, {"q_scale": torch.ones(1)}, ["q_scale is refused by this Spec"]),
        ({}, {"index_len": int32([1, 1])}, ["index_len is refused by this Spec"]),
        ({"has_index_len": True}, {}, ["index_len is required by this Spec"]),
        (
            {"index_space": "local"},
            {},
            ["block_table is required by this Spec", "row_req is required by this Spec"],
        ),
        (
            {},
            {"block_table": int32([[0]]), "row_req": int32([0, 0])},
            ["block_table is refused by this Spec", "row_req is refused by this Spec"],
        ),
        ({"num_heads": 4}, {}, ["q must be [T H D] with H=4, got shape [2, 3, 576]"]),
        ({"page": 64}, {}, ["cache must be [pages page_bytes] with page_bytes=36864, got shape [4, 9216]"]),
    ],
)
def test_metadata_is_refused_with_every_reason(
    fields: dict[str, object], changes: Operands, reasons: list[str]
) -> None:
    assert problems(sparse_mla, mla(**fields), operands(**changes)) == reasons


def test_a_lent_output_must_fit() -> None:
    given = operands(out=torch.zeros(2, 3, 512), lse_out=torch.zeros(2, 3))
    assert problems(sparse_mla, mla(), given) == ["out must be bfloat16, got float32"]


def test_strides_of_the_last_dimension_are_refused_by_name() -> None:
    q = queries(2, 3).transpose(1, 2).contiguous().transpose(1, 2)
    assert problems(sparse_mla, mla(), operands(q=q)) == [
        "q must have stride 1 in its last dimension, got strides [1728, 1, 3]"
    ]


# --- values, in checked mode --------------------------------------------------------------------------------


def test_padding_and_stale_entries_pass() -> None:
    spec = mla(index_space="local", has_index_len=True)
    given = operands(
        indices=int32([[0, -1, -7, 2**30], [2**30, 2**30, -1, 5]]),
        index_len=int32([3, 0]),
        block_table=int32([[3, 2**30]]),
        row_req=int32([0, 2**30]),  # a row without a key: not read
    )
    assert problems(sparse_mla, spec, given) == []
    assert wrong_values(sparse_mla, spec, given) == []


@pytest.mark.parametrize(
    ("fields", "changes", "reasons"),
    [
        ({}, {"indices": int32([[0, 64], [-9, 3]])}, ["indices holds 64, beyond the cache's tokens (64)"]),
        (
            {"has_index_len": True},
            {"index_len": int32([-1, 5])},
            ["index_len holds -1, below 0", "index_len holds 5, beyond 4"],
        ),
        (
            {"index_space": "local"},
            {"indices": int32([[32], [0]]), "block_table": int32([[0, 1]]), "row_req": int32([0, 0])},
            ["indices holds 32, beyond the block table's tokens (32 a rank)"],
        ),
        (
            {"index_space": "position", "dcp": DCP(world=2)},
            {"indices": int32([[63], [64]]), "block_table": int32([[0, 1]]), "row_req": int32([0, 0])},
            ["indices holds 64, beyond the block table's tokens (32 a rank)"],
        ),
        (
            {"index_space": "local"},
            {"indices": int32([[0], [1]]), "block_table": int32([[0]]), "row_req": int32([0, 1])},
            ["row_req holds 1, beyond 0"],
        ),
        (
            {"index_space": "local"},
            {"indices": int32([[0], [16]]), "block_table": int32([[0, 4]]), "row_req": int32([0, 0])},
            ["block_table holds 4, beyond the cache's pages (4)"],
        ),
    ],
)
def test_values_out_of_range_are_errors_in_checked_mode(
    fields: dict[str, object], changes: Operands, reasons: list[str]
) -> None:
    assert wrong_values(sparse_mla, mla(**fields), operands(**changes)) == reasons


def test_a_block_that_only_another_rank_reads_is_not_checked() -> None:
    spec = mla(index_space="position", dcp=DCP(world=2, rank=0))
    given = operands(
        indices=int32([[33, -1], [0, 2]]), block_table=int32([[0, 2**30]]), row_req=int32([0, 0])
    )
    assert wrong_values(sparse_mla, spec, given) == []


def test_an_output_over_an_input_is_an_error_in_checked_mode() -> None:
    memory = torch.zeros(2, 3, 576).bfloat16()
    given = operands(q=memory, out=memory[..., :512])
    assert wrong_values(sparse_mla, mla(), given) == ["out overlaps q"]


def test_one_slot_of_two_live_rows_is_an_error_unless_it_is_the_dump() -> None:
    latents = Latents()
    given: Operands = {
        "kv_c": torch.zeros(4, 512),
        "k_pe": torch.zeros(4, 64),
        "slots": torch.tensor([0, -1, 0, -1]),
        "cache": latents.cache,
        "k_scale": latents.k_scale,
    }
    plain, dump = (StoreLatentSpec(latent=FP8, page=16, dump_slot=slot) for slot in (-1, 0))
    assert wrong_values(store_latent, plain, given) == ["slots names 0 twice"]
    assert wrong_values(store_latent, dump, given) == []
    given["slots"] = torch.tensor([64])
    assert wrong_values(store_latent, plain, given) == ["slots holds 64, beyond the cache's tokens (64)"]


def test_a_merge_may_write_over_its_first_part_only() -> None:
    outs, lses = torch.zeros(3, 2, 3, 8), torch.zeros(3, 2, 3)
    spec = MergeSpec(parts=3, num_heads=3, dim=8, dtype="float32", return_lse=True)
    given: Operands = {"outs": outs, "lses": lses, "out": outs[0], "lse_out": torch.zeros(2, 3)}
    assert problems(merge_attn_states, spec, given) == []
    assert wrong_values(merge_attn_states, spec, given) == []
    given["out"] = outs[1]
    assert wrong_values(merge_attn_states, spec, given) == ["out overlaps outs without being outs[0]"]
    given |= {"out": None, "lse_out": lses[0]}
    assert wrong_values(merge_attn_states, spec, given) == ["lse_out overlaps lses"]
