"""Level 6: what a call must move and multiply, and how its time stands beside what the device shows."""

from __future__ import annotations

import pytest
import torch

from kimi_hal.dispatch.device import HostDevice
from kimi_hal.ops import check
from kimi_hal.ops.composites import DSASpec
from kimi_hal.ops.indexer import IndexerTopKSpec, IndexQuerySpec
from kimi_hal.ops.kda import KDASpec
from kimi_hal.ops.sparse_mla import MergeSpec, SparseMLASpec
from kimi_hal_conformance.calls import Subject
from kimi_hal_conformance.speed import roofline, shapes, timing
from kimi_hal_conformance.speed.floors import FLOORS, Work

INDEX = "index.fp8.e4m3fn.pow2.page64"
SUBJECT = Subject("reference.torch", "cpu", HostDevice())


def test_whatever_is_timed_has_a_floor() -> None:
    assert set(shapes.SHAPES) == set(FLOORS)


def test_attention_reads_a_key_once_however_many_rows_select_it() -> None:
    spec = SparseMLASpec(num_heads=2, latent="latent.nvfp4.352", topk=4)
    indices = torch.tensor([[0, 1, -1, 1], [1, 2, -1, -1]], dtype=torch.int32)
    operands = {"q": torch.zeros(2, 2, 576, dtype=torch.bfloat16), "indices": indices}
    outs = {"out": torch.zeros(2, 2, 512, dtype=torch.bfloat16)}
    found = FLOORS["sparse_mla"](spec, operands, outs)
    moved = 2 * 2 * 576 * 2 + 8 * 4 + 3 * 352 + 2 * 2 * 512 * 2
    assert found == Work(moved, 2 * 5 * 2 * (576 + 512))


def test_a_position_is_a_key_of_its_request() -> None:
    spec = SparseMLASpec(num_heads=1, latent="latent.nvfp4.352", topk=1, index_space="position")
    operands = {
        "q": torch.zeros(2, 1, 576, dtype=torch.bfloat16),
        "indices": torch.zeros(2, 1, dtype=torch.int32),
        "row_req": torch.tensor([0, 1], dtype=torch.int32),
    }
    assert FLOORS["sparse_mla"](spec, operands, {}).bytes == 2 * 576 * 2 + 2 * 4 + 2 * 352


def test_a_decode_reads_and_writes_the_states_of_live_rows() -> None:
    spec = KDASpec(num_heads=3, head_dim=4)
    ids = torch.tensor([5, -1, 0], dtype=torch.int32)
    operands = {"q": torch.zeros(3, 3, 4), "state": torch.zeros(9, 3, 4, 4), "state_ids": ids}
    found = FLOORS["kda_decode"](spec, operands, {})
    assert found == Work(36 * 4 + 12 + 2 * 2 * 48 * 4, 2 * 3 * 3 * 48)


def test_scores_read_the_keys_of_a_request_once() -> None:
    spec, operands = shapes.SHAPES["indexer_topk"](torch.Generator().manual_seed(0))
    found = FLOORS["indexer_topk"](spec, operands, {})
    keys = shapes.REQUESTS * shapes.CONTEXT * 132
    assert 0 < found.bytes - keys < 2_000_000
    assert found.operations == 2 * shapes.ROWS * shapes.CONTEXT * 32 * 128


def test_a_sparse_decode_reads_the_keys_of_a_request_once_and_its_best_latents() -> None:
    spec = DSASpec(
        query=IndexQuerySpec(index=INDEX, num_heads=2),
        indexer=IndexerTopKSpec(index=INDEX, num_heads=2, topk=5),
        attn=SparseMLASpec(num_heads=3, latent="latent.nvfp4.352", topk=5, index_space="position"),
    )
    operands = {
        "q": torch.zeros(4, 3, 576, dtype=torch.bfloat16),
        "index_q": torch.zeros(4, 2, 128, dtype=torch.bfloat16),
        "index_w": torch.zeros(4, 2),
        "row_req": torch.tensor([0, 0, 1, 2], dtype=torch.int32),
        "row_len": torch.tensor([9, 10, 3, -1], dtype=torch.int32),
    }
    outs = {"out": torch.zeros(4, 3, 512, dtype=torch.bfloat16)}
    own = 4 * (3 * 576 * 2 + 2 * 128 * 2 + 2 * 4 + 4 + 4 + 3 * 512 * 2)
    moved, scored, attended = 13 * 132 + (5 + 3) * 352, 22 * 2 * 128, (5 + 5 + 3) * 3 * (576 + 512)
    assert FLOORS["dsa_decode"](spec, operands, outs) == Work(own + moved, 2 * (scored + attended))


def test_the_timed_sparse_decode_is_one_that_the_contract_admits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "ROWS", 3)
    asked = shapes.question("dsa_decode")
    check.compiled(asked.op, asked.spec, asked.limits, device="cpu")(**asked.operands)
    assert shapes.described(asked).startswith(
        "index.fp8.e4m3fn.pow2.page64, latent.fp8.e4m3fn.tensor, q [3, 12, 576]"
    )


def small(g: torch.Generator) -> shapes.Shape:
    """Return two parts of three rows."""
    return MergeSpec(parts=2, num_heads=1), {
        "outs": torch.randn(2, 3, 1, 512).bfloat16(),
        "lses": torch.randn(2, 3, 1),
    }


def test_a_call_is_timed_beside_a_copy_and_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "SHAPES", {"merge_attn_states": small})
    monkeypatch.setattr(shapes, "SHAPES", {"merge_attn_states": small})
    monkeypatch.setattr(roofline, "COPIED", 1 << 20)
    monkeypatch.setattr(roofline, "SIDE", 64)
    monkeypatch.setattr(timing, "EVICTED", 1 << 10)
    found = timing.timed("merge_attn_states", SUBJECT)
    assert (found.bytes, found.operations, found.graph) == (2 * 3 * 1024 + 2 * 3 * 4 + 3 * 1024, 0, False)
    assert min(found.seconds, found.bandwidth, found.rate) > 0
    assert found.fraction == pytest.approx(found.bytes / found.bandwidth / found.seconds)
    assert found.call == "outs [2, 3, 1, 512], lses [2, 3, 1]"


def test_an_operator_without_a_call_says_so() -> None:
    with pytest.raises(timing.UntimedError, match=r"^this suite version has no call of moe_layer to time$"):
        timing.timed("moe_layer", SUBJECT)
