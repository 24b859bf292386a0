"""What the KDA reference computes, and that its bits depend on nothing but a sequence's own rows.

Public references that the recurrence, the gate, the convolution and the gated norm were compared with:
flash-linear-attention's ``fla/ops/kda/naive.py`` (here, where fla-core is installed), and once by hand, at
most 4e-7 apart in norm over 130 rows in float32: transformers 5.24.0 ``models/kimi_linear``
(``recurrent_kimi_delta_attention``, ``chunk_kimi_delta_attention``, ``causal_conv1d_fn``,
``KimiLinearForgetGate``, ``KimiLinearRMSNormGated``).
"""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from kda_cases import (
    F64,
    Layer,
    Rows,
    convolution,
    cuts,
    distance,
    expected,
    flags,
    ids,
    one_by_one,
    same_bits,
)

import kimi_hal as hal
from kimi_hal.errors import ContractError
from kimi_hal.ops.kda import KDASpec
from kimi_hal.ops.spec import Limits
from kimi_hal.reference import convolution as convolution_file
from kimi_hal.reference import kda, recurrence, sizes
from kimi_hal.reference.records import Records, room

SMALL = KDASpec(num_heads=2, head_dim=8, scale=8**-0.5)
ODD = KDASpec(num_heads=3, head_dim=60, scale=60**-0.5)
FULL = KDASpec(num_heads=2)


def with_checkpoints(spec: KDASpec) -> KDASpec:
    return KDASpec.from_dict({**spec.to_dict(), "checkpoints": True})


def records_for(layer: Layer, requests: int, rows: int, u_bytes: int = 4) -> torch.Tensor:
    return torch.full((requests, sizes.records_bytes(layer.spec, rows, u_bytes)), 0xFF, dtype=torch.uint8)


# --- values -------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [-5.0, -1.0, None])
@pytest.mark.parametrize("qk_norm", [True, False])
def test_prefill_is_the_recurrence(bound: float | None, qk_norm: bool):
    spec = KDASpec(num_heads=2, head_dim=8, scale=0.25, lower_bound=bound, qk_norm=qk_norm)
    layer, rows = Layer.random(spec), Rows.random(spec, 20)
    if not qk_norm:
        rows = Rows(rows.x, rows.raw_g, rows.raw_beta, rows.q, rows.k / 8, rows.v)
    state = layer.pool(1).to(F64)
    out, final = expected(layer, rows, state[0])
    assert distance(layer.prefill(rows, state, ids(0), cuts(20), dtype=F64), out) < 1e-13
    assert distance(state[0], final) < 1e-13


def test_float32_stays_close_to_float64():
    layer, rows = Layer.random(FULL), Rows.random(FULL, 256)
    state = layer.pool(1)
    out, final = expected(layer, rows, state[0])
    assert distance(layer.prefill(rows, state, ids(0), cuts(256)), out) < 5e-7
    assert distance(state[0], final) < 5e-7


def fla_naive() -> ModuleType:
    """Load one file of fla-core: importing the package would need triton."""
    pytest.importorskip("einops", reason="fla-core's naive recurrence imports einops")
    found = importlib.util.find_spec("fla")
    if found is None or not found.submodule_search_locations:
        pytest.skip("fla-core is not installed: pip install --no-deps fla-core==0.6.0 einops==0.8.2")
    path = Path(found.submodule_search_locations[0], "ops", "kda", "naive.py")
    spec = importlib.util.spec_from_file_location("fla_ops_kda_naive", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["naive_recurrent_kda", "naive_chunk_kda"])
def test_prefill_agrees_with_flash_linear_attention(name: str):
    naive = getattr(fla_naive(), name)
    spec = KDASpec(num_heads=3, head_dim=32, gate="log", scale=32**-0.5)
    layer, rows = Layer.random(spec), Rows.random(spec, 128)
    state = layer.pool(1)
    q, k = (
        (x.double() / (x.double().square().sum(-1, keepdim=True) + 1e-6).sqrt()) for x in (rows.q, rows.k)
    )
    # Theirs has a batch dimension, and the state the other way round.
    operands = [x[None] for x in (q, k, rows.v.double(), rows.raw_g, rows.raw_beta)]
    start = state[0].transpose(-1, -2)[None]
    out, final = naive(*operands, scale=spec.scale, initial_state=start, output_final_state=True)
    assert distance(layer.prefill(rows, state, ids(0), cuts(128)), out[0]) < 3e-6
    assert distance(state[0], final[0].transpose(-1, -2)) < 3e-6


def test_gate_with_a_lower_bound():
    spec = KDASpec(num_heads=2, head_dim=1)
    raw = torch.tensor([[[0.5], [-1.0]]]).bfloat16()
    beta = torch.tensor([[0.0, 1.0]]).bfloat16()
    A_log = torch.tensor([1.0, 3.0], dtype=F64).log()
    g, b = kda.kda_gate(spec, raw, beta, A_log, torch.tensor([0.5, 2.0]), dtype=F64)
    # head 0: −5 · sigmoid(1 · (0.5 + 0.5)); head 1: −5 · sigmoid(3 · (−1 + 2))
    want = [-5 / (1 + math.exp(-1)), -5 / (1 + math.exp(-3))]
    assert g.flatten().tolist() == pytest.approx(want, abs=1e-12)
    assert b.flatten().tolist() == pytest.approx([0.5, 0.7310585786300049], abs=1e-12)


def test_gate_without_a_bound_is_a_softplus():
    spec = KDASpec(num_heads=1, head_dim=3, lower_bound=None)
    raw = torch.tensor([[[0.0, 30.0, -30.0]]]).bfloat16()
    g, _ = kda.kda_gate(spec, raw, raw[..., 0], torch.zeros(1), torch.zeros(3), dtype=F64)
    assert g.flatten().tolist() == pytest.approx([-math.log(2), -30.0, -math.exp(-30)], rel=1e-12)


def test_a_finished_gate_gives_the_bits_of_the_raw_one():
    layer, rows = Layer.random(SMALL), Rows.random(SMALL, 9)
    finished = Layer(KDASpec(num_heads=2, head_dim=8, scale=8**-0.5, gate="log"), layer.weight, None, None)
    g, beta = kda.kda_gate(SMALL, rows.raw_g, rows.raw_beta, layer.A_log, layer.dt_bias)
    state, other = layer.pool(1), layer.pool(1)
    out = layer.prefill(rows, state, ids(0), cuts(9))
    same = finished.prefill(Rows(rows.x, g, beta, rows.q, rows.k, rows.v), other, ids(0), cuts(9))
    assert same_bits(out, same)
    assert same_bits(state, other)


@pytest.mark.parametrize("layout", ["width_channel", "channel_width"])
def test_conv_is_causal_and_starts_from_its_state(layout: str):
    spec = KDASpec(num_heads=2, head_dim=4, conv_layout=layout)
    layer, rows = Layer.random(spec), Rows.random(spec, 7)
    pool = layer.conv_pool(2)
    past = pool[1] if layout == "width_channel" else pool[1].T
    y = layer.conv(rows, pool, ids(1), cuts(7), dtype=F64)
    # `past` is a view of the pool, which now holds the last three inputs
    assert torch.equal(past, rows.x[-3:])
    before = layer.conv_pool(2)[1]
    before = before if layout == "width_channel" else before.T
    assert distance(y, convolution(layer, rows.x, before)) < 1e-14


def test_conv_keeps_channels_q_k_v_in_order():
    spec = KDASpec(num_heads=1, head_dim=1)
    weight = torch.tensor([[0, 0, 0, 1.0], [0, 0, 0, 2.0], [0, 0, 0, 3.0]])
    x = torch.tensor([[1.0, 1.0, 1.0]]).bfloat16()
    y = kda.kda_conv(spec, x, weight, torch.zeros(1, 3, 3).bfloat16(), ids(0), cuts(1), dtype=F64)
    want = [a / (1 + math.exp(-a)) for a in (1.0, 2.0, 3.0)]
    assert y[0].tolist() == pytest.approx(want, abs=1e-12)


def test_gated_rms_norm():
    x, weight = torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0])
    y = kda.gated_rms_norm(x, weight, torch.tensor([[0.0, 0.0]]), eps=0.0, dtype=F64)
    rms = 12.5**0.5
    assert y[0].tolist() == pytest.approx([3 / rms / 2, 8 / rms / 2], abs=1e-14)


def test_gated_rms_norm_adds_eps_to_the_mean_of_squares():
    zero = torch.zeros(1, 4)
    assert torch.equal(kda.gated_rms_norm(zero, torch.ones(4), zero, eps=1e-5), zero)
    tiny = torch.full((1, 4), 1e-5)
    y = kda.gated_rms_norm(tiny, torch.ones(4), torch.full((1, 4), 100.0), eps=1e-10, dtype=F64)
    assert y[0, 0].item() == pytest.approx(2**-0.5, rel=1e-6)


# --- bits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [SMALL, ODD, FULL], ids=["8", "60", "128"])
@pytest.mark.parametrize("lengths", [[8] * 4, [1, 31], [5, 27], [1] * 32], ids=str)
def test_one_shot_equals_chunks_and_steps_in_bits(spec: KDASpec, lengths: list[int]):
    layer, rows = Layer.random(spec), Rows.random(spec, 32)
    state, pieces = layer.pool(1), layer.pool(1)
    out = layer.prefill(rows, state, ids(0), cuts(32))
    parts = [layer.prefill(rows.some(s), pieces, ids(0), cuts(s.stop - s.start)) for s in one_by_one(lengths)]
    assert same_bits(out, torch.cat(parts))
    assert same_bits(state, pieces)


@pytest.mark.parametrize("lengths", [[8] * 4, [1, 31], [2, 1, 29], [1] * 32], ids=str)
def test_conv_in_pieces_equals_one_call_in_bits(lengths: list[int]):
    layer, rows = Layer.random(ODD), Rows.random(ODD, 32)
    pool, pieces = layer.conv_pool(1), layer.conv_pool(1)
    out = layer.conv(rows, pool, ids(0), cuts(32))
    parts = [layer.conv(rows.some(s), pieces, ids(0), cuts(s.stop - s.start)) for s in one_by_one(lengths)]
    assert same_bits(out, torch.cat(parts))
    assert same_bits(pool, pieces)


@pytest.mark.parametrize("spec", [SMALL, ODD, FULL], ids=["8", "60", "128"])
def test_decode_equals_prefill_of_single_rows_in_bits(spec: KDASpec):
    layer, rows = Layer.random(spec), Rows.random(spec, 5)
    state, other = layer.pool(7), layer.pool(7)
    slots = ids(3, 0, 6, 1, 5)
    out = layer.decode(rows, state, slots)
    assert same_bits(out, layer.prefill(rows, other, slots, cuts(1, 1, 1, 1, 1)))
    assert same_bits(state, other)


@pytest.mark.parametrize("spec", [SMALL, ODD], ids=["8", "60"])
def test_bits_of_a_sequence_do_not_depend_on_its_neighbours(spec: KDASpec):
    layer, rows = Layer.random(spec), Rows.random(spec, 40)
    lengths = [3, 17, 1, 0, 12, 7]
    together = layer.pool(6)
    out = layer.prefill(rows, together, ids(0, 1, 2, 3, 4, 5), cuts(*lengths))
    for n, piece in enumerate(one_by_one(lengths)):
        alone = layer.pool(6)
        assert same_bits(out[piece], layer.prefill(rows.some(piece), alone, ids(n), cuts(lengths[n])))
        assert same_bits(together[n], alone[n])


def test_bits_do_not_depend_on_how_the_work_is_cut(monkeypatch: pytest.MonkeyPatch):
    layer, rows = Layer.random(ODD), Rows.random(ODD, 40)
    slots, cu = ids(0, 1, 2, 3), cuts(3, 17, 8, 12)
    state, pool = layer.pool(4), layer.conv_pool(4)
    out, y = layer.prefill(rows, state, slots, cu), layer.conv(rows, pool, slots, cu)
    g, _ = kda.kda_gate(ODD, rows.raw_g, rows.raw_beta, layer.A_log, layer.dt_bias)
    monkeypatch.setattr(recurrence, "STATES", 2 * ODD.num_heads * 60 * 60)
    monkeypatch.setattr(recurrence, "PREPARED", 5 * ODD.num_heads * 60)
    monkeypatch.setattr(convolution_file, "ELEMENTS", 7 * ODD.channels)
    monkeypatch.setattr(kda, "ELEMENTS", 3 * ODD.num_heads * 60)
    other, other_pool = layer.pool(4), layer.conv_pool(4)
    assert same_bits(out, layer.prefill(rows, other, slots, cu))
    assert same_bits(y, layer.conv(rows, other_pool, slots, cu))
    assert same_bits(state, other)
    assert same_bits(pool, other_pool)
    assert same_bits(g, kda.kda_gate(ODD, rows.raw_g, rows.raw_beta, layer.A_log, layer.dt_bias)[0])


def test_threads_do_not_change_bits():
    spec = KDASpec(num_heads=8, head_dim=63, scale=0.125)
    layer, rows = Layer.random(spec), Rows.random(spec, 200)
    threads = torch.get_num_threads()
    results = []
    try:
        for n in (1, 3):
            torch.set_num_threads(n)
            state = layer.pool(4)
            results.append((layer.prefill(rows, state, ids(0, 1, 2, 3), cuts(20, 30, 50, 100)), state))
    finally:
        torch.set_num_threads(threads)
    assert same_bits(results[0][0], results[1][0])
    assert same_bits(results[0][1], results[1][1])


# --- state life cycle ---------------------------------------------------------------------------


def test_no_initial_state_never_reads_the_slot():
    layer, rows = Layer.random(SMALL), Rows.random(SMALL, 6)
    state, pool = (
        torch.full_like(layer.pool(2), float("nan")),
        torch.full_like(layer.conv_pool(2), float("nan")),
    )
    zero, zero_pool = torch.zeros_like(layer.pool(1)), torch.zeros_like(layer.conv_pool(1))
    fresh = {"has_initial_state": flags(False)}
    assert same_bits(
        layer.prefill(rows, state, ids(1), cuts(6), **fresh), layer.prefill(rows, zero, ids(0), cuts(6))
    )
    assert same_bits(
        layer.conv(rows, pool, ids(1), cuts(6), **fresh), layer.conv(rows, zero_pool, ids(0), cuts(6))
    )
    assert same_bits(state[1], zero[0])
    assert same_bits(pool[1], zero_pool[0])
    assert state[0].isnan().all()
    assert pool[0].isnan().all()


def test_no_initial_state_is_said_for_each_sequence():
    layer, rows = Layer.random(SMALL), Rows.random(SMALL, 6)
    state, zeroed = layer.pool(2), layer.pool(2)
    zeroed[1] = 0
    out = layer.prefill(rows, state, ids(0, 1), cuts(3, 3), has_initial_state=flags(True, False))
    assert same_bits(out, layer.prefill(rows, zeroed, ids(0, 1), cuts(3, 3)))
    assert same_bits(state, zeroed)


@pytest.mark.parametrize("offset", [1, 2, 7, 16, 20])
def test_continuing_from_a_checkpoint_gives_the_bits_of_the_run_that_wrote_it(offset: int):
    spec = with_checkpoints(ODD)
    layer, rows = Layer.random(spec), Rows.random(spec, 20)
    state, pool = layer.pool(3), layer.conv_pool(3)
    marks = {"checkpoint_offsets": ids(offset), "checkpoint_ids": ids(2)}
    out = layer.prefill(rows, state, ids(0), cuts(20), **marks)
    y = layer.conv(rows, pool, ids(0), cuts(20), **marks)
    rest = rows.some(slice(offset, 20))
    assert same_bits(out[offset:], layer.prefill(rest, state, ids(2), cuts(20 - offset)))
    assert same_bits(y[offset:], layer.conv(rest, pool, ids(2), cuts(20 - offset)))
    assert same_bits(state[2], state[0])
    assert same_bits(pool[2], pool[0])
    assert same_bits(state[1], layer.pool(3)[1])


def test_a_checkpoint_does_not_change_the_run():
    spec = with_checkpoints(SMALL)
    layer, rows = Layer.random(spec), Rows.random(spec, 9)
    state, plain = layer.pool(3), layer.pool(3)
    out = layer.prefill(
        rows, state, ids(0, 1), cuts(4, 5), checkpoint_offsets=ids(2, 0), checkpoint_ids=ids(2, -1)
    )
    assert same_bits(out, layer.prefill(rows, plain, ids(0, 1), cuts(4, 5)))
    assert same_bits(state[:2], plain[:2])


def test_checkpoint_at_0_is_the_start():
    spec = with_checkpoints(SMALL)
    layer, rows = Layer.random(spec), Rows.random(spec, 4)
    state, pool = layer.pool(4), layer.conv_pool(4)
    marks = {"checkpoint_offsets": ids(0, 0), "checkpoint_ids": ids(2, 3)}
    start = {"has_initial_state": flags(True, False)}
    layer.prefill(rows, state, ids(0, 1), cuts(2, 2), **start, **marks)
    layer.conv(rows, pool, ids(0, 1), cuts(2, 2), **start, **marks)
    assert same_bits(state[2], layer.pool(4)[0])
    assert same_bits(pool[2], layer.conv_pool(4)[0])
    assert not state[3].any()
    assert not pool[3].any()


@pytest.mark.parametrize("offset", [1, 2])
def test_conv_checkpoint_below_3_keeps_older_inputs(offset: int):
    spec = with_checkpoints(SMALL)
    layer, rows = Layer.random(spec), Rows.random(spec, 5)
    pool = layer.conv_pool(2)
    layer.conv(rows, pool, ids(0), cuts(5), checkpoint_offsets=ids(offset), checkpoint_ids=ids(1))
    past = layer.conv_pool(2)[0]
    assert same_bits(pool[1], torch.cat([past[offset:], rows.x[:offset]]))


@pytest.mark.parametrize("offset", [-1, 6])
def test_a_checkpoint_beyond_its_sequence_is_not_stored(offset: int):
    spec = with_checkpoints(SMALL)
    layer, rows = Layer.random(spec), Rows.random(spec, 5)
    state, pool = layer.pool(2), layer.conv_pool(2)
    marks = {"checkpoint_offsets": ids(offset), "checkpoint_ids": ids(1)}
    layer.prefill(rows, state, ids(0), cuts(5), **marks)
    layer.conv(rows, pool, ids(0), cuts(5), **marks)
    assert same_bits(state[1], layer.pool(2)[1])
    assert same_bits(pool[1], layer.conv_pool(2)[1])


def test_a_checkpoint_of_an_empty_sequence_is_its_start():
    spec = with_checkpoints(SMALL)
    layer, rows = Layer.random(spec), Rows.random(spec, 0)
    state, pool = layer.pool(3), layer.conv_pool(3)
    marks = {"checkpoint_offsets": ids(0), "checkpoint_ids": ids(2)}
    layer.prefill(rows, state, ids(1), cuts(0), **marks)
    layer.conv(rows, pool, ids(1), cuts(0), **marks)
    assert same_bits(state[2], layer.pool(3)[1])
    assert same_bits(pool[2], layer.conv_pool(3)[1])


def test_a_slot_out_of_range_contributes_nothing():
    layer, rows = Layer.random(SMALL), Rows.random(SMALL, 4)
    state, pool = layer.pool(2), layer.conv_pool(2)
    assert not layer.prefill(rows, state, ids(2, -7), cuts(2, 2)).any()
    assert not layer.conv(rows, pool, ids(2, -7), cuts(2, 2)).any()
    assert not layer.decode(rows, state, ids(2, 99, -1, -2)).any()
    assert same_bits(state, layer.pool(2))
    assert same_bits(pool, layer.conv_pool(2))


def test_no_rows_and_no_sequences_are_legal():
    layer, rows = Layer.random(SMALL), Rows.random(SMALL, 0)
    state, pool = layer.pool(1), layer.conv_pool(1)
    assert layer.prefill(rows, state, ids(), ids(0)).shape == (0, 2, 8)
    assert layer.conv(rows, pool, ids(), ids(0)).shape == (0, 48)
    assert layer.decode(rows, state, ids()).shape == (0, 2, 8)
    assert layer.verify(rows, pool, state, ids(), ids(0), records_for(layer, 0, 1)).shape == (0, 2, 8)
    layer.commit(pool, state, records_for(layer, 0, 1), ids(), ids())
    g, beta = kda.kda_gate(SMALL, rows.raw_g, rows.raw_beta, layer.A_log, layer.dt_bias)
    assert (g.shape, beta.shape) == ((0, 2, 8), (0, 2))


def test_a_pool_without_slots_is_legal():
    layer, rows = Layer.random(SMALL), Rows.random(SMALL, 2)
    assert not layer.decode(rows, layer.pool(0), ids(0, -1)).any()
    assert not layer.conv(rows, layer.conv_pool(0), ids(0, -1), cuts(1, 1)).any()


def test_pools_may_be_views_of_a_packed_buffer():
    layer, rows = Layer.random(SMALL), Rows.random(SMALL, 5)
    buffer = torch.full((3, 400), float("nan"))
    state = buffer[:, 16 : 16 + 128].view(3, 2, 8, 8)
    state.copy_(layer.pool(3))
    wide = torch.full((3, 10, 48), float("nan")).bfloat16()
    pool = wide[:, :3]
    pool.copy_(layer.conv_pool(3))
    plain, plain_pool = layer.pool(3), layer.conv_pool(3)
    assert same_bits(layer.prefill(rows, state, ids(1), cuts(5)), layer.prefill(rows, plain, ids(1), cuts(5)))
    assert same_bits(layer.conv(rows, pool, ids(1), cuts(5)), layer.conv(rows, plain_pool, ids(1), cuts(5)))
    assert same_bits(state, plain)
    assert same_bits(pool, plain_pool)
    assert buffer[:, :16].isnan().all()
    assert buffer[:, 144:].isnan().all()
    assert wide[:, 3:].isnan().all()


def test_states_are_value_major():
    # one row, beta 1, no decay, zero start: S = v kᵀ with V first
    spec = KDASpec(num_heads=1, head_dim=2, gate="log", qk_norm=False, scale=1.0)
    one = torch.ones(1, 1, 2).bfloat16()
    k, v = torch.tensor([[[1.0, 0.0]]]).bfloat16(), torch.tensor([[[3.0, 5.0]]]).bfloat16()
    state = torch.zeros(1, 1, 2, 2)
    out = kda.kda_prefill(
        spec, one, k, v, torch.zeros(1, 1, 2), torch.ones(1, 1), None, None, state, ids(0), cuts(1)
    )
    assert state[0, 0].tolist() == [[3.0, 0.0], [5.0, 0.0]]
    assert out[0, 0].tolist() == [3.0, 5.0]


# --- verify and commit --------------------------------------------------------------------------


@pytest.mark.parametrize("gate", ["raw", "log"])
@pytest.mark.parametrize("dim", [8, 60])
def test_verify_gives_the_outputs_of_steps_and_touches_no_state(gate: str, dim: int):
    spec = KDASpec(num_heads=2, head_dim=dim, gate=gate)
    layer, rows = Layer.random(spec), Rows.random(spec, 8)
    state, pool = layer.pool(3), layer.conv_pool(3)
    out = layer.verify(rows, pool, state, ids(2, 0), cuts(5, 3), records_for(layer, 2, 5))
    assert same_bits(state, layer.pool(3))
    assert same_bits(pool, layer.conv_pool(3))
    assert same_bits(out[:5], layer.stepwise(rows.some(slice(0, 5)), pool, state, 2))
    assert same_bits(out[5:], layer.stepwise(rows.some(slice(5, 8)), pool, state, 0))


@pytest.mark.parametrize("gate", ["raw", "log"])
@pytest.mark.parametrize("layout", ["width_channel", "channel_width"])
@pytest.mark.parametrize("accepted", [0, 1, 2, 3, 5])
def test_commit_gives_the_bits_of_decoding_the_accepted_rows(gate: str, layout: str, accepted: int):
    spec = KDASpec(num_heads=2, head_dim=12, gate=gate, conv_layout=layout)
    layer, rows = Layer.random(spec), Rows.random(spec, 5)
    state, pool, records = layer.pool(3), layer.conv_pool(3), records_for(layer, 1, 6)
    layer.verify(rows, pool, state, ids(1), cuts(5), records)
    layer.commit(pool, state, records, ids(1), ids(accepted))
    steps, steps_pool = layer.pool(3), layer.conv_pool(3)
    layer.stepwise(rows.some(slice(0, accepted)), steps_pool, steps, 1)
    assert same_bits(state, steps)
    assert same_bits(pool, steps_pool)


def test_commit_advances_every_sequence_by_its_own_length():
    layer, rows = Layer.random(ODD), Rows.random(ODD, 12)
    state, pool, records = layer.pool(5), layer.conv_pool(5), records_for(layer, 4, 4)
    slots, accepted = ids(4, 0, -1, 2), (1, 3, 2, 0)
    layer.verify(rows, pool, state, slots, cuts(4, 4, 2, 2), records)
    layer.commit(pool, state, records, slots, ids(*accepted))
    steps, steps_pool = layer.pool(5), layer.conv_pool(5)
    layer.stepwise(rows.some(slice(0, 1)), steps_pool, steps, 4)
    layer.stepwise(rows.some(slice(4, 7)), steps_pool, steps, 0)
    assert same_bits(state, steps)
    assert same_bits(pool, steps_pool)


def test_commit_of_more_rows_than_were_recorded_takes_the_recorded_ones():
    layer, rows = Layer.random(SMALL), Rows.random(SMALL, 3)
    state, pool, records = layer.pool(1), layer.conv_pool(1), records_for(layer, 1, 3)
    layer.verify(rows, pool, state, ids(0), cuts(3), records)
    layer.commit(pool, state, records, ids(0), ids(9))
    steps, steps_pool = layer.pool(1), layer.conv_pool(1)
    layer.stepwise(rows, steps_pool, steps, 0)
    assert same_bits(state, steps)
    assert same_bits(pool, steps_pool)


def test_commit_of_nothing_changes_no_bit_even_with_other_slots_named():
    spec = with_checkpoints(SMALL)
    layer, rows = Layer.random(spec), Rows.random(spec, 6)
    state, pool, records = layer.pool(6), layer.conv_pool(6), records_for(layer, 3, 2)
    layer.verify(rows, pool, state, ids(0, 1, 2), cuts(2, 2, 2), records)
    layer.commit(
        pool,
        state,
        records,
        ids(0, 1, -1),
        ids(0, -3, 2),
        out_ids=ids(3, 4, 5),
        checkpoint_ids=ids(4, 3, -1),
        checkpoint_lens=ids(0, 0, 0),
    )
    assert same_bits(state, layer.pool(6))
    assert same_bits(pool, layer.conv_pool(6))


def test_commit_to_another_slot_leaves_the_source():
    layer, rows = Layer.random(SMALL), Rows.random(SMALL, 6)
    state, pool, records = layer.pool(4), layer.conv_pool(4), records_for(layer, 2, 3)
    layer.verify(rows, pool, state, ids(0, 1), cuts(3, 3), records)
    layer.commit(pool, state, records, ids(0, 1), ids(2, 3), out_ids=ids(3, -1))
    steps, steps_pool = layer.pool(4), layer.conv_pool(4)
    layer.stepwise(rows.some(slice(0, 2)), steps_pool, steps, 0)
    assert same_bits(state[3], steps[0])
    assert same_bits(pool[3], steps_pool[0])
    assert same_bits(state[:3], layer.pool(4)[:3])
    assert same_bits(pool[:3], layer.conv_pool(4)[:3])


@pytest.mark.parametrize("length", [0, 1, 3, 4])
def test_commit_stores_a_checkpoint_on_the_way(length: int):
    spec = with_checkpoints(SMALL)
    layer, rows = Layer.random(spec), Rows.random(spec, 4)
    state, pool, records = layer.pool(3), layer.conv_pool(3), records_for(layer, 1, 4)
    layer.verify(rows, pool, state, ids(0), cuts(4), records)
    marks = {"checkpoint_ids": ids(2), "checkpoint_lens": ids(length)}
    layer.commit(pool, state, records, ids(0), ids(4), **marks)
    steps, steps_pool = layer.pool(3), layer.conv_pool(3)
    layer.stepwise(rows.some(slice(0, length)), steps_pool, steps, 0)
    assert same_bits(state[2], steps[0])
    assert same_bits(pool[2], steps_pool[0])
    layer.stepwise(rows.some(slice(length, 4)), steps_pool, steps, 0)
    assert same_bits(state[0], steps[0])
    assert same_bits(pool[0], steps_pool[0])


def test_commit_may_leave_its_checkpoint_in_the_source_slot():
    spec = with_checkpoints(SMALL)
    layer, rows = Layer.random(spec), Rows.random(spec, 4)
    state, pool, records = layer.pool(2), layer.conv_pool(2), records_for(layer, 1, 4)
    layer.verify(rows, pool, state, ids(0), cuts(4), records)
    moved = {"out_ids": ids(1), "checkpoint_ids": ids(0), "checkpoint_lens": ids(2)}
    layer.commit(pool, state, records, ids(0), ids(4), **moved)
    steps, steps_pool = layer.pool(2), layer.conv_pool(2)
    layer.stepwise(rows.some(slice(0, 2)), steps_pool, steps, 0)
    assert same_bits(state[0], steps[0])
    assert same_bits(pool[0], steps_pool[0])
    layer.stepwise(rows.some(slice(2, 4)), steps_pool, steps, 0)
    assert same_bits(state[1], steps[0])
    assert same_bits(pool[1], steps_pool[0])


def test_commit_advances_all_layers_in_one_call():
    spec = KDASpec(num_heads=2, head_dim=8, num_layers=3)
    layers = [Layer.random(spec, seed) for seed in range(3)]
    rows = [Rows.random(spec, 3, seed) for seed in range(3)]
    states, pools = [la.pool(2, i) for i, la in enumerate(layers)], [la.conv_pool(2) for la in layers]
    records = [records_for(la, 1, 3) for la in layers]
    for la, row, pool, state, record in zip(layers, rows, pools, states, records, strict=True):
        la.verify(row, pool, state, ids(1), cuts(3), record)
    A_logs, biases = [la.A_log for la in layers], [la.dt_bias for la in layers]
    kda.kda_commit(spec, pools, states, records, A_logs, biases, ids(1), ids(2))
    for i, la in enumerate(layers):
        steps, steps_pool = la.pool(2, i), la.conv_pool(2)
        la.stepwise(rows[i].some(slice(0, 2)), steps_pool, steps, 1)
        assert same_bits(states[i], steps)
        assert same_bits(pools[i], steps_pool)


def test_the_oracle_keeps_float64_between_verify_and_commit():
    layer, rows = Layer.random(SMALL), Rows.random(SMALL, 4)
    start = torch.randn(1, 2, 8, 8, dtype=F64, generator=torch.Generator().manual_seed(4))
    state, pool = start.clone(), layer.conv_pool(1)
    records = records_for(layer, 1, 4, u_bytes=8)
    out = layer.verify(rows, pool, state, ids(0), cuts(4), records, dtype=F64)
    layer.commit(pool, state, records, ids(0), ids(4), dtype=F64)
    steps, steps_pool = start.clone(), layer.conv_pool(1)
    assert same_bits(out, layer.stepwise(rows, steps_pool, steps, 0, dtype=F64))
    assert same_bits(state, steps)


def test_records_are_of_the_named_layout():
    layer, rows = Layer.random(SMALL), Rows.random(SMALL, 5)
    state, pool, records = layer.pool(2), layer.conv_pool(2), records_for(layer, 3, 4)
    layer.verify(rows, pool, state, ids(-1, 1), cuts(2, 3), records)
    assert sizes.RECORDS == "kda.u_k_g_x.v1"
    assert (records[[0, 2]] == 0xFF).all()
    raw = records[1].numpy().tobytes()
    H, Q, D, C = 2, 4, 8, 48
    assert len(raw) == 4 * H * Q * D + 2 * 2 * H * Q * D + 2 * Q * C
    found = Records.read(SMALL, records, torch.tensor([1]), torch.float32)
    k = layer.convolved(rows, layer.conv(rows, pool, ids(-1, 1), cuts(2, 3))).k
    assert same_bits(found.k[0, :, :3], k[2:5].transpose(0, 1))
    assert same_bits(found.g[0, :, :3], rows.raw_g[2:5].transpose(0, 1))
    assert same_bits(found.x[0, :3], rows.x[2:5])
    # what the sequence has no row for says nothing about other sequences
    assert not any(part[0, :, 3].any() for part in (found.u, found.k, found.g))
    assert not found.x[0, 3].any()
    # the first row's u, at the front of the record: beta · (v − S k^), where S has decayed once
    u = torch.frombuffer(bytearray(raw[: 4 * H * Q * D]), dtype=torch.float32).view(H, Q, D)
    row = layer.convolved(rows, layer.conv(rows, layer.conv_pool(2), ids(-1, 1), cuts(2, 3))).some(
        slice(2, 3)
    )
    _, final = expected(layer, row, state[1])
    g, _ = kda.kda_gate(SMALL, row.raw_g, row.raw_beta, layer.A_log, layer.dt_bias, dtype=F64)
    added = final - state[1].to(F64) * g[0].exp()[:, None]
    unit = row.k[0].to(F64) / (row.k[0].to(F64).square().sum(-1, keepdim=True) + 1e-6).sqrt()
    assert distance(u[:, 0, :, None] * unit[:, None], added) < 1e-6


def test_records_may_stand_at_any_address():
    spec = KDASpec(num_heads=1, head_dim=1)  # 14 bytes a row: rows of the buffer are not aligned to float32
    layer, rows = Layer.random(spec), Rows.random(spec, 4)
    state, pool = layer.pool(2), layer.conv_pool(2)
    records = torch.zeros(2 * 43 + 1, dtype=torch.uint8)[1:].view(2, 43)
    assert room(spec, records, torch.float32) == 3
    layer.verify(rows, pool, state, ids(0, 1), cuts(1, 3), records)
    layer.commit(pool, state, records, ids(0, 1), ids(1, 3))
    steps, steps_pool = layer.pool(2), layer.conv_pool(2)
    layer.stepwise(rows.some(slice(0, 1)), steps_pool, steps, 0)
    layer.stepwise(rows.some(slice(1, 4)), steps_pool, steps, 1)
    assert same_bits(state, steps)
    assert same_bits(pool, steps_pool)


def test_a_planned_pair_gives_the_bits_of_decoding():
    layer, rows = Layer.random(SMALL), Rows.random(SMALL, 5)
    limits = Limits(max_rows=8, max_reqs=3, rows_per_req=4)
    verify = hal.plan("kda_verify", SMALL, limits, device="cpu")
    commit = hal.plan("kda_commit", SMALL, limits, device="cpu", pair=verify)
    assert verify.properties.batch_invariant
    assert commit.properties.checkpoint_exact
    state, pool = layer.pool(3), layer.conv_pool(3)
    records = torch.full((3, verify.records_bytes), 0xFF, dtype=torch.uint8)
    parameters = (layer.weight, rows.raw_g, rows.raw_beta, layer.A_log, layer.dt_bias)
    out = verify.run(rows.x, *parameters, pool, state, ids(2, 1), cuts(3, 2), records)
    commit.run([pool], [state], [records], [layer.A_log], [layer.dt_bias], ids(2, 1), ids(2, 2))
    steps, steps_pool = layer.pool(3), layer.conv_pool(3)
    first = layer.stepwise(rows.some(slice(0, 2)), steps_pool, steps, 2)
    second = layer.stepwise(rows.some(slice(3, 5)), steps_pool, steps, 1)
    assert same_bits(out[:2], first.bfloat16())
    assert same_bits(out[3:], second.bfloat16())
    assert same_bits(state, steps)
    assert same_bits(pool, steps_pool)


def test_records_without_room_are_refused():
    layer, rows = Layer.random(SMALL), Rows.random(SMALL, 3)
    state, pool = layer.pool(1), layer.conv_pool(1)
    with pytest.raises(ContractError) as caught:
        layer.verify(rows, pool, state, ids(0), cuts(3), records_for(layer, 1, 2))
    assert str(caught.value) == "kda_verify: records has 448 bytes a sequence, 3 rows need 672"


@pytest.mark.parametrize(("gate", "bytes_"), [("raw", 172_032), ("log", 196_608)])
def test_record_bytes_of_a_rank_with_8_rows(gate: str, bytes_: int):
    spec = KDASpec(num_heads=12, gate=gate)
    assert sizes.sizes(spec, Limits(max_rows=8, max_reqs=1, rows_per_req=8), "cpu").records == bytes_


def test_sizes_are_known_without_torch():
    code = "import sys, kimi_hal.reference.sizes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("bound", [None, -5.0])
def test_a_gate_far_out_is_its_limit_and_never_nan(bound: float | None) -> None:
    """exp(A_log) and softplus are each beyond float32 where their product is not."""
    spec = KDASpec(num_heads=3, head_dim=7, lower_bound=bound)
    raw = torch.tensor([-90.0, -200.0, 0.0, -0.0, 90.0, 3e38, -3e38]).expand(1, 3, 7)
    rates, bias = torch.tensor([0.0, 90.0, 200.0]), torch.zeros(21)
    g = recurrence.gate(spec, raw, rates, bias, torch.float32)
    exact = recurrence.gate(spec, raw, rates, bias, torch.float64)
    assert not g.isnan().any()
    assert (g <= 0).all()
    torch.testing.assert_close(g, exact.float(), rtol=1e-5, atol=1e-30)
    if bound is None:
        assert g[0, :, 0].tolist() == pytest.approx([-8.194e-40, -1.0, -math.inf], rel=1e-3)
        assert g[0, :, 1].tolist() == pytest.approx([0.0, 0.0, -1.0])
