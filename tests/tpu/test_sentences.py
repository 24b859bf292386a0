"""What a caller is told who asks a TPU for what it has not: sizes, generations, versions, a device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import kimi_hal as hal
from kimi_hal.dispatch.contract import Probe, Target
from kimi_hal.dispatch.loader import resolve
from kimi_hal.errors import ContractError, PlanError, SelectionError, ToolMissingError, UnknownNameError
from kimi_hal.ops.spec import Limits
from kimi_hal.ops.topk_merge import TopKSpec
from kimi_hal_tpu import buckets, generations, plugin, requirements
from kimi_hal_tpu.device import Device
from kimi_hal_tpu.pallas import bridge as simulator
from kimi_hal_tpu.pallas_claims import PALLAS
from kimi_hal_tpu.xla import bridge


def test_rows_outside_every_bucket_name_the_buckets() -> None:
    limits = Limits(max_rows=64, max_reqs=8, row_buckets=(8, 64))
    assert [buckets.fit("kda_decode", "T", n, buckets.of_rows(limits)) for n in (0, 8, 9)] == [8, 8, 64]
    with pytest.raises(ContractError) as error:
        buckets.fit("kda_decode", "T", 65, buckets.of_rows(limits))
    assert str(error.value) == (
        "kda_decode: T=65 is in no bucket; this plan compiles for 8, 64. Plan with Limits(row_buckets=…) that hold "
        "it, and pad to one: a length of 0 or an index of −1 marks a padded row"
    )


def test_on_the_device_rows_must_be_a_bucket() -> None:
    buckets.exact("kda_decode", "T", 64, (8, 64))
    with pytest.raises(ContractError, match="T=9 is in no bucket; this plan compiles for 8, 64"):
        buckets.exact("kda_decode", "T", 9, (8, 64))


def test_on_the_device_as_many_rows_as_the_plan_has_are_one_of_its_sizes() -> None:
    assert buckets.on_device(Limits(max_rows=100, max_reqs=8)) == (8, 16, 32, 64, 100)
    assert buckets.on_device(Limits(max_rows=4, max_reqs=4)) == (4,)
    assert buckets.on_device(Limits(max_rows=64, max_reqs=8)) == (8, 16, 32, 64)
    assert buckets.on_device(Limits(max_rows=16, max_reqs=8, row_buckets=(4, 12))) == (4, 12)
    assert buckets.on_device(None) == ()


def test_without_buckets_they_are_powers_of_two_up_to_the_most_rows() -> None:
    assert buckets.of_rows(Limits(max_rows=100, max_reqs=8)) == (8, 16, 32, 64, 128)
    assert buckets.of_rows(Limits(max_rows=0, max_reqs=0)) == (8,)


def test_no_program_is_for_0_rows() -> None:
    assert buckets.of_rows(Limits(max_rows=8, max_reqs=8, row_buckets=(0, 8))) == (8,)
    assert buckets.of_rows(Limits(max_rows=8, max_reqs=8, row_buckets=(0,))) == (1,)


def test_a_generation_that_does_not_exist_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError) as error:
        generations.get("v7x:2x2x1")
    assert "unknown TPU generation 'v7x'" in str(error.value)
    assert "v5e" in str(error.value)


def test_v5e_has_no_sparse_cores() -> None:
    with pytest.raises(SelectionError) as error:
        generations.require("v5e:2x2", ("sparse_core",))
    assert str(error.value) == (
        "v5e has no SparseCore, which selection and gather by Pallas kernels need; it is on v5p, v6e, tpu7x. "
        "Take tpu.xla, which selects and gathers on TensorCore"
    )


def test_float4_is_multiplied_by_tpu7x_alone() -> None:
    assert generations.require("tpu7x", ("float4", "sparse_core")).topology == "tpu7x:2x2x1"
    with pytest.raises(SelectionError) as error:
        generations.require("v6e", ("float4",))
    assert str(error.value) == (
        "v6e has no float4 MXU, which float4 products need; it is on tpu7x. Dequantise to bfloat16, which is exact"
    )


def test_a_need_that_no_generation_knows_names_those_that_there_are() -> None:
    for needs in (("sparsecore",), "sparsecore"):
        with pytest.raises(UnknownNameError) as error:
            generations.require("v6e", needs)
        assert str(error.value) == (
            "unknown unit of a TPU 'sparsecore'; did you mean 'sparse_core'? Known: float4, sparse_core"
        )
    assert generations.require("tpu7x", "float4").name == "tpu7x"


@pytest.mark.parametrize(
    ("variable", "becomes"),
    [
        ("XLA_USE_BF16", "float32 would be computed as bfloat16"),
        ("XLA_DOWNCAST_BF16", "float32 would be computed as bfloat16"),
        ("XLA_USE_32BIT_LONG", "int64 would have 32 bits"),
    ],
)
def test_types_other_than_a_programs_own_are_refused(
    variable: str, becomes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "0")
    requirements.check_torch_xla("2.9.0", "2.9.1")
    monkeypatch.setenv(variable, "1")
    with pytest.raises(PlanError) as error:
        requirements.check_torch_xla("2.9.0", "2.9.1")
    assert str(error.value) == f"{variable}=1: {becomes} by torch-xla, in silence: unset {variable}"


@pytest.mark.parametrize("device", ["TPU", "", "cpu", "CUDA"])
def test_an_interpreter_that_is_not_torch_xlas_cpu_is_refused(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    bridge.check_interpreter("topk_select")
    bridge.check_interpreter("topk_select")
    monkeypatch.setenv("PJRT_DEVICE", device)
    with pytest.raises(PlanError) as error:
        bridge.check_interpreter("topk_select")
    assert str(error.value) == (
        f"topk_select: interpreted programs run on torch-xla's CPU device, and PJRT_DEVICE={device} has torch-xla "
        "drive another one in this process: PJRT_DEVICE=CPU before torch_xla is used"
    )


def test_a_simulator_without_jaxs_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for platforms in ("", "cpu", "tpu,cpu"):
        monkeypatch.setenv("JAX_PLATFORMS", platforms)
        simulator.check_simulator("topk_select")
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    with pytest.raises(PlanError) as error:
        simulator.check_simulator("topk_select")
    assert str(error.value) == (
        "topk_select: the TPU simulator runs on jax's CPU, and JAX_PLATFORMS=tpu leaves it out: "
        "JAX_PLATFORMS=cpu before jax is used"
    )


@pytest.mark.parametrize(("kind", "arch"), [("TPU", "v5e"), ("CPU", "cpu")])
def test_a_device_is_of_the_generation_that_the_bus_shows(
    kind: str, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_xla = SimpleNamespace(runtime=SimpleNamespace(device_type=lambda: kind))
    monkeypatch.setattr(Device, "_xla", torch_xla)
    monkeypatch.setattr(plugin, "probe", lambda: Probe(present=True, arch="v5e", devices=("TPU v5e",)))
    assert Device().arch(0) == arch


def test_a_libtpu_of_another_jax_is_refused() -> None:
    requirements.check_jax("0.10.2", "0.0.42.1")
    requirements.check_jax("0.10.2", "")
    with pytest.raises(ToolMissingError) as error:
        requirements.check_jax("0.10.2", "0.0.52")
    assert str(error.value) == (
        "jax 0.10.2 goes with libtpu 0.0.42.*, this is libtpu 0.0.52, whose compiler fails on asynchronous operations "
        "of another jax: pip install 'libtpu==0.0.42.*'"
    )


def test_another_jax_is_refused() -> None:
    with pytest.raises(ToolMissingError) as error:
        requirements.check_jax("0.7.1", "0.0.20")
    assert str(error.value) == (
        "the Pallas kernels are written for jax 0.10, this is jax 0.7.1; they have theirs in an environment of its "
        "own: python -m nox -s tpu_jax --install-only (docs/tpu.md)"
    )


@pytest.mark.parametrize(
    ("there", "said"),
    [
        ({}, "no jax, no libtpu"),
        ({"jax": "0.7.1", "libtpu": "0.0.21"}, "jax 0.7.1, libtpu 0.0.21"),
        ({"jax": "0.10.2"}, "jax 0.10.2, no libtpu"),
    ],
)
def test_where_kernels_cannot_be_compiled_an_environment_is_named(
    monkeypatch: pytest.MonkeyPatch, there: dict[str, str], said: str
) -> None:
    monkeypatch.setattr(requirements, "installed", lambda name: there.get(name, ""))
    for item in PALLAS:
        if item.compile:
            with pytest.raises(ToolMissingError) as error:
                resolve(item.compile)(Target("v6e", arch="v6e"))
            assert str(error.value) == (
                f"tpu.pallas is compiled by jax 0.10 with its libtpu, here is {said}; they are in an environment of "
                "its own: python -m nox -s tpu_jax --install-only (docs/tpu.md)"
            )


def test_a_torch_xla_of_another_torch_is_refused() -> None:
    requirements.check_torch_xla("2.9.0", "2.9.1+cu128")
    with pytest.raises(ToolMissingError) as error:
        requirements.check_torch_xla("2.9.0", "2.13.0+cpu")
    assert str(error.value) == (
        "torch-xla 2.9.0 serves torch 2.9, this is torch 2.13.0+cpu: pip install -r requirements/tpu_xla.txt"
    )


@pytest.mark.parametrize("number", ["2.8", "2.10", "2.10.0rc1"])
def test_a_torch_xla_that_no_program_was_written_for_is_refused(number: str) -> None:
    said = (
        f"tpu.xla's programs are written for torch-xla 2.9, this is torch-xla {number}: "
        "pip install -r requirements/tpu_xla.txt"
    )
    with pytest.raises(ToolMissingError) as error:
        requirements.check_torch_xla(number, number)
    assert str(error.value) == said
    with pytest.raises(ToolMissingError) as error:
        requirements.check_custom_call(number, "0.7.1", "0.0.21")
    assert str(error.value) == said
    with pytest.raises(ImportError, match=r"^torch_xla is not installed: pip install"):
        requirements.check_custom_call("", "0.7.1", "0.0.21")


def test_a_jax_that_torch_xlas_libtpu_cannot_serve_is_refused() -> None:
    requirements.check_custom_call("2.9.0", "0.7.1", "")
    requirements.check_custom_call("2.9.0", "0.7.1", "0.0.21")
    with pytest.raises(ToolMissingError) as error:
        requirements.check_custom_call("2.9.0", "0.10.2", "0.0.21")
    assert str(error.value) == (
        "torch-xla 2.9.0 brings libtpu 0.0.21, which cannot serve jax 0.10.2: its kernels must be traced by jax 0.7: "
        "pip install -r requirements/tpu_xla.txt"
    )
    with pytest.raises(
        ImportError, match=r"jax is not installed; Pallas kernels reach torch-xla 2\.9\.0 through jax 0\.7"
    ):
        requirements.check_custom_call("2.9.0", "", "")


def test_a_libtpu_that_torch_xla_does_not_name_is_refused() -> None:
    with pytest.raises(ToolMissingError) as error:
        requirements.check_custom_call("2.9.0", "0.7.1", "0.0.42.1")
    assert str(error.value) == (
        "torch-xla 2.9.0 goes with libtpu 0.0.21, this is libtpu 0.0.42.1: pip install 'libtpu==0.0.21'"
    )


def test_torch_tpu_has_a_jax_and_a_libtpu_of_its_own() -> None:
    requirements.check_jax_op("0.2.0", "0.10.2", "0.0.52")
    with pytest.raises(ToolMissingError) as error:
        requirements.check_jax_op("0.2.0", "0.10.2", "0.0.42.1")
    assert str(error.value) == (
        "torch_tpu 0.2.0 needs libtpu 0.0.50 or newer, this is libtpu 0.0.42.1: pip install 'libtpu>=0.0.50'"
    )
    with pytest.raises(ToolMissingError) as error:
        requirements.check_jax_op("0.2.0", "0.7.1", "0.0.52")
    assert str(error.value) == (
        "the kernels were exported to torch_tpu 0.2.0 with jax 0.10, this is jax 0.7.1: pip install 'jax==0.10.*'"
    )
    with pytest.raises(ImportError, match=r"torch_tpu is not installed: pip install 'torch_tpu==0\.2"):
        requirements.check_jax_op("", "0.10.2", "")


def test_versions_of_libtpu_are_compared_as_versions() -> None:
    for newer in ("0.0.50", "0.0.50.post1", "0.0.51rc1", "0.1.dev20260929+nightly", "0.0.9999"):
        requirements.check_jax_op("0.2", "0.10.2", newer)
    for older in ("0.0.50rc1", "0.0.50.dev20260101", "0.0.9", "nightly", "1!0.1"):
        with pytest.raises(ToolMissingError) as error:
            requirements.check_jax_op("0.2", "0.10.2", older)
        assert str(error.value) == (
            f"torch_tpu 0.2 needs libtpu 0.0.50 or newer, this is libtpu {older}: pip install 'libtpu>=0.0.50'"
        )


def test_where_no_tpu_is_the_error_says_what_was_looked_for_and_what_to_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KIMI_HAL_BACKEND", "tpu")
    with pytest.raises(SelectionError) as error:
        hal.plan("topk_select", TopKSpec(topk=8), device="cpu")
    assert str(error.value) == (
        "topk_select: KIMI_HAL_BACKEND=tpu, but there is no device: no PCI device of vendor 0x1ae0 with a TPU's device "
        "id. KIMI_HAL_EXECUTION=interpreted runs its kernels on the CPU"
    )
