"""What plans do on an accelerator that no CPU can show: the device's own check, capture, shapes under tracing."""

from __future__ import annotations

import pytest
import torch

import kimi_hal as hal
from inputs import example
from kimi_hal.dispatch.capture import tensors_of
from kimi_hal.errors import ContractError
from kimi_hal.ops import OPERATORS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on_device(value):
    if isinstance(value, list):
        return [on_device(inner) for inner in value]
    return value.cuda() if isinstance(value, torch.Tensor) else value


@pytest.fixture
def planned(plugins, monkeypatch):
    """Return a function that plans an example for the device with the reference, and moves its operands there."""
    monkeypatch.setenv("KIMI_HAL_BACKEND", "reference")

    def plan(name):
        spec, limits, args, _ = example(name)
        return hal.plan(name, spec, limits, device="cuda"), [on_device(a) for a in args]

    return plan


def same(a, b):
    pairs = zip(tensors_of([a]), tensors_of([b]), strict=True)
    return all(
        torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8)) for x, y in pairs
    )


@pytest.mark.parametrize("name", OPERATORS)
def test_the_torch_operator_gives_the_bits_of_run(planned, name):
    plan, args = planned(name)
    expected, written = plan.run(*args), args
    plan, args = planned(name)
    assert same(plan.op(*args), expected)
    assert same(args, written)


@pytest.mark.parametrize("name", ["store_latent", "sparse_mla", "moe_experts", "kda_commit"])
def test_inductor_takes_it(planned, name):
    plan, args = planned(name)
    expected, written = plan.run(*args), args
    plan, args = planned(name)
    torch._dynamo.reset()
    assert same(torch.compile(lambda *operands: plan.op(*operands), fullgraph=True)(*args), expected)
    assert same(args, written)


def test_operands_on_the_host_are_refused(planned):
    plan, args = planned("merge_attn_states")
    with pytest.raises(ContractError, match="lses is on cpu, this plan is for cuda"):
        plan.run(args[0], args[1].cpu())
    with pytest.raises(ContractError, match="outs is on cpu, this plan is for cuda"):
        plan.run(args[0].cpu(), args[1].cpu())


def test_a_checked_call_is_refused_under_capture(planned, monkeypatch):
    monkeypatch.setenv("KIMI_HAL_CHECK", "args")
    plan, args = planned("merge_attn_states")
    plan.run(*args)
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(ContractError, match="which a call captured into a graph does not have"),
        torch.cuda.graph(graph),
    ):
        plan.run(*args)


def test_buffers_are_made_on_the_device(planned):
    plan, _ = planned("sparse_mla")
    assert plan.new_workspace().device.type == "cuda"
