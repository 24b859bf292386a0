"""Plugins from hostile hands: builders that exit, sizes that are none, domains in which nothing can be found."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from fake_plugins import LIMITS, SPEC, capability, implementation
from torch.utils._python_dispatch import TorchDispatchMode

import kimi_hal as hal
from kimi_hal.dispatch.contract import OneOf, Range, Sizes
from kimi_hal.errors import PluginError


def refused() -> str:
    with pytest.raises(PluginError) as error:
        hal.plan("sparse_mla", SPEC, LIMITS, device="cpu", implementation="acme.fast")
    return str(error.value)


@pytest.fixture
def kernels(monkeypatch) -> types.ModuleType:
    module = types.ModuleType("hostile_kernels")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit(), MemoryError(), RecursionError("deep")])
def test_a_builder_that_would_end_the_engine_is_a_plugin_error(plugins, kernels, error):
    def build(ctx):
        raise error

    kernels.build = build
    own = implementation(size="hostile_kernels:size")
    kernels.size = lambda spec, limits, arch: build(None)
    plugins.add("acme", own, torch_device="cpu")
    assert refused().startswith(f"plugin 'acme': hostile_kernels:size raised {type(error).__name__}: {error}")


def test_what_a_person_interrupts_stays_an_interrupt(plugins, kernels):
    def size(spec, limits, arch):
        raise KeyboardInterrupt

    kernels.size = size
    plugins.add("acme", implementation(size="hostile_kernels:size"), torch_device="cpu")
    with pytest.raises(KeyboardInterrupt):
        hal.plan("sparse_mla", SPEC, LIMITS, device="cpu", implementation="acme.fast")


def test_a_name_that_the_module_lacks_names_the_plugin(plugins, kernels):
    plugins.add("acme", implementation(size="hostile_kernels:sise"), torch_device="cpu")
    kernels.size = lambda spec, limits, arch: Sizes()
    said = "hostile_kernels:sise: module hostile_kernels has no 'sise'; did you mean 'size'?"
    assert refused() == f"plugin 'acme': {said}"


@pytest.mark.parametrize(
    ("sizes", "listed"),
    [
        (Sizes(workspace=-5), "workspace=-5"),
        (Sizes(workspace=2.5, step="x"), "workspace=2.5, step='x'"),  # type: ignore[arg-type]
        (Sizes(records=True), "records=True"),
    ],
)
def test_sizes_that_are_no_bytes_are_a_sentence(plugins, kernels, sizes, listed):
    kernels.size = lambda spec, limits, arch: sizes
    plugins.add("acme", implementation(size="hostile_kernels:size"), torch_device="cpu")
    said = f"hostile_kernels:size returned {listed}; sizes are whole bytes, 0 or more."
    assert refused() == f"plugin 'acme': {said}"


def test_memory_that_no_device_has_is_a_sentence(plugins, kernels):
    kernels.size = lambda spec, limits, arch: Sizes(persistent=1 << 60)
    plugins.add("acme", implementation(size="hostile_kernels:size"), torch_device="cpu")
    assert refused() == (
        "plugin 'acme': acme.fast keeps 1,152,921,504,606,846,976 bytes, which cpu does not have free; "
        "plan with smaller Limits."
    )


def test_memory_that_a_plan_keeps_is_zero_before_it_can_be_called(plugins, kernels):
    """Its calls may be on another stream than the one that planning makes it zero on."""
    done = []

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            done.append(func.overloadpacket)
            return func(*args, **(kwargs or {}))

    kernels.size = lambda spec, limits, arch: Sizes(persistent=32)
    plugins.add("acme", implementation(size="hostile_kernels:size"), torch_device="cpu")
    with Noted():
        plan = hal.plan("sparse_mla", SPEC, LIMITS, device="cpu", implementation="acme.fast")
    assert plan.built.context.persistent.tolist() == [0] * 32
    assert torch.ops.aten._local_scalar_dense in done


def test_memory_that_cannot_be_waited_for_is_a_sentence(plugins, kernels, monkeypatch):
    def captured(tensor):
        raise RuntimeError("operation not permitted when stream is capturing\nSearch for more")

    kernels.size = lambda spec, limits, arch: Sizes(persistent=32)
    plugins.add("acme", implementation(size="hostile_kernels:size"), torch_device="cpu")
    monkeypatch.setattr(torch.Tensor, "item", captured)
    assert refused() == (
        "plugin 'acme': acme.fast keeps 32 bytes, which could not be made zero on cpu (operation not permitted "
        "when stream is capturing); plan before a capture begins."
    )


@pytest.mark.parametrize(
    ("domain", "said"),
    [
        (OneOf(64), "OneOf takes a tuple of values, got int 64"),  # type: ignore[arg-type]
        (OneOf(()), "OneOf is empty; it covers nothing"),
        (Range("a", "b"), "Range takes a low number and one as high or higher, got 'a' and 'b'"),  # type: ignore[arg-type]
        (Range(9, 1), "Range takes a low number and one as high or higher, got 9 and 1"),
        (Range(1, float("nan")), "Range takes a low number and one as high or higher, got 1 and nan"),
        (Range(1, 9, multiple=0), "Range.multiple must be a whole number, 1 or more, got 0"),
    ],
)
def test_a_domain_in_which_nothing_can_be_found_is_a_sentence(plugins, domain, said):
    plugins.add("acme", implementation(capabilities=(capability(spec={"topk": domain}),)), torch_device="cpu")
    assert refused() == f"plugin 'acme': sparse_mla.fast: capabilities[0]: spec['topk']: {said}"


def test_of_very_many_problems_the_first_are_named(plugins):
    many = capability(spec={"num_heads": OneOf(tuple(range(129, 10_129)))})
    plugins.add("acme", implementation(capabilities=(many,)), torch_device="cpu")
    assert refused().endswith("spec['num_heads']: 148 is not 1 to 128; and 9980 more")
