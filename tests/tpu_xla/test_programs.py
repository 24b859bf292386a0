"""Traced programs: one compilation a bucket, nothing that leaves the trace, nothing whose shape depends on data."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("torch_xla", reason="needs the environment of `nox -s tpu_xla`")
os.environ.setdefault("PJRT_DEVICE", "CPU")

import torch_xla
import torch_xla.debug.metrics as metrics

import kimi_hal as hal
from kimi_hal.dispatch.contract import Probe
from kimi_hal.dispatch.device import HostDevice
from kimi_hal.errors import ContractError
from kimi_hal.ops.kda import KDASpec
from kimi_hal.ops.spec import Limits
from kimi_hal.ops.topk_merge import TopKSpec
from kimi_hal.reference.recurrence import gate
from kimi_hal_conformance import case as cases
from kimi_hal_conformance.calls import Subject
from kimi_hal_conformance.cases import load
from kimi_hal_conformance.execute import try_case
from kimi_hal_tpu import plugin, scales
from kimi_hal_tpu.xla import powers
from kimi_hal_tpu.xla.tracing import Traced, clamp, view_as

NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KIMI_HAL_EXECUTION", "interpreted")
    monkeypatch.setenv("KIMI_HAL_BACKEND", "tpu")


def compilations() -> int:
    data = metrics.metric_data("CompileTime")
    return int(data[0]) if data else 0


def test_rows_of_one_bucket_share_a_compilation() -> None:
    limits = Limits(max_rows=32, max_reqs=4, row_buckets=(4, 32))
    plan = hal.plan("topk_select", TopKSpec(topk=4), limits, device="cpu", implementation="tpu.xla")
    counts = []
    for rows, width in ((1, 100), (3, 128), (4, 77), (5, 100), (32, 65)):
        before = compilations()
        scores, lengths = torch.randn(rows, width), torch.full((rows,), width, dtype=torch.int32)
        index, _ = plan.run(scores, lengths)
        assert index.tolist() == scores.topk(4).indices.sort().values.tolist()
        counts.append(compilations() - before)
    assert counts == [1, 0, 0, 1, 0]


@pytest.mark.parametrize("place", ["cpu", "xla"])
def test_a_call_in_a_compiled_function_runs_between_its_graphs_whatever_the_shape(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if place == "xla":
        seen = Probe(present=True, arch="v6e", devices=("TPU v6e",), facts={})
        monkeypatch.setattr(plugin, "probe", lambda: seen)
        monkeypatch.setenv("KIMI_HAL_EXECUTION", "native")
    plan = hal.plan(
        "topk_select", TopKSpec(topk=4), Limits(max_rows=5, max_reqs=4, row_buckets=(3, 5)), device=place
    )
    compiled = torch.compile(lambda s, n: plan.run(s * 2, n)[0] + 1, dynamic=True, backend="eager")
    for rows in (3, 5):
        scores, lengths = torch.randn(rows, 8), torch.full((rows,), 8, dtype=torch.int32)
        index = compiled(scores.to(place), lengths.to(place)) - 1
        assert index.cpu().tolist() == scores.topk(4).indices.sort().values.tolist()


def test_operands_that_require_grad_are_taken_as_they_are() -> None:
    plan = hal.plan("topk_select", TopKSpec(topk=4, return_selected=True), device="cpu")
    scores, buffer = torch.randn(3, 8, requires_grad=True), torch.zeros(3, 4, requires_grad=True)
    index, selected = plan.run(scores, torch.full((3,), 8, dtype=torch.int32), scores_out=buffer)
    assert selected is buffer
    assert torch.equal(buffer.detach(), scores.detach().gather(1, index.long()))


def test_sequences_of_one_bucket_share_a_compilation() -> None:
    spec, limits = (
        KDASpec(num_heads=2, head_dim=8, gate="log"),
        Limits(max_rows=16, max_reqs=4, uniform=False),
    )
    plan = hal.plan("kda_prefill", spec, limits, device="cpu", implementation="tpu.xla")
    counts = []
    for cuts in ([0, 3, 7], [0, 8, 8], [0, 1, 5]):
        before = compilations()
        q, k, v = (torch.randn(cuts[-1], 2, 8).bfloat16() for _ in range(3))
        g, beta = -torch.rand(cuts[-1], 2, 8), torch.rand(cuts[-1], 2)
        ids, rows = torch.tensor([1, 0]).int(), torch.tensor(cuts).int()
        out = plan.run(q, k, v, g, beta, None, None, torch.zeros(2, 2, 8, 8), ids, rows)
        assert out.isfinite().all()
        counts.append(compilations() - before)
    assert counts == [1, 0, 0]


@pytest.mark.parametrize(
    "case",
    [
        "quantize_index_query/edges/values/index.mxfp4.page64",
        "store_index_keys/edges/slots/index.mxfp4.page64",
        "indexer_logits/edges/block-scales/key-0/index.mxfp4.page64",
        "indexer_logits/edges/block-scales/query-0/index.mxfp4.page64",
        "indexer_logits/edges/block-scales/key-0/index.fp8.e4m3fn.ue8m0x4.page64",
        "moe_experts/edges/smallest-scale/w13",
        "moe_experts/edges/smallest-scale/w2",
        "indexer_topk/slots",
        "store_latent/edges/slots/latent.nvfp4.352",
        "sparse_mla/edges/owner-of-3/rank2",
        "sparse_mla/edges/nan-beside-plus-inf",
        "sparse_mla/edges/infinite-query/latent.nvfp4.352",
        "sparse_mla/edges/no-key/k-scale-nan",
        "sparse_mla/edges/no-key/k-scale-inf",
        "topk_merge/edges/compact/one-rank-wins/world2-interleave1",
        "kda_conv/edges/padding-between/d60",
        "kda_prefill/small/none",
        "kda_commit/edges/checkpoints",
        "moe_route/edges/all-scores-0",
        "moe_experts/edges/crowded-expert",
    ],
)
def test_no_part_of_a_program_runs_on_the_host(case: str) -> None:
    """torch-xla counts what it computes on the host under the name that torch has for it."""
    load()
    metrics.clear_all()
    problems, _ = try_case(cases.get(case), Subject("tpu.xla", "cpu", HostDevice()), 0)[:2]
    assert not problems
    assert [name for name in metrics.counter_names() if name.startswith("aten::")] == []


@pytest.mark.parametrize("bound", [None, -5.0])
def test_a_gate_far_out_is_its_limit_and_never_nan(bound: float | None) -> None:
    spec = KDASpec(num_heads=3, head_dim=7, lower_bound=bound)
    raw = torch.tensor([-90.0, -200.0, 0.0, -0.0, 90.0, 3e38, -3e38]).expand(1, 3, 7).bfloat16().contiguous()
    rates, bias = torch.tensor([0.0, 90.0, 200.0]), torch.zeros(21)
    plan = hal.plan("kda_gate", spec, Limits(max_rows=1, max_reqs=1), device="cpu", implementation="tpu.xla")
    g, _ = plan.run(raw, torch.zeros(1, 3).bfloat16(), rates, bias)
    exact = gate(spec, raw, rates, bias, torch.float64).float()
    torch.testing.assert_close(g, exact, rtol=1e-4, atol=1e-37)  # subnormals are lost


def test_a_shape_that_depends_on_data_is_refused() -> None:
    x = torch.arange(4, device=torch_xla.device())
    with pytest.raises(ContractError) as error, Traced():
        x[x > 1]
    assert str(error.value) == (
        "a TPU program: __getitem__ gives a shape, or a Python value, that depends on data: such a program cannot be "
        "compiled once for a bucket"
    )
    with pytest.raises(ContractError, match="a TPU program: nonzero gives a shape"), Traced():
        x.nonzero()


def test_bits_are_read_as_torch_reads_them() -> None:
    x = torch.tensor([[1.5, -0.0, NAN, INF]])
    moved = x.to(torch_xla.device())
    for dtype in (torch.int32, torch.uint8):
        assert torch.equal(view_as(moved, dtype).cpu(), x.view(dtype))
    assert torch.equal(view_as(view_as(moved, torch.uint8), torch.int32).cpu(), x.view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integers_beyond_float32_are_divided_exactly(dtype: torch.dtype) -> None:
    """torch-xla 2.9 itself says that (2^25 + 77) // 3 is 11184836."""
    x = torch.tensor([2**25 + 77, 2**31 - 1, 2**24 + 1, 7, 0, -1, -5], dtype=dtype)
    moved = x.to(torch_xla.device())
    with Traced():
        found = [moved // 3, moved // torch.full_like(moved, 64)]
    assert torch.equal(found[0].cpu(), x // 3)
    assert torch.equal(found[1].cpu(), x // 64)


@pytest.mark.parametrize(("dtype", "bits"), [(torch.int32, 16), (torch.int64, 32)])
def test_bits_shifted_out_of_negative_integers_round_down(dtype: torch.dtype, bits: int) -> None:
    """torch-xla 2.9 itself says that −1 >> 16 is 0."""
    one = 1 << bits
    x = torch.tensor([-1, -one, -one - 1, 1 - one, 0, one - 1, one, torch.iinfo(dtype).min], dtype=dtype)
    with Traced():
        found = x.to(torch_xla.device()) >> bits
    assert torch.equal(found.cpu(), x >> bits)


def test_a_clamp_keeps_infinity_and_nan() -> None:
    x = torch.tensor([INF, NAN, -INF, 0.5])
    for low, high in ((0.0, None), (None, 2.0), (0.0, 2.0)):
        found = clamp(x.to(torch_xla.device()), min=low, max=high).cpu()
        assert torch.equal(found.nan_to_num(7.0), x.clamp(low, high).nan_to_num(7.0))


def test_the_halves_of_every_scale_are_normal_numbers_whose_product_it_is() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    with Traced():
        moved = codes.to(torch_xla.device())
        made = [*powers.halves(moved), powers.of_large(moved), powers.of_small(moved)]
    first, second, large, small = (x.cpu().double() for x in made)
    exact = 2.0 ** (torch.arange(256).double() - 127)
    assert torch.equal((first * second)[:255], exact[:255])
    assert ((first >= 2.0**-64) & (first <= 2.0**64) & (second >= 2.0**-64) & (second <= 2.0**64))[:255].all()
    assert torch.equal((large + small * scales.BACK**2)[:255], exact[:255])
    assert all(x[255].isnan() for x in (first, second, large))
    assert small[255] == 0
