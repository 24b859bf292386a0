"""Every implementation of this backend in one graph of ``torch.compile`` for all sizes, and in graphs of the device."""

from __future__ import annotations

import os

import pytest
import torch
from graph_calls import calls, fitting, poisoned, same, scratch
from recorded_device import RecordedDevice
from torch.fx.experimental import _config

from kimi_hal.dispatch.device import HostDevice, StreamDevice
from kimi_hal.ops import OPERATORS
from kimi_hal_conformance.calls import Subject
from kimi_hal_conformance.relations import captured
from kimi_hal_conformance.relations.ground import Ground
from kimi_hal_nvidia.adapters.claims import ADAPTERS
from kimi_hal_nvidia.implementations import IMPLEMENTATIONS

#: Operators of ranks are captured and compiled where there are several (``tests/parallel``); adapters need libraries.
ALONE = [
    i
    for i in IMPLEMENTATIONS
    if i.operator not in ("topk_merge", "all_gather") and "native" in i.execution and i not in ADAPTERS
]
#: The composite that is made of them.
DSA = "dsa_decode"
NATIVE = [
    *(pytest.param(i.operator, f"nvidia.{i.name}", id=f"{i.operator}-{i.name}") for i in ALONE),
    pytest.param(DSA, "nvidia.composed", id=f"{DSA}-composed"),
]
OURS = sorted({DSA, *(i.operator for i in ALONE)}, key=list(OPERATORS).index)
GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def of_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("KIMI_HAL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("KIMI_HAL_BACKEND", "reference")


def compiled_once(operator: str, implementation: str, device: str) -> None:
    """Compile a call once for all of its sizes, into given buffers; every result has the bits of ``run``."""
    case, plan = fitting(operator, implementation, device)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    step = torch.compile(lambda kw: plan.op(**kw), fullgraph=True, dynamic=True, backend=backend)
    for eager, traced in zip(calls(case, device), calls(case, device), strict=True):
        wanted, got = poisoned(plan, eager), poisoned(plan, traced)
        plan.run(**eager, **wanted, **scratch(plan))
        with _config.patch(use_duck_shape=False):  # as many pages as rows are no reason to tie the two
            step({**traced, **got, **scratch(plan)})
        assert same(wanted, got)
        assert same(eager, traced)  # caches and states that a call writes
    assert len(graphs) == 1


def replayed(operator: str, implementation: str, device: str, hooks: HostDevice | StreamDevice) -> None:
    """Capture at two sizes over padding, replay A, B, A, B, A with new data, as the suite does."""
    case, plan = fitting(operator, implementation, device)
    assert (
        list(captured.problems(Ground(case, Subject(implementation, device, hooks), 0, plan.properties)))
        == []
    )


@pytest.mark.parametrize("operator", OURS)
def test_the_reference_is_one_graph_for_every_size(of_reference: None, operator: str) -> None:
    compiled_once(operator, "reference.torch", "cpu")


def test_a_replay_of_the_reference_follows_new_data(of_reference: None) -> None:
    replayed("merge_attn_states", "reference.torch", "cpu", RecordedDevice())


@pytest.mark.parametrize(
    ("operator", "implementation"), [pytest.param(*p.values, id=p.id, marks=GPU) for p in NATIVE]
)
def test_a_kernel_is_one_graph_for_every_size(operator: str, implementation: str) -> None:
    compiled_once(operator, implementation, "cuda")


@pytest.mark.parametrize(
    ("operator", "implementation"), [pytest.param(*p.values, id=p.id, marks=GPU) for p in NATIVE]
)
def test_replays_of_a_kernel_follow_new_data(operator: str, implementation: str) -> None:
    replayed(operator, implementation, "cuda", StreamDevice())


def test_every_kernel_declares_capture() -> None:
    assert {c.properties.capture for i in ALONE for c in i.capabilities} == {"full"}
