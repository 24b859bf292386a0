from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from composite_cases import DSACase, KDACase, MoECase
from fake_plugins import HERE, implementation
from torch import Tensor

import kimi_hal as hal
from kimi_hal.dispatch import composed
from kimi_hal.dispatch.contract import Capability, Properties
from kimi_hal.errors import ContractError, SelectionError
from kimi_hal.ops import get
from kimi_hal.ops.composites import part_specs
from kimi_hal.ops.spec import DCP, Limits
from kimi_hal.parallel.groups import LoopbackGroup

LIMITS = Limits(max_rows=64, max_reqs=8)
COMPOSED = "reference.composed"


def planned(name: str, spec: Any, implementation: str | None = None, **more: Any) -> Any:
    return hal.plan(name, spec, LIMITS, device="cpu", implementation=implementation, **more)


def close(actual: Tensor, expected: Tensor, error: float) -> None:
    norm = (actual.float() - expected.float()).norm() / expected.float().norm()
    assert norm < error


@pytest.fixture(autouse=True)
def _only_the_core(plugins: Any) -> None:
    """Every test starts without plugins and variables."""


# --- the answer is that of the parts --------------------------------------------------------------------


def test_dsa_decode_composed_is_the_references() -> None:
    case = DSACase()
    got = planned("dsa_decode", case.spec(), COMPOSED).run(**case.operands())
    expected = planned("dsa_decode", case.spec(), "reference.torch").run(**case.operands())
    assert got[0].equal(expected[0])
    assert got[1].equal(expected[1])


@pytest.mark.parametrize("name", [COMPOSED, "reference.torch"])
@pytest.mark.parametrize("exchange", ["a2a", "ag_rs"])
@pytest.mark.parametrize("world", [2, 4])
def test_dsa_decode_planned_on_every_rank_is_the_answer_of_one(world: int, exchange: str, name: str) -> None:
    case = DSACase(out_dtype="bfloat16")
    expected = planned("dsa_decode", case.spec(), "reference.torch").run(**case.operands())

    def rank(group: LoopbackGroup) -> tuple[Tensor, Tensor]:
        dcp = DCP(world=world, rank=group.rank())
        plan = planned("dsa_decode", case.spec(dcp, head_exchange=exchange), name, group=group)
        return plan.run(**case.operands(dcp))

    outs, lses = zip(*LoopbackGroup.run(world, rank), strict=True)
    close(torch.cat(outs, dim=1), expected[0], 2.0**-7)
    torch.testing.assert_close(torch.cat(lses, dim=1), expected[1], rtol=1e-5, atol=1e-5)


def test_kda_layer_decode_composed_advances_states_to_the_same_bits() -> None:
    case = KDACase()
    mine, theirs = case.operands(), case.operands()
    got = planned("kda_layer_decode", case.spec, COMPOSED).run(**mine)
    expected = planned("kda_layer_decode", case.spec, "reference.torch").run(**theirs)
    close(got, expected, 2.0**-7)
    for name in ("state", "conv_state"):
        assert mine[name].equal(theirs[name])


@pytest.mark.parametrize("live", [None, 3])
def test_moe_layer_composed_is_the_references(live: int | None) -> None:
    case = MoECase()
    count = None if live is None else torch.tensor([live], dtype=torch.int32)
    results = []
    for name in (COMPOSED, "reference.torch"):
        plan = planned("moe_layer", case.spec(), name)
        results.append(plan.run(case.x, plan.weights(**case.weights()), count))
    assert results[0].dtype == torch.bfloat16
    close(*results, 2.0**-6)
    assert results[0][live:].count_nonzero() == 0 if live else results[0].count_nonzero()


@pytest.mark.parametrize("cut", ["columns", "experts"])
def test_moe_layer_planned_on_every_rank_is_the_answer_of_one(cut: str) -> None:
    case = MoECase(experts=8)
    plan = planned("moe_layer", case.spec(), "reference.torch")
    expected = plan.run(case.x, plan.weights(**case.weights()))

    def rank(group: LoopbackGroup) -> Tensor:
        mine = planned("moe_layer", case.spec(2, group.rank(), cut), COMPOSED, group=group)
        return mine.run(case.x, mine.weights(**case.weights(2, group.rank(), cut)))

    results = LoopbackGroup.run(2, rank)
    assert results[0].equal(results[1])
    close(results[0], expected, 2.0**-6)


# --- outputs and buffers --------------------------------------------------------------------------------


def test_given_outputs_come_back() -> None:
    case = DSACase()
    out, lse = torch.full((6, 4, 512), torch.nan), torch.full((6, 4), torch.nan)
    plan = planned("dsa_decode", case.spec(), COMPOSED)
    got = plan.run(**case.operands(), out=out, lse_out=lse)
    assert got[0] is out
    assert got[1] is lse
    assert out.isfinite().all()

    kda = KDACase()
    o = torch.full((3, 2, 128), torch.nan).bfloat16()
    assert planned("kda_layer_decode", kda.spec, COMPOSED).run(**kda.operands(), out=o) is o
    assert o.isfinite().all()

    moe = MoECase()
    y, layer = torch.full_like(moe.x, torch.nan), planned("moe_layer", moe.spec(), COMPOSED)
    assert layer.run(moe.x, layer.weights(**moe.weights()), out=y) is y
    assert y.isfinite().all()


def fake_plan(step: int = 0, workspace: int = 0, **more: Any) -> Any:
    properties = more.pop("properties", Properties(deterministic=True, batch_invariant=True, capture="full"))
    return SimpleNamespace(step_bytes=step, workspace_bytes=workspace, properties=properties, **more)


def test_parts_share_one_workspace_and_stand_behind_each_other_in_the_step() -> None:
    plans = {
        "indexer_topk": fake_plan(300, 1000),
        "topk_merge": fake_plan(0, 5000),
        "sparse_mla": fake_plan(8),
    }
    sizes = composed.sizes(plans)
    assert (sizes.step, sizes.workspace, sizes.persistent) == (512 + 256, 5000, 0)
    step, workspace = torch.arange(sizes.step, dtype=torch.int64), torch.zeros(5000)
    more = composed.Buffers.of(plans).more(step, workspace)
    assert more["indexer_topk"]["step"].tolist() == list(range(300))
    assert more["sparse_mla"]["step"].tolist() == list(range(512, 520))
    assert "step" not in more["topk_merge"]
    assert all(more[name]["workspace"] is workspace for name in plans)


def test_what_a_part_does_not_take_it_is_not_given() -> None:
    plans = {"quantize_index_query": fake_plan(), "merge_attn_states": fake_plan(), "kda_conv": fake_plan()}
    assert composed.Buffers.of(plans).more(None, torch.zeros(1)) == {}


def test_prepare_gives_each_part_its_own_table_and_share() -> None:
    calls = []

    def preparer(name: str) -> Any:
        return lambda *rows, step, **hints: calls.append((name, *rows, len(step), hints["max_context"]))

    plans = {
        "indexer_topk": fake_plan(300, prepare=preparer("indexer_topk")),
        "sparse_mla": fake_plan(8, prepare=preparer("sparse_mla")),
    }
    fill = composed.prepare(SimpleNamespace(parts=plans))
    fill("req", "len", "latent", "index", step=torch.zeros(512 + 8), max_context=77)
    assert sorted(calls) == [
        ("indexer_topk", "req", "len", "index", 300, 77),
        ("sparse_mla", "req", "len", "latent", 8, 77),
    ]


# --- what it promises -----------------------------------------------------------------------------------


def test_a_composition_promises_what_all_parts_promise() -> None:
    op = get("dsa_decode")
    strong = fake_plan(properties=Properties(True, True, "full", concurrent=True, numerics_id="a"))
    weak = fake_plan(properties=Properties(True, False, "piecewise", concurrent=True, static_rows=True))
    both = composed.properties(op, {"x": strong, "y": strong})
    assert (both.deterministic, both.batch_invariant, both.capture) == (True, True, "full")
    assert both.numerics_id == "a+a"
    mixed = composed.properties(op, {"x": strong, "y": weak})
    assert (mixed.batch_invariant, mixed.capture, mixed.static_rows) == (False, "piecewise", True)
    assert mixed.numerics_id == ""
    # Its matrix products are torch's, whose bits depend on the number of rows.
    assert not composed.properties(get("moe_layer"), {"x": strong}).batch_invariant


def test_a_plan_shows_its_parts() -> None:
    plan = planned("dsa_decode", DSACase().spec(), COMPOSED)
    assert json.loads(plan.explain(json=True))["parts"] == {
        "quantize_index_query": "reference.torch",
        "indexer_topk": "reference.torch",
        "sparse_mla": "reference.torch",
    }
    assert "  sparse_mla: reference.torch, " in plan.explain()


def test_the_key_depends_on_the_parts_sources() -> None:
    plans = {"x": SimpleNamespace(name="acme.fast", source_hash="1")}
    other = {"x": SimpleNamespace(name="acme.fast", source_hash="2")}
    assert composed.source_hash("own", plans) != composed.source_hash("own", other)
    assert composed.source_hash("own", plans) == composed.source_hash("own", dict(plans))


def test_a_part_that_cannot_be_planned_is_named(plugins: Any) -> None:
    plugins.add("acme", torch_device="cpu")
    with pytest.raises(SelectionError) as caught:
        planned("dsa_decode", DSACase().spec())
    assert str(caught.value).startswith(
        "dsa_decode: acme.composed needs quantize_index_query: quantize_index_query: "
        "acme does not implement it (KIMI_HAL_BACKEND=acme); it implements sparse_mla."
    )


def test_an_override_reaches_the_parts(plugins: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = implementation(
        capabilities=(Capability(("acme2",), composed_coverage("sparse_mla")),), source=("kimi_hal/log.py",)
    )
    plugins.add("acme", fast, torch_device="cpu", probe=HERE)
    monkeypatch.setitem(sys.modules, "fake_kernels", SimpleNamespace(build=forty_two))
    monkeypatch.setenv("KIMI_HAL_BACKEND", "reference")
    monkeypatch.setenv("KIMI_HAL_OPS", "sparse_mla=acme.fast")
    monkeypatch.setattr("kimi_hal.dispatch.sources.source_hash", lambda *_: "0" * 64)
    case = DSACase()
    plan = planned("dsa_decode", case.spec())
    assert plan.name == COMPOSED  # the reference's own kernel would not run that part
    out, _ = plan.run(**case.operands())
    assert (out == 42).all()


def test_a_part_that_was_never_run_is_told_of_the_composition(
    plugins: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = implementation(
        capabilities=(Capability(("acme2",), composed_coverage("sparse_mla")),),
        source=("kimi_hal/log.py",),
        not_run="no Acme A2 was here",
    )
    plugins.add("acme", fast, torch_device="cpu", probe=HERE)
    monkeypatch.setitem(sys.modules, "fake_kernels", SimpleNamespace(build=forty_two))
    monkeypatch.setenv("KIMI_HAL_BACKEND", "reference")
    monkeypatch.setattr("kimi_hal.dispatch.sources.source_hash", lambda *_: "0" * 64)
    whole = planned("dsa_decode", DSACase().spec(), COMPOSED)
    assert json.loads(whole.explain(json=True))["not_run"] == ""
    monkeypatch.setenv("KIMI_HAL_OPS", "sparse_mla=acme.fast")
    plan = planned("dsa_decode", DSACase().spec())
    said = "sparse_mla by acme.fast: no Acme A2 was here"
    assert json.loads(plan.explain(json=True))["not_run"] == said
    assert f"not run: {said}" in plan.explain()


def composed_coverage(name: str) -> Any:
    from kimi_hal.reference.capabilities import coverage

    return coverage(get(name).spec_type)[0]


def forty_two(ctx: Any) -> Any:
    """Build a sparse_mla that answers 42."""

    def run(q, cache, indices, k_scale=None, q_scale=None, index_len=None, block_table=None, row_req=None,
            *, step=None, out=None, lse_out=None, workspace=None):  # fmt: skip
        shape = (*q.shape[:2], 512)
        return torch.full(shape, 42.0), torch.zeros(shape[:2])

    return run


# --- data -----------------------------------------------------------------------------------------------


def test_weights_are_asked_for_by_name() -> None:
    case = KDACase()
    plan = planned("kda_layer_decode", case.spec, COMPOSED)
    with pytest.raises(ContractError) as caught:
        plan.weights(conv=torch.zeros(1), A_log=torch.zeros(1), dt_bais=torch.zeros(1))
    assert str(caught.value) == (
        "kda_layer_decode: weights need dt_bias=; weights need norm=; "
        "weights take no dt_bais=; did you mean 'dt_bias'?"
    )


def test_parts_of_every_composite() -> None:
    dsa = DSACase()
    limits = Limits(max_rows=8, max_reqs=2, block_table_width=10)
    one = part_specs("dsa_decode", dsa.spec(), limits)
    assert list(one) == ["quantize_index_query", "indexer_topk", "sparse_mla"]
    four = part_specs("dsa_decode", dsa.spec(DCP(world=4, rank=1)), limits)
    assert list(four) == [
        "quantize_index_query",
        "indexer_topk",
        "topk_merge",
        "sparse_mla",
        "merge_attn_states",
    ]
    assert (four["merge_attn_states"].spec.parts, four["merge_attn_states"].spec.num_heads) == (4, 1)
    # Ten latent pages of 16 tokens are three index pages of 64.
    assert four["indexer_topk"].limits.block_table_width == 3
    assert four["sparse_mla"].limits.block_table_width == 10
    assert list(part_specs("kda_layer_decode", KDACase().spec)) == ["kda_conv", "kda_decode"]
    assert list(part_specs("moe_layer", MoECase().spec())) == ["moe_route", "moe_experts"]
    for name in ("dsa_decode", "kda_layer_decode", "moe_layer"):
        assert get(name).composite


def test_a_composite_admits_rounding_for_its_parts() -> None:
    spec = DSACase().spec(numerics=("attn.p=bf16",))
    assert part_specs("dsa_decode", spec)["sparse_mla"].spec.numerics == ("attn.p=bf16",)


def test_nothing_imports_torch_before_it_builds() -> None:
    code = "import kimi_hal.dispatch.composed, kimi_hal.specs, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
