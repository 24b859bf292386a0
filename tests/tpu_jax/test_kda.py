"""The KDA kernels: chunks and single rows against the float64 recurrence, in the TPU simulator with race detection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("jax", reason="needs the environment of `nox -s tpu_jax`")

import jax
import jax.numpy as jnp
import numpy as np
import torch

from kimi_hal.dispatch.device import HostDevice
from kimi_hal.ops.kda import KDASpec
from kimi_hal.reference.recurrence import gate
from kimi_hal_conformance import case as cases
from kimi_hal_conformance.calls import Subject
from kimi_hal_conformance.cases import load
from kimi_hal_conformance.execute import try_case
from kimi_hal_tpu.pallas import chunks, gates, kda, layout, recurrence
from kimi_hal_tpu.pallas.bridge import races_found
from kimi_hal_tpu.pallas.chunks import CHUNK
from kimi_hal_tpu.pallas.mode import Mode
from kimi_hal_tpu.pallas.recurrence import Work

Numbers = np.ndarray[Any, Any]
SIMULATED = Mode(simulated=True)
RANDOM = np.random.default_rng(0)


def walked(q: Numbers, k: Numbers, v: Numbers, g: Numbers, beta: Numbers, state: Numbers) -> tuple[Any, Any]:
    """Return outputs and the last state of one head, row by row in float64."""
    q, k, v, g, beta, state = (x.astype(np.float64) for x in (q, k, v, g, beta, state))
    out = []
    for t in range(len(q)):
        state = state * np.exp(g[t])
        state = state + np.outer(beta[t] * (v[t] - state @ k[t]), k[t])
        out.append(state @ q[t])
    return np.array(out), state


def unit(shape: tuple[int, ...]) -> Numbers:
    x = RANDOM.standard_normal(shape)
    return (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("bound", [None, -5.0])
def test_a_gate_far_out_is_its_limit_and_never_nan(bound: float | None) -> None:
    spec = KDASpec(num_heads=3, head_dim=7, lower_bound=bound)
    raw = torch.tensor([-90.0, -200.0, 0.0, -0.0, 90.0, 3e38, -3e38]).expand(3, 7)
    rates, bias = torch.tensor([0.0, 90.0, 200.0]), torch.zeros(21)
    given = gates.parameters(spec, jnp.asarray(rates.numpy()), jnp.asarray(bias.numpy()))
    fade = np.exp(gates.log_decay(spec, jnp.asarray(raw.numpy()), **given))
    exact = gate(spec, raw[None], rates, bias, torch.float64)[0].exp()
    np.testing.assert_allclose(fade, exact.numpy(), rtol=1e-5, atol=1e-30)


def apart(found: Any, expected: Numbers) -> float:
    """Return the root mean square error over that of what is expected."""
    wide = np.asarray(found, np.float64)
    return float(np.sqrt(np.square(wide - expected).mean() / np.square(expected).mean()))


GATES: dict[str, Callable[[tuple[int, int]], Numbers]] = {
    "of any size": lambda shape: -5.0 / (1.0 + np.exp(-2.0 * RANDOM.standard_normal(shape))),
    "at their bound": lambda shape: np.full(shape, -5.0),
    "that keep everything": np.zeros,
    "without a bound": lambda shape: -300.0 * RANDOM.random(shape) ** 6,
}


def one_chunk(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, spans: Any) -> Any:
    return chunks.chunk(q, k, v, g, beta[:, None], spans, state)


TRACED = jax.jit(one_chunk)


def check_chunk(gate: str, repeated: bool, traced: Any = TRACED) -> None:
    """Hold one chunk of the model's size against the recurrence: a few roundings of float32."""
    shape = (CHUNK, 128)
    k = np.repeat(unit((1, 128)), CHUNK, axis=0) if repeated else unit(shape)
    beta = np.full(CHUNK, 0.9) if repeated else RANDOM.random(CHUNK)
    rows = [unit(shape) * 128**-0.5, k, RANDOM.standard_normal(shape), GATES[gate](shape), beta]
    given = [x.astype(np.float32) for x in (*rows, 0.1 * RANDOM.standard_normal((128, 128)))]
    spans = jnp.asarray(chunks.sums_of_decays(), jnp.bfloat16)
    out, state = traced(*given, spans)
    expected_out, expected_state = walked(*given)
    assert apart(out, expected_out) < 1e-6
    assert apart(state, expected_state) < 1e-6


@pytest.mark.parametrize("gate", GATES)
def test_a_chunk_is_the_recurrence_with_gates(gate: str) -> None:
    check_chunk(gate, repeated=False)


def test_one_key_in_every_row_of_a_chunk_costs_no_digits() -> None:
    """Powers of such a matrix reach 10^18: an inverse by its series would hold nothing."""
    check_chunk("that keep everything", repeated=True)


# Sequences of every kind: one that continues, an empty one, padding, a fresh one, with checkpoints off a chunk's edge.
SPEC = KDASpec(num_heads=3, head_dim=8, gate="log", qk_norm=False, scale=1.0, checkpoints=True)
CUTS, SLOTS, FRESH = (0, 70, 70, 73, 79), (1, 2, -1, 4), (False, False, False, True)
STOPS, SAVED = (66, 0, 1, 6), (0, 3, 5, 6)


def operands() -> dict[str, Any]:
    shape = (80, SPEC.num_heads, SPEC.head_dim)
    rows = {"q": unit(shape), "k": unit(shape), "v": RANDOM.standard_normal(shape).astype(np.float32)}
    given: dict[str, Any] = {name: np.asarray(jnp.asarray(x, jnp.bfloat16)) for name, x in rows.items()}
    given["raw_g"] = (-2.0 * RANDOM.random(shape)).astype(np.float32)
    given["raw_beta"] = RANDOM.random(shape[:2]).astype(np.float32)
    given["state"] = RANDOM.standard_normal((7, 3, 8, 8)).astype(np.float32)
    names = ("cu_seqlens", "state_ids", "checkpoint_offsets", "checkpoint_ids")
    given |= {name: np.array(x, np.int32) for name, x in zip(names, (CUTS, SLOTS, STOPS, SAVED), strict=True)}
    given["has_initial_state"] = 1 - np.array(FRESH, np.uint8)
    return given


def program() -> Callable[[dict[str, Any]], tuple[Any, Any]]:
    """Return the traced prefill: what a test changed of the kernel is in it."""
    traced = jax.jit(lambda given: kda.kda_prefill(SPEC, given, SIMULATED))

    def run(given: dict[str, Any]) -> tuple[Any, Any]:
        out, pool = traced(given)
        return np.asarray(out, np.float64), np.asarray(pool)

    return run


def expected(given: dict[str, Numbers]) -> tuple[Numbers, Numbers]:
    out, pool = np.zeros((80, 3, 8)), given["state"].astype(np.float64)
    for n, slot in enumerate(SLOTS):
        first, last = CUTS[n : n + 2]
        for head in range(3 if slot >= 0 else 0):
            state = np.zeros((8, 8)) if FRESH[n] else given["state"][slot, head]
            rows = [given[name][first:last, head] for name in ("q", "k", "v", "raw_g", "raw_beta")]
            pool[SAVED[n], head] = walked(*(x[: STOPS[n]] for x in rows), state)[1]
            if last > first:
                out[first:last, head], pool[slot, head] = walked(*rows, state)
    return out, pool


def check_prefill() -> None:
    given = operands()
    out, pool = program()(given)
    expected_out, expected_pool = expected(given)
    assert apart(out, expected_out) < 2.0**-8
    assert apart(pool, expected_pool) < 1e-6
    assert (pool[[2, 5]] == given["state"][[2, 5]]).all()
    assert (out[70:73] == 0).all()
    assert (out[79:] == 0).all()
    assert not races_found()


def test_a_prefill_cuts_at_sequences_and_checkpoints_and_leaves_the_rest_alone() -> None:
    check_prefill()


def test_what_continues_from_a_checkpoint_has_the_bits_of_the_run_that_wrote_it() -> None:
    given, run = operands(), program()
    out, pool = run(given)
    rows = {name: np.roll(given[name], -STOPS[0], axis=0) for name in ("q", "k", "v", "raw_g", "raw_beta")}
    left = CUTS[1] - STOPS[0]
    cuts = {
        "cu_seqlens": np.array([0, left, left, left, left], np.int32),
        "state_ids": np.array([SAVED[0], -1, -1, -1], np.int32),
        "checkpoint_ids": np.full(4, -1, np.int32),
    }
    again, continued = run(given | rows | cuts | {"state": pool})
    assert (again[:left] == out[STOPS[0] : CUTS[1]]).all()
    assert (continued[SAVED[0]] == pool[SLOTS[0]]).all()


#: A place in the middle of the first sequence's first chunk; its state goes on to two more, and to a checkpoint.
ROW, HEAD, CHANNEL = 29, 1, 3


@pytest.fixture(scope="module")
def ordinary() -> tuple[Any, Any, Any]:
    """Return operands, the traced prefill, and what it gives for them."""
    given, run = operands(), program()
    return given, run, run(given)


def check_broken_row(name: str, value: float, given: dict[str, Any], run: Any, clean: Any) -> None:
    """Hold a call with one number that is not finite against the call without it, and against the recurrence."""
    broken = given[name].copy()
    broken[(ROW, HEAD, CHANNEL)[: broken.ndim]] = value
    out, pool = run(given | {name: broken})
    with np.errstate(all="ignore"):
        expected_out, expected_pool = expected(given | {name: broken})
    before = np.ones(out.shape, np.bool_)
    before[ROW : CUTS[1], HEAD] = False
    assert (out == clean)[before].all()
    assert np.allclose(out, expected_out, rtol=2.0**-7, atol=2.0**-8, equal_nan=True)
    assert np.allclose(pool, expected_pool, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert not races_found()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["q", "k", "v", "raw_g", "raw_beta"])
def test_a_row_that_is_not_finite_changes_no_bit_before_it_and_behind_it_what_the_recurrence_does(
    name: str, value: float, ordinary: tuple[Any, Any, Any]
) -> None:
    given, run, (clean, _) = ordinary
    check_broken_row(name, value, given, run, clean)


def check_rows(heads: int) -> None:
    """Hold rows of several groups of heads against the recurrence: the last group may not be full."""
    spec = KDASpec(num_heads=heads, head_dim=8, gate="log", qk_norm=False, scale=1.0, checkpoints=True)
    count, shape = 5, (5, 3, heads, 8)
    work = Work(
        *np.array(
            [[3, -1, 0, 5, 1], [3, 0, 1, 2, 3], [3, -1, 7, -1, 1], [2, -1, -1, 6, -1], [1, -1, -1, 2, -1]]
        )
    )
    rows = {"q": unit(shape), "k": unit(shape), "v": RANDOM.standard_normal(shape)}
    given: dict[str, Any] = {name: np.asarray(jnp.asarray(x, jnp.bfloat16)) for name, x in rows.items()}
    given["g"] = (-2.0 * RANDOM.random(shape)).astype(np.float32)
    given["beta"] = RANDOM.random((*shape[:3], 1)).astype(np.float32)
    pool = RANDOM.standard_normal((8, heads, 8, 8)).astype(np.float32)

    def program(work: Work, rows: Any, pool: Any) -> Any:
        return recurrence.advance(spec, work, rows, pool, SIMULATED, results=("out",))

    made, stored = jax.jit(program)(Work(*(x.astype(np.int32) for x in work)), given, pool)
    out, changed = np.zeros(shape), pool.astype(np.float64)
    for n in range(count):
        for head in range(heads if work.source[n] >= 0 else 0):
            end = work.count[n]
            one = [given[name][n, :, head] for name in ("q", "k", "v", "g", "beta")]
            state = pool[work.source[n], head]
            if work.saved[n] >= 0:
                changed[work.saved[n], head] = walked(*(x[: work.after[n]] for x in one), state)[1]
            out[n, :end, head], state = walked(*(x[:end] for x in one), state)
            if work.target[n] >= 0:
                changed[work.target[n], head] = state
    assert apart(np.asarray(made["out"], np.float64), out) < 2.0**-8
    assert apart(stored, changed) < 1e-6
    assert (np.asarray(stored)[[0, 4, 5]] == pool[[0, 4, 5]]).all()
    assert not races_found()


@pytest.mark.parametrize("heads", [3, 18])
def test_rows_advance_the_slots_that_are_named_and_no_other(heads: int) -> None:
    check_rows(heads)


@pytest.mark.parametrize(
    "case",
    [
        "kda_decode/edges/small-norm",
        "kda_verify/channel-major/drafts",
        "kda_commit/edges/checkpoints",
        "kda_prefill/small/one-of-7",
    ],
)
def test_the_suite_passes(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KIMI_HAL_EXECUTION", "interpreted")
    monkeypatch.setenv("KIMI_HAL_BACKEND", "tpu")
    load()
    problems, *_ = try_case(cases.get(case), Subject("tpu.pallas", "cpu", HostDevice()), 0)
    assert not problems


def test_a_call_of_no_sequence_launches_nothing_and_gives_zeros() -> None:
    """On the device nothing is padded, and a kernel has no grid of none."""
    given = operands()
    none = {name: given[name][:0] for name in ("state_ids", "checkpoint_offsets", "checkpoint_ids")}
    out, pool = kda.kda_prefill(SPEC, given | none | {"cu_seqlens": np.zeros(1, np.int32)}, SIMULATED)
    assert (np.asarray(out, np.float64) == 0).all()
    assert pool is given["state"]
    records = jnp.zeros((4, 2 * kda.row_bytes(SPEC)), jnp.uint8)
    verified = given | none | {"records": records, "x": jnp.zeros((80, SPEC.channels), jnp.bfloat16)}
    out, left = kda.kda_verify(SPEC, verified, SIMULATED)
    assert out.shape == given["v"].shape
    assert not out.any()
    assert left is records
    states = {"conv_states": ["conv"], "states": [given["state"]]}
    assert kda.kda_commit(SPEC, none | states, SIMULATED) == ["conv", given["state"]]


def test_records_are_the_bytes_that_the_traced_programs_write() -> None:
    """A verify and a commit of either implementation have one layout: field behind field, rows of a field together."""
    spec, room = KDASpec(num_heads=2, head_dim=4), 3
    shapes = [(2, room, *shape) for _, shape in kda.record_fields(spec)]
    fields = [torch.randn(shape).bfloat16() for shape in shapes]
    expected = torch.cat([field.flatten(1).view(torch.uint8) for field in fields], dim=1)
    given = [jnp.asarray(field.float().numpy(), jnp.bfloat16) for field in fields]
    buffer = jnp.full((3, room * kda.row_bytes(spec) + 5), 7, jnp.uint8)
    packed = np.asarray(kda.packed_records(buffer, *given))
    assert (packed[:2, :-5] == expected.numpy()).all()
    assert (packed[2] == 7).all()
    assert (packed[:, -5:] == 7).all()
    for found, field in zip(kda.unpacked(spec, jnp.asarray(packed[:2])), given, strict=True):
        assert (found == field).all()


# A kernel with one realistic fault must be found wrong, or the checks above prove nothing.


def test_a_state_that_is_not_reset_between_sequences_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "ZERO", chunks.SAME)
    with pytest.raises(AssertionError):
        check_prefill()


def test_a_chunk_that_ends_one_row_early_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    work = layout.Layout.work

    def short(*operands: Any) -> Any:
        picked, found = work(*operands)
        return picked, found._replace(count=jnp.minimum(found.count, CHUNK - 1))

    monkeypatch.setattr(layout.Layout, "work", short)
    with pytest.raises(AssertionError):
        check_prefill()


def test_a_decay_that_is_missing_at_the_edge_of_a_chunk_would_be_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    matrix = chunks.sums_of_decays()
    matrix[2 * CHUNK - 2, CHUNK - 1] = 0.0  # the last decay, for the row before it
    monkeypatch.setattr(chunks, "sums_of_decays", lambda: matrix)
    with pytest.raises(AssertionError):
        check_chunk("of any size", repeated=False)


def test_a_product_of_rounded_numbers_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "TERMS", 1)
    monkeypatch.setattr(chunks, "MET", (1,))
    with pytest.raises(AssertionError):
        check_chunk("that keep everything", repeated=False, traced=jax.jit(lambda *a: one_chunk(*a)))


def test_a_buffer_that_fills_before_it_is_stored_is_a_race_that_the_detector_finds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recurrence, "_drain", lambda ring, step, back: None)
    with pytest.raises(AssertionError):
        check_rows(3)


def test_products_over_a_row_that_is_no_number_would_be_seen(
    monkeypatch: pytest.MonkeyPatch, ordinary: tuple[Any, Any, Any]
) -> None:
    monkeypatch.setattr(chunks, "ordinary", lambda given, count: count)
    given, _, (clean, _) = ordinary
    with pytest.raises(AssertionError):
        check_broken_row("k", np.nan, given, program(), clean)
