"""From torch-xla to Pallas kernels: what is traced is Mosaic's custom call, and who cannot be served is told."""

from __future__ import annotations

import base64
import os
import re
from typing import Any

import pytest
import torch

pytest.importorskip("torch_xla", reason="needs the environment of `nox -s tpu_xla`")
os.environ.setdefault("PJRT_DEVICE", "CPU")

import jax
import torch_xla
import torch_xla.debug.metrics as metrics
from jax._src.lib.mlir import ir
from kda_cases import Layer, Rows
from torch_xla.core import xla_model

import kimi_hal as hal
from kimi_hal import formats
from kimi_hal.dispatch.contract import BuildContext, Sizes
from kimi_hal.errors import ContractError, PlanError, SelectionError, ToolMissingError
from kimi_hal.ops import indexer as index_ops
from kimi_hal.ops.indexer import IndexerSpec
from kimi_hal.ops.kda import KDASpec
from kimi_hal.ops.operator import get
from kimi_hal.ops.spec import Limits
from kimi_hal.ops.topk_merge import TopKSpec
from kimi_hal_tpu import requirements
from kimi_hal_tpu.pallas import bridge, custom_call, indexer, mode, operands
from kimi_hal_tpu.pallas_claims import BY_TORCH_XLA
from kimi_hal_tpu.xla.sizes import sizes

LIMITS = Limits(max_rows=8, max_reqs=8, rows_per_req=4, row_buckets=(2, 8))
SPEC = KDASpec(num_heads=2, head_dim=128, checkpoints=False)
ONE = torch.tensor([0, 1], dtype=torch.int32)
INDEX = "index.fp8.e4m3fn.pow2.page64"


@pytest.fixture
def traced(tpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the bridge take torch-xla's device for a TPU; what is traced here is never run."""
    monkeypatch.setattr(custom_call, "on_tpu", lambda: True)


def plan(
    operator: str = "kda_decode", spec: Any = SPEC, *, name: str | None = "tpu.pallas", **more: Any
) -> Any:
    return hal.plan(operator, spec, LIMITS, device="xla", implementation=name, **more)


def moved(value: Any) -> Any:
    """Return operands on torch-xla's device: its CPU, since there is no other here."""
    return [moved(v) for v in value] if isinstance(value, (list, tuple)) else value.to(torch_xla.device())


def call(operator: str, count: int = 2) -> list[Any]:
    """Return a KDA operator's operands: two sequences of four rows, or ``count`` of one row in a decode."""
    layer, rows = Layer.random(SPEC), Rows.random(SPEC, count if operator == "kda_decode" else 8)
    qkv, gate = (rows.q, rows.k, rows.v), (rows.raw_g, rows.raw_beta, layer.A_log, layer.dt_bias)
    state, conv, cut = layer.pool(count), layer.conv_pool(2), torch.tensor([0, 4, 8], dtype=torch.int32)
    records = torch.zeros(2, sizes(SPEC, LIMITS, "").records, dtype=torch.uint8)
    given: dict[str, tuple[Any, ...]] = {
        "kda_prefill": (*qkv, *gate, state, ONE, cut),
        "kda_decode": (*qkv, *gate, state, torch.arange(count, dtype=torch.int32)),
        "kda_verify": (rows.x, layer.weight, *gate, conv, state, ONE, cut, records),
        "kda_commit": ([conv], [state], [records], [layer.A_log], [layer.dt_bias], ONE, ONE + 1),
    }
    return list(moved(given[operator]))


def kernels(text: str) -> list[bytes]:
    """Return the Mosaic modules in StableHLO."""
    assert "@tpu_custom_call" in text
    return [base64.b64decode(body) for body in re.findall(r"\\22body\\22: \\22([A-Za-z0-9+/=]+)\\22", text)]


def version(kernel: bytes) -> int:
    """Return which version of Mosaic's format a module is written in."""
    context = ir.Context()
    context.allow_unregistered_dialects = True
    module = ir.Module.parse(kernel, context)
    return ir.IntegerAttr(module.operation.attributes["stable_mosaic.version"]).value


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("operator", sorted(BY_TORCH_XLA))
def test_a_plan_for_a_tpu_traces_stablehlo_with_the_custom_call(operator: str) -> None:
    pair = {"pair": plan("kda_verify")} if operator == "kda_commit" else {}
    found, given = plan(operator, **pair), call(operator)
    out = found.run(*given)
    args = get(operator).args
    written = [value for name, value in zip(args, given, strict=False) if args[name].mutated]
    tensors = [t for value in written for t in (value if isinstance(value, list) else [value])]
    text = xla_model.get_stablehlo([*tensors, *([] if out is None else [out])])
    # libtpu 0.0.21 reads up to version 7; what jax 0.7.1 writes for a libtpu of its own day is version 8.
    assert {version(kernel) for kernel in kernels(text)} == {7}


@pytest.mark.usefixtures("traced")
def test_no_operand_leaves_the_trace_and_a_bucket_is_lowered_once() -> None:
    found = plan()
    machine = found.run.__globals__["call"].machine
    calls = call("kda_decode", 8), call("kda_decode", 2), call("kda_decode", 8)
    metrics.clear_all()
    counts = []
    for one in calls:
        found.run(*one)
        counts.append(len(machine.computations))
    assert counts == [1, 2, 2]
    assert [name for name in metrics.counter_names() if name.startswith("aten::")] == []


@pytest.mark.usefixtures("traced")
def test_sequences_of_one_bucket_share_a_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom_call.CustomCall, "cut", lambda machine: None)  # no kernel runs here
    found, (*rows, state, _, _) = plan("kda_prefill"), call("kda_prefill")
    machine = found.run.__globals__["call"].machine
    state, counts = moved(Layer.random(SPEC).pool(8)), []
    for count in (5, 6, 8, 7, 4):
        cuts = torch.linspace(0, 8, count + 1).int()
        found.run(*rows, state, *moved([torch.arange(count, dtype=torch.int32), cuts]))
        counts.append(len(machine.computations))
    assert counts == [1, 1, 1, 1, 2]


@pytest.mark.usefixtures("traced")
def test_a_given_buffer_is_written_in_the_trace() -> None:
    buffer = torch.zeros(2, 2, 128, dtype=torch.bfloat16, device=torch_xla.device())
    assert plan().run(*call("kda_decode"), out=buffer) is buffer
    assert "@tpu_custom_call" in xla_model.get_stablehlo([buffer])


def test_fp8_stays_what_it_is_and_other_sizes_than_rows_are_padded_and_cut_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuts: list[int] = []
    fmt, spec = formats.index(INDEX), IndexerSpec(index=INDEX, num_heads=32)
    monkeypatch.setattr(custom_call.CustomCall, "cut", lambda machine: cuts.append(len(machine.computations)))
    machine = custom_call.CustomCall(indexer.indexer_logits, spec, index_ops.indexer_logits, "v6e")
    context = BuildContext(
        "indexer_logits", spec, LIMITS, "xla", "v6e", Sizes(), None, None, lambda **given: None, {}
    )
    run = bridge.StaticCall(index_ops.indexer_logits, context, machine, coded=True).function()
    table = torch.tensor([[1, 0, 2]], dtype=torch.int32)
    rows, lengths = torch.zeros(2, dtype=torch.int32), torch.full((2,), 130, dtype=torch.int32)
    query = torch.randn(2, 32, 128).to(torch.float8_e4m3fn), torch.zeros(2, 32, 0, dtype=torch.uint8)
    cache = torch.zeros(3, fmt.page_bytes, dtype=torch.uint8)
    given = moved((*query, torch.rand(2, 32), cache, table, rows, lengths))
    metrics.clear_all()
    scores = run(*given)
    assert [name for name in metrics.counter_names() if name.startswith("aten::")] == []
    assert cuts == [0, 1]
    text = xla_model.get_stablehlo([scores])
    assert len(kernels(text)) == 1
    assert "tensor<2x32x128xf8E4M3FN>" in text


@pytest.mark.usefixtures("traced")
def test_rows_that_are_no_bucket_are_refused_on_the_device() -> None:
    with pytest.raises(ContractError, match="T=3 is in no bucket; this plan compiles for 2, 8"):
        plan().run(*call("kda_decode", 3))


@pytest.mark.usefixtures("traced")
def test_no_rows_need_neither_a_bucket_nor_a_computation() -> None:
    found = plan()
    assert tuple(found.run(*call("kda_decode", 0)).shape) == (0, 2, 128)
    assert found.run.__globals__["call"].machine.computations == {}


@pytest.mark.usefixtures("traced")
def test_without_a_name_the_traced_program_goes_first() -> None:
    assert plan(name=None).name == "tpu.xla"


@pytest.mark.usefixtures("traced")
def test_torch_xla_that_drives_no_tpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom_call, "on_tpu", lambda: torch_xla.runtime.device_type() == "TPU")
    with pytest.raises(PlanError) as error:
        plan()
    assert str(error.value) == (
        "kda_decode: torch-xla drives no TPU here (an importable libtpu is none), and Mosaic's kernels run on "
        "nothing else; KIMI_HAL_OPS=kda_decode=tpu.xla takes the program that torch-xla traces"
    )


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    ("operator", "spec"),
    [("topk_select", TopKSpec(topk=4)), ("indexer_logits", IndexerSpec(index=INDEX, num_heads=32))],
)
def test_what_torch_xlas_jax_or_libtpu_cannot_make_says_which_jax_does(operator: str, spec: Any) -> None:
    with pytest.raises(SelectionError) as error:
        plan(operator, spec)
    assert error.value.refusals["tpu.pallas"] == ("jax 0.7.1 is installed; it needs jax>=0.10,<0.11",)


@pytest.mark.parametrize(
    ("operator", "sentence"),
    [
        (
            "topk_select",
            "topk_select: a part of tpu.pallas runs on SparseCore, which needs jax ≥ 0.10 "
            "(jax.experimental.pallas.tpu_sc); torch-xla 2.9.0 brings jax 0.7.1. Take tpu.xla, which selects and "
            "gathers on TensorCore",
        ),
        (
            "moe_experts",
            "moe_experts: tpu.pallas copies parts of tiles, which needs jax ≥ 0.10 and its libtpu; torch-xla 2.9.0 "
            "brings libtpu 0.0.21. KIMI_HAL_OPS=moe_experts=tpu.xla takes the program that torch-xla traces",
        ),
    ],
)
def test_a_kernel_that_is_built_all_the_same_says_so_too(operator: str, sentence: str) -> None:
    context = BuildContext(
        operator, None, LIMITS, "xla", "v6e", Sizes(), None, None, lambda **given: None, {}
    )
    with pytest.raises(ToolMissingError) as error:
        bridge.build(context)
    assert str(error.value) == sentence


def test_a_launch_on_sparse_core_says_so() -> None:
    with pytest.raises(ToolMissingError, match=r"^gather_rows runs on SparseCore, which needs jax ≥ 0"):
        mode.Mode().on_subcores(lambda *refs: None, jax.ShapeDtypeStruct((128,), "int32"), [], "gather_rows")


@pytest.mark.usefixtures("traced")
def test_a_jax_that_torch_xlas_libtpu_cannot_serve_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    own = requirements.installed
    monkeypatch.setattr(requirements, "installed", lambda name: "0.10.2" if name == "jax" else own(name))
    sentence = r"torch-xla 2\.9\.0 brings libtpu 0\.0\.21, which cannot serve jax 0\.10\.2"
    with pytest.raises(ToolMissingError, match=sentence):
        plan()


def test_operands_are_a_list_of_tensors_and_what_is_fixed() -> None:
    states, size = [torch.zeros(1), torch.ones(1)], torch.tensor([7], dtype=torch.int32)
    form, tensors = operands.split({"q": torch.zeros(2), "states": states, "size_R": size, "total": 3})
    assert [t.tolist() for t in tensors] == [[0, 0], [0], [1], [7]]
    assert list(form.each) == ["q", "states", "states", "size_R"]
    assert form.constants == (("total", 3),)
    assert form.given("abcd") == {"q": "a", "states": ["b", "c"], "size_R": "d"}
    assert operands.plain(torch.tensor([1 << 40, -1])).tolist() == [2**31 - 1, -1]
    assert operands.plain(torch.tensor([True])).dtype == torch.uint8
