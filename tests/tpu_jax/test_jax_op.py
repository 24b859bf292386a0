"""From torch_tpu's tensors to Pallas kernels, with a stand-in: there is no wheel for this Python and no device here.

The stand-in has the signature of ``torch.tpu.pallas.jax_op`` 0.2.0 and does with a program what that does before it
compiles: it reads the annotations, exports for a TPU, and makes a torch operator of it. Its results are zeros.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("jax", reason="needs the environment of `nox -s tpu_jax`")

import jax
import jax.export

import kimi_hal as hal
from kimi_hal.dispatch.contract import Probe
from kimi_hal.errors import ToolMissingError
from kimi_hal.ops.spec import Limits
from kimi_hal.ops.topk_merge import TopKSpec, topk_select
from kimi_hal_tpu import plugin, requirements
from kimi_hal_tpu.pallas import jax_op, topk_merge
from kimi_hal_tpu.torch_tpu import Device

LIMITS = Limits(max_rows=4, max_reqs=4, row_buckets=(4,))
#: Rows, columns, and columns before padding of calls.
SIZES = ((4, 256, 256), (4, 256, 200), (4, 256, 201), (8, 256, 256), (4, 384, 300))
VERSIONS = {"torch_tpu": "0.2.0", "libtpu": "0.0.52"}


@dataclass
class StandIn:
    """What was registered, and the modules that were exported."""

    modules: dict[str, list[str]] = field(default_factory=dict)

    def jax_op(
        self,
        name: str,
        fn: Any = None,
        /,
        *,
        donate_argnums: Sequence[int] | None = None,
        mesh: Any = None,
        input_partition_specs: Any = None,
        output_partition_specs: Any = None,
    ) -> Any:
        signature = inspect.signature(inspect.unwrap(fn), eval_str=True)
        assert [p.annotation for p in signature.parameters.values()] == [list[jax.Array]]
        assert signature.return_annotation == list[jax.Array]
        checks = [jax.export.DisabledSafetyCheck.custom_call("ALL")]
        export = jax.export.export(jax.jit(fn, keep_unused=True), platforms=["tpu"], disabled_checks=checks)

        def kernel(arrays: list[torch.Tensor]) -> list[torch.Tensor]:
            given = [
                jax.ShapeDtypeStruct(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in arrays
            ]
            found = export(given)
            self.modules.setdefault(name, []).append(found.mlir_module())
            return [torch.zeros(a.shape, dtype=getattr(torch, str(a.dtype))) for a in found.out_avals]

        return torch.library.custom_op(name, kernel, mutates_args=(), schema="(Tensor[] arrays) -> Tensor[]")


@pytest.fixture
def torch_tpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    stand_in, own = StandIn(), requirements.installed
    torch.utils.rename_privateuse1_backend("tpu")  # as torch_tpu does; a process can do it once
    monkeypatch.setitem(sys.modules, "torch_tpu", ModuleType("torch_tpu"))
    monkeypatch.setattr(torch, "tpu", SimpleNamespace(pallas=stand_in), raising=False)
    monkeypatch.setattr(requirements, "installed", lambda name: VERSIONS.get(name) or own(name))
    monkeypatch.setattr(plugin, "probe", lambda: Probe(present=True, arch="tpu7x", devices=("TPU tpu7x",)))
    monkeypatch.setenv("KIMI_HAL_BACKEND", "tpu")
    jax_op.registered.cache_clear()
    yield stand_in
    jax_op.registered.cache_clear()


def test_a_plan_on_torch_tpus_device_is_an_operator_of_its(torch_tpu: StandIn) -> None:
    plan = hal.plan("topk_select", TopKSpec(topk=5), LIMITS, device="tpu")
    machine = plan.run.__globals__["call"].machine
    assert (plan.name, type(machine)) == ("tpu.pallas", jax_op.JaxOp)
    operands = {"scores": torch.randn(4, 256), "row_len": torch.full((4,), 256, dtype=torch.int32)}
    index, _ = machine.run(operands | {"size_L": torch.tensor([256], dtype=torch.int32)})
    assert (tuple(index.shape), index.dtype) == ((4, 5), torch.int32)
    ((name, (module,)),) = torch_tpu.modules.items()
    assert name.startswith("kimi_hal_tpu::topk_select_")
    assert module.count("@tpu_custom_call") == 1
    assert "sparse_core" in module


def test_a_program_is_registered_once_for_what_is_fixed_of_a_call(torch_tpu: StandIn) -> None:
    machine = jax_op.JaxOp(topk_merge.topk_select, TopKSpec(topk=5), topk_select, "v6e")
    for rows, width, real in SIZES:
        operands = {"scores": torch.randn(rows, width), "row_len": torch.zeros(rows, dtype=torch.int32)}
        machine.run(operands | {"size_L": torch.tensor([real], dtype=torch.int32)})
    assert [len(modules) for modules in torch_tpu.modules.values()] == [len(SIZES)]


def test_another_torch_tpu_is_refused(torch_tpu: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VERSIONS, "torch_tpu", "0.3.1")
    with pytest.raises(ToolMissingError) as error:
        hal.plan("topk_select", TopKSpec(topk=5), LIMITS, device="tpu", implementation="tpu.pallas")
    assert str(error.value) == (
        "the bridge to torch_tpu is written for 0.2, this is torch_tpu 0.3.1, whose jax_op may differ: "
        "pip install 'torch_tpu==0.2.*'"
    )
    assert torch_tpu.modules == {}


@pytest.mark.usefixtures("torch_tpu")
def test_the_device_is_torch_tpus_where_it_is_installed() -> None:
    backend = plugin.kimi_hal_backend()
    assert (backend.torch_device, backend.device) == ("tpu", "kimi_hal_tpu.torch_tpu:Device")


@pytest.mark.parametrize("arch", ["v5p", "v6e", "tpu7x"])
def test_a_chip_is_known_by_its_name(arch: str) -> None:
    from jax.experimental.pallas import tpu_sc

    with jax.sharding.use_abstract_mesh(jax_op.chip(arch)):
        assert tpu_sc.get_sparse_core_info().num_subcores == 16


@pytest.mark.usefixtures("torch_tpu")
def test_the_devices_hooks_go_through_torchs_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []
    accelerator = SimpleNamespace(
        synchronize=lambda: waited.append("synchronize"), get_memory_info=lambda: (3 << 30, 32 << 30)
    )
    monkeypatch.setattr(torch, "accelerator", accelerator)
    device = Device()
    assert device.time(lambda: waited.append("call")) > 0
    assert waited == ["synchronize", "call", "synchronize"]
    assert device.memory() == (3 << 30, 32 << 30)
    assert (device.arch(0), device.capture(lambda: None)) == ("tpu7x", None)
    assert device.versions().items() >= {"torch_tpu": "0.2.0", "libtpu": "0.0.52"}.items()
