"""``KIMI_HAL_CHECK=args``: every value of every call is looked at first, by another function than the fast one."""

from __future__ import annotations

import inspect

import fake_kernels
import pytest
import torch
from fake_kernels import kernel

import kimi_hal as hal
from inputs import LIMITS, example
from kimi_hal.dispatch.contract import Probe
from kimi_hal.errors import ContractError
from kimi_hal.ops import OPERATORS


@pytest.fixture
def checked(plugins, monkeypatch):
    """Return a function that plans an operator's example under ``KIMI_HAL_CHECK=args``."""
    plugins.add("acme", *map(kernel, OPERATORS), torch_device="cpu", probe=Probe(present=True, arch="acme2"))
    fake_kernels.CONTEXTS.clear()
    monkeypatch.setenv("KIMI_HAL_CHECK", "args")

    def plan(name):
        spec, limits, args, _ = example(name)
        return hal.plan(name, spec, limits, device="cpu", implementation="acme.fast"), list(args)

    return plan


def reasons(plan, args, **kwargs):
    with pytest.raises(ContractError) as caught:
        plan.run(*args, **kwargs)
    return list(caught.value.reasons)


@pytest.mark.parametrize("name", OPERATORS)
def test_a_legal_call_gives_the_same_bits(checked, monkeypatch, name):
    plan, args = checked(name)
    result = plan.run(*args)
    monkeypatch.delenv("KIMI_HAL_CHECK")
    plan, args = checked(name)[0], example(name).args
    for a, b in zip(
        *(r if isinstance(r, tuple | list) else (r,) for r in (result, plan.run(*args))), strict=True
    ):
        assert a is b is None or torch.equal(a.float(), b.float())


@pytest.mark.parametrize("name", OPERATORS)
def test_it_is_another_function_of_the_same_signature(checked, name):
    plan, _ = checked(name)
    assert plan.run is not plan.built.run
    assert inspect.signature(plan.run) == OPERATORS[name].signature
    assert plan.run.__name__ == f"checked_{name}"


def test_all_values_that_are_wrong_are_told_together(checked):
    plan, args = checked("sparse_mla")
    args[2] = torch.full_like(args[2], 48)
    shared = torch.zeros(3 * 2 * 576, dtype=torch.bfloat16)
    args[0] = shared.view(3, 2, 576)
    found = reasons(plan, args, out=shared[: 3 * 2 * 512].view(3, 2, 512))
    assert found == ["out overlaps q", "indices holds 48, beyond the cache's tokens (48)"]


def test_nothing_runs_before_the_values_are_right(checked, monkeypatch):
    plan, args = checked("store_latent")
    before = args[3].clone()
    args[2] = torch.tensor([3, 3, 20])
    assert reasons(plan, args) == ["slots names 3 twice"]
    assert torch.equal(args[3], before)


def test_values_are_not_read_where_the_metadata_is_wrong(checked):
    plan, args = checked("store_latent")
    args[2] = args[2].int()
    assert reasons(plan, args) == ["slots must be int64, got int32"]


def test_in_off_mode_values_are_not_looked_at(checked, monkeypatch):
    monkeypatch.delenv("KIMI_HAL_CHECK")
    plan, args = checked("store_latent")
    args[2] = torch.tensor([3, 3, 20])
    assert plan.run(*args) is None


def test_a_test_entry_is_still_there(checked):
    plan, _ = checked("indexer_topk")
    assert not hasattr(plan.run, "return_scores")  # this plugin's function has none
    monkey = hal.plan("indexer_topk", plan.spec, LIMITS, device="cpu", implementation="reference.torch")
    assert callable(monkey.run.return_scores)


def test_a_traced_call_is_refused(checked):
    plan, args = checked("merge_attn_states")
    torch._dynamo.reset()
    traced = torch.compile(lambda *a: plan.run(*a), fullgraph=True, backend="eager")
    with pytest.raises(
        Exception,
        match=r"KIMI_HAL_CHECK=args reads values, which a call traced by torch\.compile does not have",
    ):
        traced(*args)


def test_the_torch_operator_is_checked_when_its_graph_runs(checked):
    plan, args = checked("store_latent")
    torch._dynamo.reset()
    step = torch.compile(lambda *a: plan.op(*a), fullgraph=True, backend="aot_eager")
    step(*args)
    args[2] = torch.tensor([3, 3, 20])
    with pytest.raises(ContractError, match="slots names 3 twice"):
        step(*args)


class Capturing:
    """Stands for a stream that is being captured."""

    @staticmethod
    def is_current_stream_capturing():
        return True


def test_a_captured_call_is_refused(checked, monkeypatch):
    from kimi_hal.dispatch import capture

    class Tensor:
        device, data_ptr = torch.device("xpu"), None

    monkeypatch.setattr(torch, "xpu", Capturing, raising=False)
    with pytest.raises(ContractError) as caught:
        capture.refuse("sparse_mla", {"q": [Tensor()]}, "KIMI_HAL_CHECK=args reads values")
    assert str(caught.value) == (
        "sparse_mla: KIMI_HAL_CHECK=args reads values, which a call captured into a graph does not have: "
        "bind an example before (plan.bind), or trace plan.op"
    )
