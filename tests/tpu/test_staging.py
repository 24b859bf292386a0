"""Pools that are moved to an interpreting machine: only named pages, renumbered, written back to where they were."""

from __future__ import annotations

import torch

from kimi_hal.ops.indexer import StoreIndexSpec, indexer_logits
from kimi_hal.ops.sparse_mla import SparseMLASpec
from kimi_hal_tpu import staging
from kimi_hal_tpu.static import pad

FP8 = "latent.fp8.e4m3fn.tensor"


def attention(indices: list[int], **fields: object) -> staging.Moved:
    spec = SparseMLASpec(num_heads=1, latent=FP8, page=4, topk=8, **fields)  # type: ignore[arg-type]
    cache = torch.arange(10, dtype=torch.uint8)[:, None].expand(10, 4 * 576).contiguous()
    operands = {"cache": cache, "indices": torch.tensor([indices], dtype=torch.int32), "block_table": None}
    moved = staging.move("sparse_mla", spec, operands)
    assert moved is not None
    return moved


def test_slots_are_renumbered_to_the_pages_that_are_moved() -> None:
    moved = attention([38, 5, -1, 7, 12])
    assert moved.kept.tolist() == [1, 3, 9]
    assert moved.operands["indices"].tolist() == [[10, 1, -1, 3, 4]]
    assert moved.operands["cache"][:, 0].tolist() == [1, 3, 9, 0]


def test_what_names_nothing_becomes_no_slot() -> None:
    assert attention([40, 2**31 - 1, -(2**31)]).operands["indices"].tolist() == [[-1, -1, -1]]


def test_slots_of_a_result_are_the_callers_own_again() -> None:
    moved = attention([38, 5])
    assert moved.original(torch.tensor([4, 5, 6, 1, -1]), 4).tolist() == [36, 37, 38, 5, -1]


def test_a_written_pool_is_written_back_and_nothing_else() -> None:
    cache = torch.zeros(6, 8448, dtype=torch.uint8)
    operands = {"k": None, "slots": torch.tensor([3 * 64 + 1, -1, 5 * 64]), "cache": cache}
    moved = staging.move("store_index_keys", StoreIndexSpec(index="index.fp8.e4m3fn.pow2.page64"), operands)
    assert moved is not None
    moved.give_back("cache", cache, moved.operands["cache"] + 7)
    assert cache[:, 0].tolist() == [0, 0, 0, 7, 0, 7]


def test_operands_are_padded_by_their_own_markers() -> None:
    table = torch.tensor([[3]], dtype=torch.int32)
    padded = pad("block_table", indexer_logits.args["block_table"], table, {"R": 2, "columns": 4})
    assert padded.tolist() == [[3, -1, -1, -1], [-1] * 4]
    length = pad("row_len", indexer_logits.args["row_len"], torch.tensor([5], dtype=torch.int32), {"T": 2})
    assert length.tolist() == [5, 0]
