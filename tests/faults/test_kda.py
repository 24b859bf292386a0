"""Faults that users of recurrent-attention kernels met, each with its right answer (``docs/faults.md``)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from kda_cases import Layer, Rows, cuts, distance, expected, flags, ids, one_by_one, same_bits

from kimi_hal.dispatch.contract import BuildContext, Sizes
from kimi_hal.ops import check, get
from kimi_hal.ops.kda import KDASpec
from kimi_hal.ops.spec import Limits
from kimi_hal.reference import backend, kda, sizes

SMALL = KDASpec(num_heads=2, head_dim=8)
TINY = KDASpec(num_heads=1, head_dim=2)


def run(name: str, spec: KDASpec) -> Any:
    """Return the reference's run function, with its own metadata check."""
    op = get(name)
    limits = Limits(max_rows=1 << 20, max_reqs=1 << 20)
    checked = check.compiled(op, spec, limits)
    return backend.build(
        BuildContext(name, spec, limits, "cpu", "cpu", Sizes(), None, None, checked, settings={})
    )


def gates(layer: Layer, rows: Rows) -> tuple[Any, ...]:
    return rows.raw_g, rows.raw_beta, layer.A_log, layer.dt_bias


# ---- 3: padding rows of captured graphs


def test_fault_03_padding_state_ids():
    layer, rows = Layer.random(SMALL), Rows.random(SMALL, 4)
    state, alone = layer.pool(3), layer.pool(3)
    state[1] = float("nan")
    out = torch.full((4, 2, 8), float("nan")).bfloat16()
    r = rows
    result = run("kda_decode", SMALL)(r.q, r.k, r.v, *gates(layer, r), state, ids(0, 2, -1, -1), out=out)
    assert result is out
    assert not out[2:].any()
    for n, slot in enumerate((0, 2)):
        want = layer.decode(rows.some(slice(n, n + 1)), alone, ids(slot))
        assert same_bits(out[n], want[0].bfloat16())
        assert same_bits(state[slot], alone[slot])
    assert state[1].isnan().all()


def test_fault_03_slot_0_is_ordinary_and_the_last_slot_is_not_minus_1():
    layer, rows = Layer.random(SMALL), Rows.random(SMALL, 2)
    state, pool = layer.pool(5), layer.conv_pool(5)
    layer.prefill(rows, state, ids(0, -1), cuts(1, 1))
    layer.conv(rows, pool, ids(0, -1), cuts(1, 1))
    assert same_bits(state[1:], layer.pool(5)[1:])
    assert same_bits(pool[1:], layer.conv_pool(5)[1:])
    assert not same_bits(state[0], layer.pool(5)[0])


def test_fault_03_a_commit_of_padding_changes_no_bit():
    layer, rows = Layer.random(SMALL), Rows.random(SMALL, 8)
    state, pool = layer.pool(3), layer.conv_pool(3)
    records = torch.zeros(4, sizes.records_bytes(SMALL, 2), dtype=torch.uint8)
    slots = ids(0, 2, -1, -1)
    layer.verify(rows, pool, state, slots, cuts(2, 2, 2, 2), records)
    layer.commit(pool, state, records, slots, ids(0, 0, 2, 1))
    assert same_bits(state, layer.pool(3))
    assert same_bits(pool, layer.conv_pool(3))


# ---- 4: stale bytes beyond what the call owns


def test_fault_04_nan_around_every_operand():
    layer, rows = Layer.random(SMALL), Rows.random(SMALL, 6)

    def inside(x: torch.Tensor) -> torch.Tensor:
        """Return the rows as a view between rows of NaN."""
        around = torch.full((x.shape[0] + 4, *x.shape[1:]), float("nan"), dtype=x.dtype)
        around[2:-2] = x
        return around[2:-2]

    state, poisoned = layer.pool(4), layer.pool(4)
    poisoned[[0, 2, 3]] = float("nan")
    hidden = Rows(*(inside(getattr(rows, n)) for n in ("x", "raw_g", "raw_beta", "q", "k", "v")))
    assert same_bits(
        layer.prefill(rows, state, ids(1), ids(0, 4)), layer.prefill(hidden, poisoned, ids(1), ids(0, 4))
    )
    assert same_bits(state[1], poisoned[1])
    assert poisoned[[0, 2, 3]].isnan().all()


def test_fault_04_nan_in_rows_beyond_the_last_sequence():
    layer, rows = Layer.random(SMALL), Rows.random(SMALL, 6)
    stale = rows.some(slice(0, 6))
    for name in ("x", "raw_g", "raw_beta", "q", "k", "v"):
        getattr(stale, name)[4:] = float("nan")
    state, pool = layer.pool(1), layer.conv_pool(1)
    out, y = layer.prefill(stale, state, ids(0), ids(0, 4)), layer.conv(stale, pool, ids(0), ids(0, 4))
    assert not out[4:].any()
    assert not y[4:].any()
    assert out.isfinite().all()
    assert state.isfinite().all()
    assert same_bits(pool[0], rows.x[1:4])


def test_fault_04_records_are_not_read_beyond_the_accepted_rows():
    layer, rows = Layer.random(SMALL), Rows.random(SMALL, 4)
    state, pool = layer.pool(1), layer.conv_pool(1)
    poisoned = rows.some(slice(0, 4))
    for name in ("x", "raw_g", "raw_beta"):
        getattr(poisoned, name)[2:] = float("nan")
    records = torch.full((1, sizes.records_bytes(SMALL, 4)), 0xFF, dtype=torch.uint8)
    layer.verify(poisoned, pool, state, ids(0), cuts(4), records)
    layer.commit(pool, state, records, ids(0), ids(2))
    steps, steps_pool = layer.pool(1), layer.conv_pool(1)
    layer.stepwise(rows.some(slice(0, 2)), steps_pool, steps, 0)
    assert same_bits(state, steps)
    assert same_bits(pool, steps_pool)


# ---- 8: byte offsets beyond 2^31


def test_fault_08_slots_far_apart():
    step = 1 << 29  # elements of 4 bytes between two slots: the second starts at 2^31 bytes
    state = torch.empty(step + 4).as_strided((2, 1, 2, 2), (step, 4, 2, 1))
    layer, rows = Layer.random(TINY), Rows.random(TINY, 3)
    near = layer.pool(2)
    state[1] = near[1]
    out = layer.prefill(rows, state, ids(1), cuts(3))
    assert same_bits(out, layer.prefill(rows, near, ids(1), cuts(3)))
    assert same_bits(state[1], near[1])


# ---- 9: chunk tails, short and long sequences, one call = chunks = steps


@pytest.mark.parametrize("rows_", [1, 7, 8, 15, 16, 63, 64, 65, 1500])
def test_fault_09_lengths_around_a_chunk(rows_: int):
    layer, rows = Layer.random(SMALL), Rows.random(SMALL, rows_)
    state = layer.pool(1)
    out, final = expected(layer, rows, state[0])
    assert distance(layer.prefill(rows, state, ids(0), cuts(rows_)), out) < 1e-6
    assert distance(state[0], final) < 1e-6


def test_fault_09_more_than_65536_rows():
    spec = KDASpec(num_heads=1, head_dim=1, gate="log", checkpoints=True, scale=1.0, qk_norm=False)
    rows, decay, beta = 65_537, math.log(0.999), 0.25
    one = torch.ones(rows, 1, 1).bfloat16()
    state = torch.zeros(2, 1, 1, 1, dtype=torch.float64)
    g, b = torch.full((rows, 1, 1), decay), torch.full((rows, 1), beta)
    marks = (None, ids(65_536), ids(1))
    out = kda.kda_prefill(
        spec, one, one, one, g, b, None, None, state, ids(0), ids(0, rows), *marks, dtype=torch.float64
    )
    # S ← S f (1 − β) + β; every row after the first few is at its fixed point
    factor = math.exp(float(g[0])) * (1 - beta)
    fixed = beta / (1 - factor)
    assert float(out[0]) == pytest.approx(beta, rel=1e-15)
    assert float(out[65_535]) == pytest.approx(fixed, rel=1e-14)
    assert float(out[65_536]) == pytest.approx(fixed, rel=1e-14)
    assert float(state[1]) == float(out[65_535])
    assert float(state[0]) == float(out[65_536])


@pytest.mark.parametrize("lengths", [[32], [8] * 4, [1] * 32], ids=["one", "chunks", "steps"])
def test_fault_09_one_shot_chunks_and_steps(lengths: list[int]):
    layer, rows = Layer.random(SMALL), Rows.random(SMALL, 32)
    state, whole = layer.pool(1), layer.pool(1)
    parts = [layer.prefill(rows.some(s), state, ids(0), cuts(s.stop - s.start)) for s in one_by_one(lengths)]
    assert same_bits(torch.cat(parts), layer.prefill(rows, whole, ids(0), cuts(32)))
    assert same_bits(state, whole)


def test_fault_09_prefill_and_decode_are_one_recurrence():
    layer, rows = Layer.random(SMALL), Rows.random(SMALL, 9)
    state, other = layer.pool(1), layer.pool(1)
    out = layer.prefill(rows, state, ids(0), cuts(9))
    layer.prefill(rows.some(slice(0, 8)), other, ids(0), cuts(8))
    assert same_bits(out[8:], layer.decode(rows.some(slice(8, 9)), other, ids(0)))
    assert same_bits(state, other)


def test_fault_09_gates_at_the_lower_bound_stay_finite():
    spec = KDASpec(num_heads=1, head_dim=128)
    layer = replace(Layer.random(spec), A_log=torch.zeros(1), dt_bias=torch.full((128,), 1e4))
    rows = Rows.random(spec, 64)
    state = layer.pool(1)
    start = state[0].clone()
    g, _ = kda.kda_gate(spec, *gates(layer, rows))
    assert (g == -5.0).all()
    out, final = expected(layer, rows, start)
    got = layer.prefill(rows, state, ids(0), cuts(64))
    assert got.isfinite().all()
    assert distance(got, out) < 1e-6
    assert distance(state[0], final) < 1e-6


def test_fault_09_a_gate_of_another_dtype_is_refused_not_reused():
    spec = KDASpec(num_heads=2, head_dim=8, gate="log")
    layer, rows = Layer.random(spec), Rows.random(spec, 3)
    r, state = rows, layer.pool(3)
    decode = run("kda_decode", spec)
    decode(r.q, r.k, r.v, r.raw_g, r.raw_beta, None, None, state, ids(0, 1, 2))
    with pytest.raises(ValueError, match=r"^kda_decode: raw_g must be float32, got bfloat16$"):
        decode(r.q, r.k, r.v, r.raw_g.bfloat16(), r.raw_beta, None, None, state, ids(0, 1, 2))


# ---- 10: life cycle of the state


def test_fault_10_a_reused_slot_starts_fresh():
    layer, first, second = Layer.random(SMALL), Rows.random(SMALL, 5, 1), Rows.random(SMALL, 3, 2)
    state, pool = layer.pool(1), layer.conv_pool(1)
    fresh, fresh_pool = torch.zeros_like(state), torch.zeros_like(pool)
    no = {"has_initial_state": flags(False)}
    layer.prefill(first, state, ids(0), cuts(5), **no)
    layer.conv(first, pool, ids(0), cuts(5), **no)
    assert same_bits(
        layer.prefill(second, state, ids(0), cuts(3), **no), layer.prefill(second, fresh, ids(0), cuts(3))
    )
    assert same_bits(
        layer.conv(second, pool, ids(0), cuts(3), **no), layer.conv(second, fresh_pool, ids(0), cuts(3))
    )
    assert same_bits(state, fresh)
    assert same_bits(pool, fresh_pool)


def test_fault_10_trimming_means_continuing_from_a_checkpoint():
    spec = replace(SMALL, checkpoints=True)
    layer, abcd, e = Layer.random(spec), Rows.random(spec, 4), Rows.random(spec, 1, 7)
    state, plain = torch.zeros(2, 2, 8, 8), torch.zeros(2, 2, 8, 8)
    layer.prefill(abcd, state, ids(0), cuts(4), checkpoint_offsets=ids(2), checkpoint_ids=ids(1))
    trimmed = layer.prefill(e, state, ids(1), cuts(1))
    layer.prefill(abcd.some(slice(0, 2)), plain, ids(0), cuts(2))
    assert same_bits(trimmed, layer.prefill(e, plain, ids(0), cuts(1)))
    assert same_bits(state[1], plain[0])


def test_fault_10_every_call_advances_a_slot_once():
    layer, rows = Layer.random(SMALL), Rows.random(SMALL, 1)
    state = layer.pool(1)
    _, once = expected(layer, rows, state[0])
    r = rows
    run("kda_decode", SMALL)(r.q, r.k, r.v, *gates(layer, r), state, ids(0))
    assert distance(state[0], once) < 1e-6


# ---- 12: ragged batches


def test_fault_12_empty_sequences_pass_their_state_bit_for_bit():
    layer, rows = Layer.random(SMALL), Rows.random(SMALL, 5)
    state, pool = layer.pool(4), layer.conv_pool(4)
    state[0, 0, 0, 0], state[2, 0, 0, 0] = float("nan"), -0.0
    before, before_pool = state.clone(), pool.clone()
    fresh = flags(True, True, False, True)
    layer.prefill(rows, state, ids(0, 1, 2, 3), ids(0, 0, 3, 3, 5), has_initial_state=fresh)
    layer.conv(rows, pool, ids(0, 1, 2, 3), ids(0, 0, 3, 3, 5), has_initial_state=fresh)
    for n in (0, 2):
        assert same_bits(state[n], before[n])
        assert same_bits(pool[n], before_pool[n])
    for n, piece in ((1, slice(0, 3)), (3, slice(3, 5))):
        _, final = expected(layer, rows.some(piece), before[n])
        assert distance(state[n], final) < 1e-6


def test_fault_12_single_rows_beside_a_long_sequence():
    layer = replace(Layer.random(SMALL), A_log=torch.zeros(2), dt_bias=torch.full((16,), 1e4))  # g = −5
    rows, state = Rows.random(SMALL, 66), layer.pool(3)
    start = state.clone()
    out = layer.prefill(rows, state, ids(0, 1, 2), ids(0, 1, 2, 66))
    assert out.isfinite().all()
    for n, piece in enumerate((slice(0, 1), slice(1, 2), slice(2, 66))):
        want, final = expected(layer, rows.some(piece), start[n])
        assert distance(out[piece], want) < 1e-6
        assert distance(state[n], final) < 1e-6


def test_fault_12_nan_in_one_state_stays_there():
    layer, rows = Layer.random(SMALL), Rows.random(SMALL, 66)
    state, clean = layer.pool(3), layer.pool(3)
    state[1] = float("nan")
    out = layer.prefill(rows, state, ids(0, 1, 2), ids(0, 1, 2, 66))
    want = layer.prefill(rows, clean, ids(0, 1, 2), ids(0, 1, 2, 66))
    assert out[1].isnan().all()
    assert same_bits(out[[0, *range(2, 66)]], want[[0, *range(2, 66)]])
    assert same_bits(state[[0, 2]], clean[[0, 2]])


def test_fault_12_rows_beyond_the_last_sequence_are_zero():
    layer, rows = Layer.random(SMALL), Rows.random(SMALL, 8)
    out = torch.full((8, 2, 8), float("nan")).bfloat16()
    r, state = rows, layer.pool(1)
    run("kda_prefill", SMALL)(r.q, r.k, r.v, *gates(layer, r), state, ids(0), ids(0, 7), out=out)
    assert not out[7].any()
    want, _ = expected(layer, rows.some(slice(0, 7)), layer.pool(1)[0])
    assert distance(out[:7], want) < 4e-3  # rounded to bf16


def test_fault_12_cuts_beyond_the_rows_are_an_error_when_checked():
    layer, rows = Layer.random(SMALL), Rows.random(SMALL, 8)
    names = ("q", "k", "v", "raw_g", "raw_beta")
    tensors = {name: getattr(rows, name) for name in names} | {"state": layer.pool(1), "state_ids": ids(0)}
    op = get("kda_prefill")
    assert op.values is not None
    assert list(op.values(SMALL, None, {**tensors, "cu_seqlens": ids(0, 7)})) == []
    assert list(op.values(SMALL, None, {**tensors, "cu_seqlens": ids(0, 9)})) == [
        "cu_seqlens ends at 9, beyond the 8 rows"
    ]


def test_fault_12_decodes_before_or_after_a_prefill():
    layer, rows = Layer.random(SMALL), Rows.random(SMALL, 7)
    state, other = layer.pool(3), layer.pool(3)
    out = layer.prefill(rows, state, ids(0, 1, 2), cuts(1, 1, 5))
    turned = rows.some(torch.tensor([2, 3, 4, 5, 6, 0, 1]))
    again = layer.prefill(turned, other, ids(2, 0, 1), cuts(5, 1, 1))
    assert same_bits(out, again[torch.tensor([5, 6, 0, 1, 2, 3, 4])])
    assert same_bits(state, other)


# ---- 13: layouts that a square hides


def test_fault_13_the_state_is_not_transposed():
    spec = KDASpec(num_heads=1, head_dim=4, gate="log", qk_norm=False, scale=1.0)
    ramp = torch.tensor([[1.0, 2, 3, 4], [0, 5, 6, 7], [0, 0, 8, 9], [0, 0, 0, 10]])  # [V, K]
    q = torch.tensor([[[0.0, 1, 0, 0]]]).bfloat16()
    k = torch.tensor([[[1.0, 0, 0, 0]]]).bfloat16()
    v = torch.tensor([[[3.0, 2, 2, 4]]]).bfloat16()
    state = ramp.clone().view(1, 1, 4, 4)
    out = kda.kda_prefill(
        spec, q, k, v, torch.zeros(1, 1, 4), torch.full((1, 1), 0.5), None, None, state, ids(0), cuts(1)
    )
    # u = (v − S k) / 2 = [1, 1, 1, 2] enters the column of channel 0; q reads the column of channel 1
    want = ramp.clone()
    want[:, 0] += torch.tensor([1.0, 1, 1, 2])
    assert torch.equal(state[0, 0], want)
    assert out[0, 0].tolist() == [2.0, 5.0, 0.0, 0.0]


def test_fault_13_conv_state_layouts_of_a_square():
    # 3 channels and 3 stored inputs: either layout fits the other's shape
    weight = torch.zeros(3, 4)
    weight[:, 0] = 1.0  # only the oldest input counts
    stored = torch.arange(1.0, 10.0).view(1, 3, 3).bfloat16()
    x = torch.zeros(1, 3).bfloat16()
    answers = {"width_channel": [1.0, 2.0, 3.0], "channel_width": [1.0, 4.0, 7.0]}
    for layout, oldest in answers.items():
        spec = KDASpec(num_heads=1, head_dim=1, conv_layout=layout)
        y = kda.kda_conv(spec, x, weight, stored.clone(), ids(0), cuts(1), dtype=torch.float64)
        assert y[0].tolist() == pytest.approx([a / (1 + math.exp(-a)) for a in oldest], rel=1e-14)


# ---- 14: dimensions that are no power of two


@pytest.mark.parametrize("dim", [1, 3, 60, 100])
def test_fault_14_bytes_after_a_row(dim: int):
    spec = KDASpec(num_heads=1, head_dim=dim, gate="log", scale=dim**-0.5)
    layer, rows = Layer.random(spec), Rows.random(spec, 1)
    guarded = torch.full((1, 1, 128), 1e4)
    guarded[..., :dim] = rows.raw_g
    state, plain = layer.pool(1), layer.pool(1)
    out = layer.prefill(replace(rows, raw_g=guarded[..., :dim]), state, ids(0), cuts(1))
    assert same_bits(out, layer.prefill(rows, plain, ids(0), cuts(1)))
    assert same_bits(state, plain)
    assert distance(out, expected(layer, rows, layer.pool(1)[0])[0]) < 1e-6


# ---- 15: heads of a rank


@pytest.mark.parametrize("heads", [1, 4, 6, 8, 12, 16, 20, 24, 32, 40, 64, 128])
def test_fault_15_any_number_of_heads(heads: int):
    spec = KDASpec(num_heads=heads, head_dim=4)
    layer, rows = Layer.random(spec), Rows.random(spec, 5)
    state, pool = layer.pool(1), layer.conv_pool(1)
    out, final = expected(layer, rows, state[0])
    assert distance(layer.prefill(rows, state, ids(0), cuts(5)), out) < 1e-6
    assert distance(state[0], final) < 1e-6
    records = torch.zeros(1, sizes.records_bytes(spec, 5), dtype=torch.uint8)
    steps, steps_pool = state.clone(), pool.clone()
    layer.verify(rows, pool, state, ids(0), cuts(5), records)
    layer.commit(pool, state, records, ids(0), ids(5))
    layer.stepwise(rows, steps_pool, steps, 0)
    assert same_bits(state, steps)
    assert same_bits(pool, steps_pool)


# ---- 17: more rows, heads and sequences than a launch has blocks


@pytest.mark.parametrize(("heads", "sequences"), [(32, 2048), (1, 65_536)])
def test_fault_17_more_sequences_than_a_launch_grid_holds(heads: int, sequences: int):
    spec = KDASpec(num_heads=heads, head_dim=2)
    layer, rows = Layer.random(spec), Rows.random(spec, sequences)
    state, halves = layer.pool(sequences), layer.pool(sequences)
    pool, pool_halves = layer.conv_pool(sequences), layer.conv_pool(sequences)
    slots, cu = torch.arange(sequences, dtype=torch.int32), torch.arange(sequences + 1, dtype=torch.int32)
    out, y = layer.prefill(rows, state, slots, cu), layer.conv(rows, pool, slots, cu)
    half = sequences // 2
    for part in (slice(0, half), slice(half, sequences)):
        some = rows.some(part)
        assert same_bits(out[part], layer.prefill(some, halves, slots[part], cu[: half + 1]))
        assert same_bits(y[part], layer.conv(some, pool_halves, slots[part], cu[: half + 1]))
    assert same_bits(state, halves)
    assert same_bits(pool, pool_halves)


# ---- 19: extremes


def test_fault_19_large_gate_arguments_give_limits():
    spec = KDASpec(num_heads=1, head_dim=4, lower_bound=None)
    raw = torch.tensor([[[90.0, -90.0, 0.0, 20.0]]]).bfloat16()
    g, beta = kda.kda_gate(spec, raw, torch.tensor([[100.0]]).bfloat16(), torch.zeros(1), torch.zeros(4))
    assert g[0, 0, 0] == -90.0
    assert -1e-38 < g[0, 0, 1] <= 0.0
    assert g[0, 0, 2:].tolist() == pytest.approx([-math.log(2), -20.0], rel=1e-6)
    assert beta.item() == 1.0
    _, beta = kda.kda_gate(spec, raw, torch.tensor([[-100.0]]).bfloat16(), torch.zeros(1), torch.zeros(4))
    assert 0.0 <= beta.item() < 1e-43


def test_fault_19_a_bounded_gate_never_leaves_its_bound():
    spec = KDASpec(num_heads=1, head_dim=3)
    raw = torch.tensor([[[3e38, -3e38, 0.0]]]).bfloat16()
    g, _ = kda.kda_gate(spec, raw, raw[..., 0], torch.tensor([5.0]), torch.zeros(3))
    assert g.flatten().tolist() == [-5.0, 0.0, -2.5]


def test_fault_19_a_zero_key_and_a_zero_query_are_not_nan():
    layer, rows = Layer.random(SMALL), Rows.random(SMALL, 2)
    zero = replace(rows, q=torch.zeros_like(rows.q), k=torch.zeros_like(rows.k))
    state = layer.pool(1)
    out = layer.prefill(zero, state, ids(0), cuts(2))
    assert not out.any()
    g, _ = kda.kda_gate(SMALL, *gates(layer, rows))
    assert distance(state[0], layer.pool(1)[0] * g.sum(0).exp()[:, None]) < 1e-6


# ---- 23: index dtypes, strides, record layout


def test_fault_23_an_interleaved_gate_is_refused_and_read_right():
    packed = torch.tensor([[10.0, 1.0, 20.0, 2.0]]).bfloat16()  # b0, a0, b1, a1 of one row
    spec = KDASpec(num_heads=2, head_dim=1, lower_bound=None)
    beta, raw = packed[:, 0::2], packed[:, 1::2, None]
    operands = {"raw_g": raw, "raw_beta": beta, "A_log": torch.zeros(2), "dt_bias": torch.zeros(2)}
    assert check.problems(get("kda_gate"), spec, operands) == [
        "raw_g must be contiguous in all but its first dimension, got strides [4, 2, 1]",
        "raw_beta must have stride 1 in its last dimension, got strides [4, 2]",
    ]
    for g, b in (
        kda.kda_gate(spec, raw, beta, *list(operands.values())[2:]),
        run("kda_gate", spec)(raw.contiguous(), beta.contiguous(), torch.zeros(2), torch.zeros(2)),
    ):
        assert g.flatten().tolist() == pytest.approx([-math.log1p(math.e), -math.log1p(math.exp(2))])
        assert b.flatten().tolist() == pytest.approx([1 / (1 + math.exp(-10)), 1 / (1 + math.exp(-20))])


def test_fault_23_state_ids_may_be_a_column():
    layer, rows = Layer.random(SMALL), Rows.random(SMALL, 3)
    table = torch.full((3, 3), 77, dtype=torch.int32)
    table[:, 0] = ids(2, 0, 1)
    state, plain = layer.pool(3), layer.pool(3)
    r = rows
    out = run("kda_decode", SMALL)(r.q, r.k, r.v, *gates(layer, r), state, table[:, 0])
    assert same_bits(out, layer.decode(rows, plain, ids(2, 0, 1)).bfloat16())
    assert same_bits(state, plain)


def test_fault_23_wide_ids_are_refused():
    layer, rows = Layer.random(SMALL), Rows.random(SMALL, 4)
    r, slots = rows, torch.tensor([1, 2, 3, 0])
    with pytest.raises(ValueError, match=r"^kda_decode: state_ids must be int32, got int64$"):
        run("kda_decode", SMALL)(r.q, r.k, r.v, *gates(layer, r), layer.pool(4), slots)


def test_fault_23_views_of_one_projection():
    layer, rows = Layer.random(SMALL), Rows.random(SMALL, 5)
    # x is a slice of a fused projection, beta stands at an odd address in rows of odd length
    fused = torch.full((5, 48 + 16 + 3), float("nan")).bfloat16()
    x, g, beta = fused[:, :48], fused[:, 48:64].view(5, 2, 8), fused[:, 65:67]
    for view, source in ((x, rows.x), (g, rows.raw_g), (beta, rows.raw_beta)):
        view.copy_(source)
    pool, plain_pool = layer.conv_pool(1), layer.conv_pool(1)
    y = run("kda_conv", SMALL)(x, layer.weight, pool, ids(0), cuts(5))
    plain = layer.convolved(rows, layer.conv(rows, plain_pool, ids(0), cuts(5)))
    assert same_bits(y.view(5, 3, 2, 8).unbind(1)[1], plain.k)
    q, k, v = y.view(5, 3, 2, 8).unbind(1)
    state, plain_state = layer.pool(1), layer.pool(1)
    out = run("kda_prefill", SMALL)(q, k, v, g, beta, layer.A_log, layer.dt_bias, state, ids(0), cuts(5))
    assert same_bits(out, layer.prefill(plain, plain_state, ids(0), cuts(5)).bfloat16())
    assert same_bits(state, plain_state)


# ---- 24: batch invariance


def test_fault_24_a_row_has_the_same_bits_at_every_place():
    layer = Layer.random(KDASpec(num_heads=2, head_dim=60, scale=60**-0.5))
    rows = Rows.random(layer.spec, 64)
    one = rows.some(slice(7, 8))
    results = []
    for batch, place in ((1, 0), (44, 43), (64, 0), (64, 43), (64, 63)):
        some = rows.some(slice(0, batch))
        order = torch.arange(batch)
        for name in ("x", "raw_g", "raw_beta", "q", "k", "v"):
            whole = getattr(some, name).clone()
            whole[place] = getattr(one, name)[0]
            some = replace(some, **{name: whole})
        state = layer.pool(batch)
        state[place] = layer.pool(1, seed=9)[0]
        out = layer.decode(some, state, order.int())
        results.append((out[place], state[place]))
    for out, state in results[1:]:
        assert same_bits(out, results[0][0])
        assert same_bits(state, results[0][1])
