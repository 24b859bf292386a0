"""Pallas kernels in the TPU simulator, several subcores at once, with its race detector on."""

from __future__ import annotations

import dataclasses
import functools
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("jax", reason="needs the environment of `nox -s tpu_jax`")

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kimi_hal import formats
from kimi_hal.ops.indexer import IndexerSpec
from kimi_hal.reference import indexer
from kimi_hal.reference import selection as reference
from kimi_hal_tpu.pallas import attention, gather, latents, scores, selection
from kimi_hal_tpu.pallas.bridge import races_found
from kimi_hal_tpu.pallas.mode import Mode, Several

SIMULATED = Mode(simulated=True, subcores=2)
NAN, INF = float("nan"), float("inf")
LATENTS = ("latent.fp8.e4m3fn.tensor", "latent.nvfp4.352", "latent.bf16")


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


def check_gather(words: int, mode: Mode = SIMULATED) -> None:
    """Hold the gather of rows of some words against numpy's."""
    table = np.arange(200 * words, dtype=np.int32).reshape(200, words)
    index = np.random.default_rng(0).integers(0, 200, 5 * 128).astype(np.int32)
    lines = np.asarray(jax.jit(lambda *a: gather.rows(*a, mode))(table, index))
    found = np.concatenate(list(lines), axis=1)[:, :words]
    assert (found == table[index]).all()


@pytest.mark.parametrize("name", LATENTS)
def test_gather_takes_the_named_rows_without_a_race(name: str) -> None:
    check_gather(formats.latent(name).row_bytes // 4)
    assert not races_found()


def scored(
    requests: list[int], lengths: list[int], table: torch.Tensor, queries: tuple[torch.Tensor, torch.Tensor]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the kernel's scores and the formula's, over a cache of 24 pages that a seed makes."""
    fmt = formats.index("index.fp8.e4m3fn.f32.page64")
    cache = torch.full((24, fmt.page_bytes), 0xFF, dtype=torch.uint8)
    keys = torch.randn(24 * 64, 128, generator=torch.Generator().manual_seed(1))
    fmt.write(cache, torch.arange(24 * 64), keys)
    q, weights = fmt.encode_query(queries[0])[0], queries[1]
    rows = torch.tensor(requests).int(), torch.tensor(lengths).int()
    operands = [t.numpy() for t in (q.view(torch.uint8), weights, cache.view(24, 66, 128), table, *rows)]

    def program(codes: Any, *rest: Any) -> Any:
        return scores.score(jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn), *rest, SIMULATED)

    spec = IndexerSpec(index=fmt.name, num_heads=q.shape[1])
    none = torch.empty(*q.shape[:2], 0, dtype=torch.uint8)
    expected = indexer.indexer_logits(
        spec, q, none, weights, cache, table, *rows, dtype=torch.float64
    ).numpy()
    return np.asarray(jax.jit(program)(*operands)), expected


def check_scores() -> None:
    """Hold scores of single rows against the formula, also where a page is missing."""
    table = torch.full((2, 16), -1, dtype=torch.int32)
    table[0, :10], table[1, :3] = torch.randperm(24)[:10].int(), torch.tensor([4, -1, 7])
    lengths = [600, 130, 0]
    found, expected = scored([0, 1, 0], lengths, table, (torch.randn(3, 5, 128), torch.randn(3, 5)))
    for row, count in enumerate(lengths):
        np.testing.assert_allclose(found[row, :count], expected[row, :count], rtol=1e-5, atol=1e-3)


def test_scores_are_the_formulas_where_a_page_is_missing_too() -> None:
    check_scores()
    assert not races_found()


#: Two tiles: a causal run of four rows, one row, an empty row between two of a request, and a run across the tiles.
REQUESTS = [0] * 4 + [1] + [2] * 3 + [0] * 10
LENGTHS = [1101, 1102, 1103, 1104, 130, 65, 0, 1, *range(201, 211)]


@dataclasses.dataclass
class Prefill:
    """Scores of two tiles, the formula's, the copies of pages that they took, and whether there was a race."""

    table: torch.Tensor
    queries: tuple[torch.Tensor, torch.Tensor]
    found: np.ndarray[Any, Any]
    expected: np.ndarray[Any, Any]
    copies: int
    raced: bool


class Counted:
    """A copy that counts the pages that it brings."""

    pages = 0

    def __init__(self, *operands: Any) -> None:
        self.copy, self.page = pltpu.make_async_copy(*operands), operands[0].dtype == jnp.uint8

    def start(self) -> None:
        if self.page:
            jax.debug.callback(self.count)
        self.copy.start()

    def wait(self) -> None:
        self.copy.wait()

    @staticmethod
    def count() -> None:
        Counted.pages += 1


@pytest.fixture(scope="module")
def prefill() -> Prefill:
    table = torch.stack([torch.randperm(24)[:20] for _ in range(3)]).int()
    table = torch.nn.functional.pad(table, (0, 12), value=-1)
    queries = torch.randn(len(REQUESTS), 4, 128), torch.randn(len(REQUESTS), 4)
    Counted.pages = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scores, "pltpu", SimpleNamespace(**{**vars(pltpu), "make_async_copy": Counted}))
        found, expected = scored(REQUESTS, LENGTHS, table, queries)
    jax.effects_barrier()
    return Prefill(table, queries, found, expected, Counted.pages, races_found())


def test_rows_that_share_pages_have_the_formulas_scores_without_a_race(prefill: Prefill) -> None:
    for row, count in enumerate(LENGTHS):
        found, expected = prefill.found[row, :count], prefill.expected[row, :count]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-3)
    assert not prefill.raced


@pytest.mark.parametrize("row", [3, 12])
def test_a_row_that_shares_pages_has_the_bits_that_it_has_alone(prefill: Prefill, row: int) -> None:
    one = slice(row, row + 1)
    q, weights = prefill.queries
    alone, _ = scored(REQUESTS[one], LENGTHS[one], prefill.table, (q[one], weights[one]))
    assert (alone[0, : LENGTHS[row]] == prefill.found[row, : LENGTHS[row]]).all()


def test_a_run_of_rows_reads_each_page_of_its_request_once(prefill: Prefill) -> None:
    runs = (18, 3, 2, 4, 4)  # pages of each run's longest row, the last cut in two by the tiles' border
    assert prefill.copies == sum(runs)


def packed_latents(name: str, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows ``[count, row_bytes]`` and their values in float64."""
    fmt = formats.latent(name)
    scale = torch.tensor([0.5]) if fmt.needs_scale else None
    rows = fmt.pack(torch.randn(count, 512) * torch.rand(count, 1), torch.randn(count, 64), scale)
    return rows, fmt.unpack(rows, scale, torch.float64)


def in_lines(rows: torch.Tensor, layout: latents.Scaled) -> np.ndarray[Any, Any]:
    """Return rows as the gather leaves them, with NaNs and the like behind a row's words."""
    words = rows.view(torch.int32).numpy()
    behind = layout.lines * latents.LINE - words.shape[1]
    full = np.pad(words, ((0, 0), (0, behind)), constant_values=-1)
    return full.reshape(len(rows), layout.lines, -1).swapaxes(0, 1)


def check_attention(name: str) -> None:
    """Hold attention over rows of a format against the formula; what does not count holds NaNs."""
    layout, count = latents.LAYOUTS[name], 256
    rows, keys = packed_latents(name, 2 * count)
    valid = (np.random.default_rng(1).random((2, count)) < 0.7).astype(np.int32)
    valid[1] = 0
    rows[torch.tensor(valid == 0).flatten()] = 0xFF  # NaN as e4m3fn and as bfloat16
    q = torch.randn(2, 12, 576).bfloat16()
    scale = np.array([0.05, 0.5 if layout.needs_scale else 1.0], np.float32)

    lines = in_lines(rows, layout)

    def program(*arrays: Any) -> Any:
        return attention.attend(*arrays, layout, jnp.dtype("float32"), SIMULATED)

    operands = (jnp.asarray(q.float().numpy(), jnp.bfloat16), lines, valid, scale)
    out, lse = (np.asarray(x) for x in jax.jit(program)(*operands))
    dots = torch.einsum("hd,kd->hk", q[0].double(), keys[:count]) / scale[1] * np.float64(scale[0])
    logits = dots.masked_fill(torch.tensor(valid[0] == 0), -INF)
    expected = logits.softmax(-1) @ keys[:count, :512]
    np.testing.assert_allclose(out[0], expected.numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(lse[0], logits.logsumexp(-1).numpy(), rtol=1e-6)
    assert (out[1] == 0).all()
    assert (lse[1] == -INF).all()
    assert not races_found()


@pytest.mark.parametrize("name", LATENTS)
def test_attention_leaves_out_what_does_not_count_whatever_it_holds(name: str) -> None:
    check_attention(name)


@pytest.mark.parametrize("factor", [NAN, INF])
def test_a_row_without_a_key_is_0_whatever_the_caches_scale_is(factor: float) -> None:
    layout = latents.LAYOUTS[LATENTS[0]]
    lines = in_lines(packed_latents(LATENTS[0], 256)[0], layout)
    operands = (jnp.ones((2, 4, 576), jnp.bfloat16), lines, np.zeros((2, 128), np.int32))
    scale = np.array([factor, factor], np.float32)
    out, lse = attention.attend(*operands, scale, layout, jnp.dtype("bfloat16"), SIMULATED)
    assert (out == 0).all()
    assert (lse == -INF).all()


def test_a_nan_beside_a_logit_of_infinity_is_not_hidden_by_it() -> None:
    """In one block of keys and in different ones, in either order; a row of +inf alone keeps its LSE."""
    layout, rows = latents.LAYOUTS["latent.bf16"], torch.ones(4 * 768, 576).bfloat16()
    infinite, broken = (0, 768 + 600, 2 * 768 + 1, 3 * 768 + 700), (1, 768, 2 * 768 + 767)
    rows[list(infinite), 512], rows[list(broken), 3] = INF, NAN
    operands = (jnp.ones((4, 4, 576), jnp.bfloat16), in_lines(rows.view(torch.uint8), layout))
    counts, scale = np.ones((4, 768), np.int32), np.array([0.01, 1.0], np.float32)
    out, lse = attention.attend(*operands, counts, scale, layout, jnp.dtype("float32"), SIMULATED)
    assert jnp.isnan(out).all()
    assert jnp.isnan(lse[:3]).all()
    assert (lse[3] == INF).all()


def test_bytes_of_a_cache_become_words_little_end_first() -> None:
    rows = torch.randint(0, 256, (5, 352), dtype=torch.uint8)
    assert (np.asarray(latents.as_words(rows.numpy())) == rows.view(torch.int32).numpy()).all()


def check_unpacked() -> None:
    """Hold every e2m1 code times every scale against the format's own reading."""
    fmt, layout = formats.latent("latent.nvfp4.352"), latents.LAYOUTS["latent.nvfp4.352"]
    rows = torch.randint(0, 256, (256, 352), dtype=torch.uint8)
    rows[:, 256:320] &= 0x77  # no NaN in the shared part, of which a kernel makes the whole key NaN
    codes = torch.arange(256, dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    rows[:, 320:] = (codes[:, None] + torch.arange(32, dtype=torch.uint8)) & 0x7F
    rows[:, 320:][rows[:, 320:] == 0x7F] = 0

    def kernel(words: Any, counts: Any, values: Any, rest: Any) -> None:
        values[...], tails = layout.keys(words, counts[...])
        rest[...] = jnp.concatenate(tails, axis=1)

    shapes = tuple(jax.ShapeDtypeStruct((256, columns), jnp.bfloat16) for columns in (512, 64))
    run = pl.pallas_call(kernel, out_shape=shapes, interpret=SIMULATED.interpret)
    found = [
        np.asarray(x).astype(np.float64) for x in run(in_lines(rows, layout), np.ones((1, 256), np.int32))
    ]
    expected = jnp.asarray(fmt.unpack(rows, None, torch.float64).numpy())[:, None]
    values, rest = (np.asarray(x)[:, 0] for x in layout.query(expected))
    assert (found[0] == values).all()
    assert (found[1] == rest.reshape(256, 4, -1)[..., :16].reshape(256, 64)).all()


def test_packed_latents_are_unpacked_to_the_bit() -> None:
    check_unpacked()


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
    with pytest.raises(AssertionError):
        check_gather(88, Mode(simulated=True))


def neighbour(place: Any) -> Any:
    """Return the rule with the scale of the next group of a row."""
    return lambda group: place((group + 1) % 32)


@pytest.mark.parametrize(
    "fault", [neighbour, lambda place: lambda group: group], ids=["next group", "no lanes"]
)
@pytest.mark.parametrize("check", [check_unpacked, lambda: check_attention("latent.nvfp4.352")])
def test_the_scale_of_another_group_would_be_seen(
    monkeypatch: pytest.MonkeyPatch, fault: Any, check: Any
) -> None:
    monkeypatch.setattr(latents, "scale_place", fault(latents.scale_place))
    with pytest.raises(AssertionError):
        check()


def without_wait(module: Any) -> Any:
    """Return pltpu with copies for which nobody waits."""

    class Unawaited:
        def __init__(self, *operands: Any) -> None:
            self.copy = module.make_async_copy(*operands)

        def start(self) -> None:
            self.copy.start()

        def wait(self) -> None:
            pass

    return SimpleNamespace(**{**vars(module), "make_async_copy": Unawaited})


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run copies when they start: else one that nobody waits for never runs, and races with nothing."""
    params = functools.partial(pltpu.InterpretParams, dma_execution_mode="eager")
    monkeypatch.setattr(pltpu, "InterpretParams", params)


@pytest.mark.usefixtures("eager")
def test_a_missing_barrier_before_a_buffer_is_filled_again_is_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "pltpu", without_wait(gather.pltpu))
    with suppress(AssertionError):
        check_gather(88, Mode(simulated=True))
    assert races_found()


@pytest.mark.usefixtures("eager")
def test_a_missing_barrier_before_a_page_is_read_is_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "pltpu", without_wait(scores.pltpu))
    with suppress(AssertionError):
        check_scores()
    assert races_found()


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
    found = np.concatenate(list(np.asarray(program(table, index))), axis=1)[:, :144]
    assert not (found == table[index]).all() or races_found()
