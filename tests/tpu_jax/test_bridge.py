"""The bridge from torch to the Pallas kernels: one program a bucket, the operator's own signature, sentences."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

pytest.importorskip("jax", reason="needs the environment of `nox -s tpu_jax`")

import jax

import kimi_hal as hal
from kimi_hal.errors import ContractError, SelectionError, UnknownNameError
from kimi_hal.ops.sparse_mla import SparseMLASpec, sparse_mla
from kimi_hal.ops.spec import Limits
from kimi_hal.ops.topk_merge import TopKSpec, topk_select
from kimi_hal_tpu.pallas import aot, bridge
from kimi_hal_tpu.pallas.sparse_mla import sparse_mla as attend
from kimi_hal_tpu.static import refuse_dynamic


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KIMI_HAL_EXECUTION", "interpreted")
    monkeypatch.setenv("KIMI_HAL_BACKEND", "tpu")


def machine(plan: Any) -> Any:
    """Return what runs a plan's programs."""
    return plan.run.__globals__["call"].machine


@pytest.mark.usefixtures("interpreted")
def test_rows_of_one_bucket_share_a_program() -> None:
    limits = Limits(max_rows=16, max_reqs=4, row_buckets=(4, 16))
    plan = hal.plan("topk_select", TopKSpec(topk=4), limits, device="cpu", implementation="tpu.pallas")
    programs = []
    for rows in (1, 3, 4, 5):
        scores, lengths = torch.randn(rows, 100), torch.full((rows,), 100, dtype=torch.int32)
        index, _ = plan.run(scores, lengths)
        assert index.tolist() == scores.topk(4).indices.sort().values.tolist()
        programs.append(machine(plan).jitted._cache_size())
    assert programs == [1, 1, 1, 2]


@pytest.mark.usefixtures("interpreted")
def test_rows_outside_the_buckets_are_refused() -> None:
    limits = Limits(max_rows=16, max_reqs=4, row_buckets=(4, 8))
    plan = hal.plan("topk_select", TopKSpec(topk=4), limits, device="cpu", implementation="tpu.pallas")
    with pytest.raises(ContractError, match="T=9 is in no bucket; this plan compiles for 4, 8"):
        plan.run(torch.randn(9, 100), torch.full((9,), 100, dtype=torch.int32))


@pytest.mark.usefixtures("interpreted")
def test_more_rows_than_the_plan_has_are_refused_by_that_number() -> None:
    limits = Limits(max_rows=16, max_reqs=4, row_buckets=(4, 16))
    plan = hal.plan("topk_select", TopKSpec(topk=4), limits, device="cpu", implementation="tpu.pallas")
    with pytest.raises(ContractError) as error:
        plan.run(torch.randn(17, 8), torch.full((17,), 8, dtype=torch.int32))
    assert str(error.value) == (
        "topk_select: T=17 is more than the plan's max_rows=16; plan with larger Limits"
    )


def selection(topk: int = 4) -> Any:
    limits = Limits(max_rows=8, max_reqs=8, row_buckets=(8,))
    return hal.plan("topk_select", TopKSpec(topk=topk), limits, device="cpu", implementation="tpu.pallas")


def best(scores: torch.Tensor, topk: int = 4) -> list[list[int]]:
    return scores.topk(topk).indices.sort().values.tolist()


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("rows", [0, 3])
def test_operands_and_buffers_that_require_grad_are_taken_as_they_are(rows: int) -> None:
    scores, lengths = torch.randn(rows, 8, requires_grad=True), torch.full((rows,), 8, dtype=torch.int32)
    spec = TopKSpec(topk=4, return_selected=True)
    plan = hal.plan("topk_select", spec, device="cpu", implementation="tpu.pallas")
    buffer = torch.zeros(rows, 4, requires_grad=True)
    index, selected = plan.run(scores, lengths, scores_out=buffer)
    assert index.tolist() == best(scores)
    assert selected is buffer
    assert buffer.grad_fn is None
    assert torch.equal(buffer.detach(), scores.detach().gather(1, index.long()))


@pytest.mark.usefixtures("interpreted")
def test_integers_of_64_bits_in_jax_change_nothing() -> None:
    scores = torch.randn(3, 8)
    with jax.enable_x64(True):
        index, _ = selection().run(scores, torch.full((3,), 8, dtype=torch.int32))
    assert index.tolist() == best(scores)


@pytest.fixture
def dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch whose device named ``tpu``, if another test of this process named one, has its module."""
    module = SimpleNamespace(is_available=lambda: False, device_count=lambda: 0)
    monkeypatch.setattr(torch, "tpu", module, raising=False)


@pytest.mark.usefixtures("interpreted", "dynamo")
def test_a_call_in_a_compiled_function_runs_between_its_graphs_whatever_the_shape() -> None:
    plan = selection()
    compiled = torch.compile(lambda s, n: plan.run(s * 2, n)[0] + 1, dynamic=True, backend="eager")
    for rows in (3, 5):
        scores = torch.randn(rows, 8)
        assert (compiled(scores, torch.full((rows,), 8, dtype=torch.int32)) - 1).tolist() == best(scores)


@pytest.mark.usefixtures("interpreted", "dynamo")
def test_a_call_in_one_whole_graph_is_refused_with_what_can_stand_there() -> None:
    plan = selection()
    compiled = torch.compile(lambda s, n: plan.run(s, n)[0], fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"plan\.op is one node of a graph"):
        compiled(torch.randn(3, 8), torch.full((3,), 8, dtype=torch.int32))


@pytest.mark.usefixtures("interpreted")
def test_threads_take_turns_in_the_simulator() -> None:
    plans, wrong = {topk: selection(topk) for topk in (3, 5)}, []

    def work(seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        for rows in (2, 8, 5):
            scores, lengths = torch.randn(rows, 16, generator=random), torch.full((rows,), 16).int()
            for topk, plan in plans.items():
                try:
                    found = plan.run(scores, lengths)[0].tolist()
                except Exception as error:  # a thread has nobody who would see it
                    found = error
                wrong.extend([found] * (found != best(scores, topk)))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert wrong == []


@pytest.mark.usefixtures("interpreted")
def test_the_simulator_is_held_until_its_races_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[bool] = []
    monkeypatch.setattr(bridge, "races_found", lambda: bool(held.append(bridge.SIMULATOR.locked())))
    selection().run(torch.randn(2, 8), torch.full((2,), 8, dtype=torch.int32))
    assert held == [True]
    assert not bridge.SIMULATOR.locked()


@pytest.mark.usefixtures("interpreted")
def test_a_call_with_nothing_to_do_needs_no_program() -> None:
    plan = selection()
    index, selected = plan.run(torch.zeros(0, 8), torch.zeros(0, dtype=torch.int32))
    assert (tuple(index.shape), tuple(selected.shape)) == ((0, 4), (0, 0))
    assert machine(plan).jitted._cache_size() == 0


def test_a_dynamic_shape_is_refused() -> None:
    with pytest.raises(ContractError) as error:
        refuse_dynamic(topk_select, {"T": "s0", "L": 64})
    assert str(error.value) == (
        "topk_select: T=s0 is a dynamic shape, and a TPU program is compiled for one shape: pass sizes that are "
        "numbers, padded to Limits.row_buckets; or trace plan.op"
    )


@pytest.mark.usefixtures("interpreted")
def test_what_is_said_of_a_dynamic_shape_can_be_done() -> None:
    plan = selection()
    scores, lengths = torch.randn(3, 8), torch.full((3,), 8, dtype=torch.int32)
    traced = make_fx(lambda s, n: plan.op(s, n)[0], tracing_mode="symbolic")(scores, lengths)
    more = torch.randn(5, 8)
    assert traced(more, torch.full((5,), 8, dtype=torch.int32)).tolist() == best(more)


def test_a_topology_that_does_not_exist_is_refused_with_one_that_does() -> None:
    with pytest.raises(SelectionError) as error:
        aot.topology("tpu7x:3x5x7")
    assert "tpu7x:3x5x7 is no topology that libtpu knows" in str(error.value)
    assert str(error.value).endswith("the smallest of tpu7x is tpu7x:2x2x1")
    with pytest.raises(UnknownNameError, match="unknown TPU generation 'v7x'"):
        aot.topology("v7x:2x2x1")


def test_sparse_core_on_v5e_is_refused_before_anything_is_compiled() -> None:
    with pytest.raises(SelectionError, match="v5e has no SparseCore"):
        aot.compile_for("v5e", lambda x: x, [((8,), "float32")], ("sparse_core",))


def test_a_block_far_beyond_the_cache_is_none_whatever_its_slot_would_wrap_to() -> None:
    """On a device nothing renumbers names before the program: 2^26 blocks of 64 are slot 0 in 32 bits."""
    spec = SparseMLASpec(
        num_heads=1, latent="latent.bf16", page=64, topk=4, index_space="local", out_dtype="float32"
    )
    given = {
        "q": torch.randn(1, 1, 576).bfloat16(),
        "cache": torch.zeros(1, 64 * 1152, dtype=torch.uint8),
        "indices": torch.arange(4, dtype=torch.int32)[None],
        "block_table": torch.tensor([[1 << 26]], dtype=torch.int32),
        "row_req": torch.zeros(1, dtype=torch.int32),
    }
    sizes = {name: torch.ones(1, dtype=torch.int32) for name in ("size_R", "size_blocks")}
    found, lse = bridge.JaxCPU(attend, spec, sparse_mla).run(given | sizes)
    assert lse.tolist() == [[-float("inf")]]
    assert not found.any()
