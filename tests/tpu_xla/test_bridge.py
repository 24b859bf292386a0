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
from kda_cases import Layer, Rows
from torch_xla.core import xla_model

import kimi_hal as hal
from kimi_hal import formats
from kimi_hal.dispatch.contract import Probe
from kimi_hal.errors import ContractError, PlanError, SelectionError, ToolMissingError
from kimi_hal.ops.indexer import IndexerSpec
from kimi_hal.ops.kda import KDASpec
from kimi_hal.ops.moe import MoESpec
from kimi_hal.ops.operator import get
from kimi_hal.ops.spec import Limits
from kimi_hal.ops.topk_merge import TopKSpec
from kimi_hal_tpu import plugin, requirements
from kimi_hal_tpu.pallas import custom_call, mode, operands
from kimi_hal_tpu.pallas_claims import PALLAS
from kimi_hal_tpu.xla.sizes import sizes

FP8 = "index.fp8.e4m3fn.pow2.page64"
LIMITS = Limits(max_rows=4, max_reqs=2, row_buckets=(2, 4))


@pytest.fixture
def tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a TPU, as far as planning can see; what is traced here is never run."""
    seen = Probe(present=True, arch="tpu7x", devices=("TPU tpu7x",), facts={"libtpu": "0.0.21"})
    monkeypatch.setattr(plugin, "probe", lambda: seen)
    monkeypatch.setattr(custom_call, "on_tpu", lambda: True)
    monkeypatch.setenv("KIMI_HAL_BACKEND", "tpu")


def scores_of(rows: int) -> tuple[Any, ...]:
    """Return operands of ``indexer_logits`` on torch-xla's device: its CPU, since there is no other here."""
    fmt = formats.index(FP8)
    q = torch.randn(rows, 32, 128).to(torch.float8_e4m3fn)
    cache = torch.zeros(24, fmt.page_bytes, dtype=torch.uint8)
    table = torch.arange(32, dtype=torch.int32).view(2, 16)
    lengths = torch.full((rows,), 70, dtype=torch.int32)
    none = torch.zeros(rows, 32, 0, dtype=torch.uint8)
    given = (q, none, torch.rand(rows, 32), cache, table, torch.zeros_like(lengths), lengths)
    device = torch_xla.device()
    return tuple(t.to(device) for t in given)


def plan(implementation: str | None = "tpu.pallas") -> Any:
    spec = IndexerSpec(index=FP8, num_heads=32)
    return hal.plan("indexer_logits", spec, LIMITS, device="xla", implementation=implementation)


def bodies(text: str) -> list[bytes]:
    """Return the Mosaic modules in StableHLO."""
    return [base64.b64decode(body) for body in re.findall(r"\\22body\\22: \\22([A-Za-z0-9+/=]+)\\22", text)]


@pytest.mark.usefixtures("tpu")
def test_a_plan_for_a_tpu_traces_stablehlo_with_the_custom_call() -> None:
    scores = plan().run(*scores_of(4))
    assert (scores.shape[0], scores.dtype) == (4, torch.float32)
    text = xla_model.get_stablehlo([scores])
    assert text.count("@tpu_custom_call") == 1
    assert "tensor<4x32x128xf8E4M3FN>" in text
    (kernel,) = bodies(text)
    assert kernel.startswith(b"ML\xefR")  # MLIR's own file format
    assert b"tpu.enqueue_dma" in kernel or b"enqueue_dma" in kernel  # pages stream in by DMA


@pytest.mark.usefixtures("tpu")
def test_no_operand_leaves_the_trace_and_a_bucket_is_lowered_once() -> None:
    found = plan()
    machine = found.run.__globals__["call"].machine
    calls = scores_of(4), scores_of(2), scores_of(4)
    metrics.clear_all()
    counts = []
    for one in calls:
        found.run(*one)
        counts.append(len(machine.computations))
    assert counts == [1, 2, 2]
    assert [name for name in metrics.counter_names() if name.startswith("aten::")] == []


@pytest.mark.usefixtures("tpu")
def test_a_given_buffer_is_written_in_the_trace() -> None:
    found = plan()
    width = found.run(*scores_of(2)).shape[1]
    buffer = torch.zeros(2, width, device=torch_xla.device())
    assert found.run(*scores_of(2), out=buffer) is buffer
    assert "@tpu_custom_call" in xla_model.get_stablehlo([buffer])


@pytest.mark.usefixtures("tpu")
def test_rows_that_are_no_bucket_are_refused_on_the_device() -> None:
    with pytest.raises(ContractError, match="T=3 is in no bucket; this plan compiles for 2, 4"):
        plan().run(*scores_of(3))


@pytest.mark.usefixtures("tpu")
def test_without_a_name_the_traced_program_goes_first() -> None:
    assert plan(None).name == "tpu.xla"


@pytest.mark.usefixtures("tpu")
def test_torch_xla_that_drives_no_tpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom_call, "on_tpu", lambda: torch_xla.runtime.device_type() == "TPU")
    with pytest.raises(PlanError) as error:
        plan()
    assert str(error.value) == (
        "indexer_logits: torch-xla drives no TPU here (an importable libtpu is none), and Mosaic's kernels run on "
        "nothing else; KIMI_HAL_OPS=indexer_logits=tpu.xla takes the program that torch-xla traces"
    )


@pytest.mark.usefixtures("tpu")
def test_a_kernel_of_sparse_core_says_which_jax_has_it() -> None:
    with pytest.raises(SelectionError) as error:
        hal.plan("topk_select", TopKSpec(topk=4), LIMITS, device="xla", implementation="tpu.pallas")
    assert error.value.refusals["tpu.pallas"] == ("jax 0.7.1 is installed; it needs jax>=0.10,<0.11",)


def test_a_kernel_of_sparse_core_that_is_launched_all_the_same_says_so_too() -> None:
    shape = jax.ShapeDtypeStruct((128,), "int32")
    with pytest.raises(ToolMissingError) as error:
        mode.Mode().on_subcores(lambda *refs: None, shape, [], "gather_rows")
    assert str(error.value) == (
        "gather_rows runs on SparseCore, which needs jax ≥ 0.10 (jax.experimental.pallas.tpu_sc); torch-xla 2.9.0 "
        "brings jax 0.7.1. Take tpu.xla, which selects and gathers on TensorCore"
    )


@pytest.mark.usefixtures("tpu")
def test_a_jax_that_torch_xlas_libtpu_cannot_serve_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    own = requirements.installed
    monkeypatch.setattr(requirements, "installed", lambda name: "0.10.2" if name == "jax" else own(name))
    with pytest.raises(
        ToolMissingError, match=r"torch-xla 2\.9\.0 brings libtpu 0\.0\.21, which cannot serve jax 0\.10\.2"
    ):
        plan()


def test_operands_are_a_list_of_tensors_and_what_is_fixed() -> None:
    states = [torch.zeros(1), torch.ones(1)]
    given = {
        "q": torch.zeros(2),
        "states": states,
        "size_R": torch.tensor([7], dtype=torch.int32),
        "total": 3,
    }
    form, tensors = operands.split(given)
    assert [t.tolist() for t in tensors] == [[0, 0], [0], [1]]
    assert list(form.each) == ["q", "states", "states"]
    assert form.constants == (("size_R", (7,)), ("total", 3))
    assert form.given("abc") == {"q": "a", "states": ["b", "c"]}
    assert operands.plain(torch.tensor([1 << 40, -1])).tolist() == [2**31 - 1, -1]
    assert operands.plain(torch.tensor([True])).dtype == torch.uint8


KDA_LIMITS = Limits(max_rows=8, max_reqs=2, rows_per_req=4, row_buckets=(2, 8))
SPEC = KDASpec(num_heads=2, head_dim=128, checkpoints=False)
EXPERTS = MoESpec(num_experts=8, num_local=8, topk=2, hidden=256, intermediate=256)
ONE = torch.tensor([0, 1], dtype=torch.int32)
WHERE = {"device": "xla", "implementation": "tpu.pallas"}
#: Operators whose kernels torch-xla's own jax is claimed to trace.
CLAIMED = [
    item.operator
    for item in PALLAS
    if "bridge" in item.build and any("torch_xla" in c.requires for c in item.capabilities)
]


def kda_call(operator: str) -> tuple[Any, tuple[Any, ...]]:
    """Return a plan of a KDA operator and its operands: two sequences of four rows, or of one in a decode."""
    layer, rows = Layer.random(SPEC), Rows.random(SPEC, 2 if operator == "kda_decode" else 8)
    qkv, gate = (rows.q, rows.k, rows.v), (rows.raw_g, rows.raw_beta, layer.A_log, layer.dt_bias)
    state, conv = layer.pool(2), layer.conv_pool(2)
    cut = torch.tensor([0, 4, 8], dtype=torch.int32)
    records = torch.zeros(2, sizes(SPEC, KDA_LIMITS, "").records, dtype=torch.uint8)
    operands: dict[str, tuple[Any, ...]] = {
        "kda_prefill": (*qkv, *gate, state, ONE, cut),
        "kda_decode": (*qkv, *gate, state, ONE),
        "kda_verify": (rows.x, layer.weight, *gate, conv, state, ONE, cut, records),
        "kda_commit": ([conv], [state], [records], [layer.A_log], [layer.dt_bias], ONE, ONE + 1),
    }
    pair = hal.plan("kda_verify", SPEC, KDA_LIMITS, **WHERE) if operator == "kda_commit" else None
    return hal.plan(operator, SPEC, KDA_LIMITS, **WHERE, pair=pair), operands[operator]


def experts_call() -> tuple[Any, tuple[Any, ...]]:
    """Return a plan of ``moe_experts`` and its operands."""
    found, draw = hal.plan("moe_experts", EXPERTS, KDA_LIMITS, **WHERE), torch.Generator().manual_seed(0)
    shapes = {"w13": (8, 512, 128), "w13_scale": (8, 512, 8), "w2": (8, 256, 128), "w2_scale": (8, 256, 8)}
    weights = found.weights(
        **{n: torch.randint(120, 130, s, dtype=torch.uint8, generator=draw) for n, s in shapes.items()}
    )
    ids = torch.randint(0, 8, (8, 2), dtype=torch.int32, generator=draw)
    return found, (torch.randn(8, 256).bfloat16(), torch.rand(8, 2), ids, list(weights))


def moved(value: Any) -> Any:
    return [moved(v) for v in value] if isinstance(value, list) else value.to(torch_xla.device())


@pytest.mark.usefixtures("tpu")
@pytest.mark.parametrize("operator", CLAIMED)
def test_a_kernel_that_is_claimed_for_it_is_traced_by_torch_xlas_own_jax(operator: str) -> None:
    calls = {"indexer_logits": lambda: (plan(), scores_of(4)), "moe_experts": experts_call}
    found, operands = calls[operator]() if operator in calls else kda_call(operator)
    operands = tuple(moved(value) for value in operands)
    out = found.run(*operands)
    args = get(operator).args
    written = [value for name, value in zip(args, operands, strict=False) if args[name].mutated]
    tensors = [t for value in written for t in (value if isinstance(value, list) else [value])]
    text = xla_model.get_stablehlo([*tensors, *([] if out is None else [out])])
    assert "@tpu_custom_call" in text
    assert all(body.startswith(b"ML\xefR") for body in bodies(text))
