"""Pallas kernels in the TPU simulator, several subcores at once, with its race detector on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("jax", reason="needs the environment of `nox -s tpu_jax`")

import jax
import jax.numpy as jnp
import numpy as np

from kimi_hal import formats
from kimi_hal.ops.indexer import IndexerSpec
from kimi_hal.reference import indexer
from kimi_hal.reference import selection as reference
from kimi_hal_tpu.pallas import attention, gather, scores, selection
from kimi_hal_tpu.pallas.bridge import races_found
from kimi_hal_tpu.pallas.mode import Mode, Several

SIMULATED = Mode(simulated=True, subcores=2)
NAN, INF = float("nan"), float("inf")


def select(rows: torch.Tensor, first: list[int], count: list[int], k: int) -> np.ndarray[Any, Any]:
    bounds = (np.array(first, np.int32), np.array(count, np.int32))
    program = jax.jit(lambda *a: selection.select(*a, k, SIMULATED))
    return np.asarray(program(rows.numpy(), *bounds))


def hard_rows() -> torch.Tensor:
    rows = torch.randn(5, 9000)
    rows[1] = rows[1].round()  # ties at the cut
    rows[2, ::7], rows[2, 1::3], rows[2, 5] = NAN, -INF, INF
    rows[3], rows[3, ::2] = 0.0, -0.0
    rows[4] = 1.0 + torch.randperm(9000) * 2.0**-23  # one high digit for all
    return rows


def test_selection_is_the_references_in_every_row_without_a_race() -> None:
    rows, first, count = hard_rows(), [0, 5, 0, 3, 100], [9000, 60, 8192, 129, 8000]
    found = select(rows, first, count, 100)
    expected = reference.select_positions(rows, torch.tensor(count), 100, starts=torch.tensor(first))
    assert (found == expected.numpy()).all()
    assert not races_found()


def test_gather_takes_the_named_rows_without_a_race() -> None:
    table = np.arange(40 * 144, dtype=np.int32).reshape(40, 144)
    index = np.random.default_rng(0).integers(0, 40, 5 * 128).astype(np.int32)
    found = jax.jit(lambda *a: gather.rows(*a, SIMULATED))(table, index)
    assert (np.asarray(found) == table[index]).all()
    assert not races_found()


def test_scores_are_the_formulas_where_a_page_is_missing_too() -> None:
    fmt = formats.index("index.fp8.e4m3fn.f32.page64")
    cache = torch.full((12, fmt.page_bytes), 0xFF, dtype=torch.uint8)
    fmt.write(cache, torch.arange(12 * 64), torch.randn(12 * 64, 128))
    q, weights = fmt.encode_query(torch.randn(3, 5, 128))[0], torch.randn(3, 5)
    table = torch.full((2, 16), -1, dtype=torch.int32)
    table[0, :10], table[1, :3] = torch.randperm(12)[:10].int(), torch.tensor([4, -1, 7])
    rows = torch.tensor([0, 1, 0]).int(), torch.tensor([600, 130, 0]).int()
    operands = [t.numpy() for t in (q.view(torch.uint8), weights, cache.view(12, 66, 128), table, *rows)]

    def program(codes: Any, *rest: Any) -> Any:
        return scores.score(jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn), *rest, SIMULATED)

    found = np.asarray(jax.jit(program)(*operands))
    spec = IndexerSpec(index=fmt.name, num_heads=5)
    none = torch.empty(3, 5, 0, dtype=torch.uint8)
    expected = indexer.indexer_logits(
        spec, q, none, weights, cache, table, *rows, dtype=torch.float64
    ).numpy()
    for row, count in enumerate(rows[1].tolist()):
        np.testing.assert_allclose(found[row, :count], expected[row, :count], rtol=1e-5, atol=1e-3)
    assert not races_found()


def attended(valid: np.ndarray[Any, Any], codes: torch.Tensor) -> tuple[Any, Any]:
    q = torch.randn(2, 12, 576).bfloat16()
    operands = (jnp.asarray(q.float().numpy(), jnp.bfloat16), codes.view(torch.uint8).numpy(), valid)
    scale = np.array([0.05, 0.5], np.float32)
    program = jax.jit(lambda *a: attention.attend(*a, jnp.dtype("float32"), SIMULATED))
    out, lse = (np.asarray(x) for x in program(*operands, scale))
    keys = codes.double()
    logits = torch.einsum("thd,tkd->thk", q.double(), keys) * np.float64(scale[0])
    logits = logits.masked_fill(torch.tensor(valid == 0)[:, None], -INF)
    expected = torch.einsum("thk,tkd->thd", logits[:1].softmax(-1), keys[:1, :, :512]) * 0.5
    np.testing.assert_allclose(out[0], expected[0].numpy(), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(lse[0], logits.logsumexp(-1)[0].numpy(), rtol=1e-6)
    return out, lse


def test_attention_leaves_out_what_does_not_count_whatever_it_holds() -> None:
    codes = torch.randn(2, 384, 576).to(torch.float8_e4m3fn)
    valid = (np.random.default_rng(1).random((2, 384)) < 0.7).astype(np.int32)
    valid[1] = 0
    clean = codes.clone()
    codes.view(torch.uint8)[torch.tensor(valid == 0)] = 0x7F  # NaN
    codes = torch.where(torch.tensor(valid == 0)[..., None], clean.float(), codes.float()).to(codes.dtype)
    out, lse = attended(valid, codes)
    assert (out[1] == 0).all()
    assert (lse[1] == -INF).all()
    assert not races_found()


# A kernel with one realistic fault must be found wrong, or the checks above prove nothing.


def test_ties_by_lane_order_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def last_first(line: Any, picked: Any, cut: Any, ties: Any, mode: Mode) -> None:
        def take(key: Any, position: Any, live: Any, carry: Any) -> Any:
            place, left = carry
            equal = live & (key == cut)
            behind = jnp.sum(equal.astype(jnp.int32)) - jnp.cumsum(equal.astype(jnp.int32))
            sign = selection.SIGN
            chosen = (live & ((key ^ sign) > (cut ^ sign))) | (equal & (behind < left))
            mode.append(picked, place, position, chosen)
            return place + jnp.sum(chosen.astype(jnp.int32)), left - jnp.sum(equal.astype(jnp.int32))

        line.scan(take, (jnp.int32(0), ties))

    monkeypatch.setattr(selection, "_collect", last_first)
    found = select(torch.zeros(1, 1024), [0], [1024], 16)
    assert found[0].tolist() != list(range(16))


def test_a_gather_off_by_one_page_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather.jnp, "clip", lambda index, low, high: jnp.minimum(index + 64, high))
    table = np.arange(200 * 144, dtype=np.int32).reshape(200, 144)
    index = np.arange(128, dtype=np.int32)
    found = jax.jit(lambda *a: gather.rows(*a, Mode(simulated=True)))(table, index)
    assert not (np.asarray(found) == table[index]).all()


def test_one_buffer_for_two_copies_is_a_race_that_the_detector_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    def same_slot(line: Any, number: Any) -> Any:
        source = line.bits.at[selection.pl.ds(line.base + number * line.chunk, line.chunk)]
        target = line.buffer.at[selection.pl.ds(0, line.chunk)]
        return selection.pltpu.make_async_copy(source, target, line.semaphores.at[number % 2])

    monkeypatch.setattr(selection.Row, "copy", same_slot)
    select(torch.randn(1, 9000), [0], [9000], 16)
    assert races_found()


def test_a_stream_that_nobody_waits_for_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Several, "wait", lambda self: None)
    table = np.arange(40 * 144, dtype=np.int32).reshape(40, 144)
    index = np.zeros(128, np.int32)
    program = jax.jit(lambda *a: gather.rows(*a, Mode(simulated=True)))
    assert not (np.asarray(program(table, index)) == table[index]).all() or races_found()
