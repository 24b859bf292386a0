"""Plans: the builder's own function, what a plan knows, groups and pairs, the table, the convenience form."""

from __future__ import annotations

import dataclasses
import json
import logging
import time

import fake_kernels
import pytest
import torch
from composite_cases import DSACase
from fake_kernels import kernel

import kimi_hal as hal
from inputs import KDA, LIMITS, example
from kimi_hal.dispatch.contract import Probe, Properties
from kimi_hal.dispatch.plan import UNLIMITED
from kimi_hal.dispatch.table import PLANS
from kimi_hal.errors import (
    ContractError,
    FrozenError,
    GroupError,
    PlanError,
    PluginError,
    SelectionError,
    SpecError,
    UnknownNameError,
)
from kimi_hal.ops import OPERATORS
from kimi_hal.ops.all_gather import GatherSpec
from kimi_hal.ops.sparse_mla import MergeSpec, SparseMLASpec, StoreLatentSpec
from kimi_hal.ops.spec import DCP
from kimi_hal.ops.topk_merge import TopKMergeSpec
from kimi_hal.parallel.groups import LoopbackGroup
from kimi_hal.reference import sizes

MERGE = MergeSpec(parts=2, num_heads=3, dim=16, return_lse=True)
SPEC = SparseMLASpec(num_heads=2, latent="latent.fp8.e4m3fn.tensor", page=16, topk=4)


@pytest.fixture
def acme(plugins):
    """Return a function that installs a plugin for the CPU with these implementations."""
    fake_kernels.CONTEXTS.clear()

    def add(*implementations, **fields):
        probe = Probe(present=True, arch="acme2", devices=("Acme A2",))
        plugins.add("acme", *implementations, torch_device="cpu", probe=probe, **fields)

    return add


def merged(**changes):
    return hal.plan("merge_attn_states", MERGE, LIMITS, **{"device": "cpu", **changes})


# --- run ----------------------------------------------------------------------------------------


def test_run_is_the_function_that_the_builder_returned(acme, monkeypatch):
    made = []

    def build(ctx):
        made.append(fake_kernels.merge(ctx))
        return made[-1]

    monkeypatch.setattr(fake_kernels, "build", build)
    acme(kernel("merge_attn_states"))
    plan = merged()
    assert plan.run is made[-1]
    assert vars(plan)["run"] is made[-1]  # read off the instance: no descriptor, no wrapper


def test_a_builder_is_given_what_was_decided(acme):
    acme(kernel("merge_attn_states", size="fake_kernels:size"), variables={"KIMI_HAL_ACME_X": "1..2"})
    plan = merged()
    (ctx,) = fake_kernels.CONTEXTS
    assert (ctx.operator, ctx.spec, ctx.limits, ctx.device, ctx.arch) == (
        "merge_attn_states",
        MERGE,
        LIMITS,
        "cpu",
        "acme2",
    )
    assert (ctx.group, ctx.settings, ctx.parts, ctx.sizes) == (None, {}, {}, plan.sizes)
    assert ctx.persistent.tolist() == [0] * 32


def test_a_plugins_own_variables_reach_its_builder(acme, monkeypatch):
    acme(kernel("merge_attn_states"), variables={"KIMI_HAL_ACME_X": "1..2"})
    monkeypatch.setenv("KIMI_HAL_ACME_X", "2")
    merged()
    assert fake_kernels.CONTEXTS[-1].settings == {"KIMI_HAL_ACME_X": "2"}


def test_another_signature_is_the_plugins_error(acme):
    acme(kernel("merge_attn_states", build="fake_kernels:other_names"))
    with pytest.raises(PluginError) as caught:
        merged()
    assert str(caught.value) == (
        "plugin 'acme': fake_kernels:other_names returned a function that is not "
        "merge_attn_states(outs, lses, *, out=None, lse_out=None): parameter 1 is parts, it must be outs; "
        "parameter 3 is keyword-only out, it must be keyword-only out=None; parameter 5, 'stream', is one too many."
    )


def test_what_is_no_function_is_the_plugins_error(acme):
    acme(kernel("merge_attn_states", build="fake_kernels:no_function"))
    with pytest.raises(PluginError, match=r"is not merge_attn_states.*: it is a int, not a function"):
        merged()


def test_a_builder_that_raises_is_the_plugins_error_and_says_what_else_there_is(acme):
    acme(kernel("merge_attn_states", build="fake_kernels:crashes"))
    with pytest.raises(PluginError) as caught:
        merged()
    assert str(caught.value) == (
        "plugin 'acme': fake_kernels:crashes raised RuntimeError: nvcc fatal: unsupported gpu architecture. "
        "KIMI_HAL_OPS=merge_attn_states=<another> takes another implementation."
    )


def test_fault_25_a_missing_library_is_passed_over_aloud(acme, caplog):
    acme(
        kernel("merge_attn_states", "first", "fake_kernels:needs_a_library", rank=9),
        kernel("merge_attn_states", "second"),
    )
    plan = merged()
    assert plan.name == "acme.second"
    reason = (
        "fake_kernels:needs_a_library raised ModuleNotFoundError: No module named 'a_library_that_nobody_has'"
    )
    assert f"acme.first is passed over for merge_attn_states: {reason}" in caplog.text
    assert f"acme.first: {reason}" in plan.explain()


def test_fault_25_a_missing_library_of_what_was_named_is_an_error(acme, monkeypatch):
    acme(
        kernel("merge_attn_states", "first", "fake_kernels:needs_a_library"),
        kernel("merge_attn_states", "second", rank=1),
    )
    sentence = "acme.first: fake_kernels:needs_a_library raised ModuleNotFoundError: No module named"
    with pytest.raises(PluginError, match=sentence):
        merged(implementation="acme.first")
    monkeypatch.setenv("KIMI_HAL_OPS", "merge_attn_states=acme.first")
    with pytest.raises(PluginError, match=sentence):
        merged()


def test_where_nothing_can_be_built_every_reason_is_told(acme):
    acme(
        kernel("merge_attn_states", "first", "fake_kernels:needs_a_library", rank=9),
        kernel("merge_attn_states", "second", "fake_kernels:needs_a_library"),
    )
    with pytest.raises(SelectionError) as caught:
        merged()
    assert str(caught.value).startswith(
        "merge_attn_states: nothing that fits could be built\n  acme.first: fake_"
    )
    assert set(caught.value.refusals) == {"acme.first", "acme.second"}


def test_a_wrong_size_is_the_plugins_error(acme):
    acme(kernel("merge_attn_states", size="fake_kernels:size_as_dict"))
    with pytest.raises(PluginError, match="fake_kernels:size_as_dict returned dict, not Sizes"):
        merged()


# --- what a plan knows --------------------------------------------------------------------------


def test_a_plan_tells_its_sizes_and_makes_its_buffers(acme):
    acme(kernel("sparse_mla", size="fake_kernels:size", prepare="fake_kernels:prepare"))
    plan = hal.plan("sparse_mla", SPEC, LIMITS, device="cpu")
    assert (plan.workspace_bytes, plan.step_bytes, plan.persistent_bytes, plan.records_bytes) == (
        1600,
        16,
        32,
        0,
    )
    workspace, step = plan.new_workspace(), plan.new_step()
    assert (workspace.dtype, workspace.shape, workspace.data_ptr() % 256) == (torch.uint8, (1600,), 0)
    plan.prepare(None, None, None, step=step)
    assert step.tolist() == [7] * 16


def test_prepare_does_nothing_where_there_is_none(acme):
    acme(kernel("merge_attn_states"))
    assert merged().prepare(1, 2, 3, step=None) is None


def test_a_plan_tells_who_it_is(acme):
    properties = Properties(deterministic=True, batch_invariant=True, capture="full", numerics_id="acme.1")
    acme(kernel("sparse_mla", properties=properties, version="9.1"))
    plan = hal.plan("sparse_mla", SPEC, LIMITS, device="cpu")
    assert (plan.name, plan.version, plan.execution, plan.checkpoint_multiple) == (
        "acme.fast",
        "9.1",
        "native",
        1,
    )
    assert plan.properties == properties
    assert plan.reads == ("latent.fp8.e4m3fn.tensor",)
    assert repr(plan) == f"<plan {plan.key[:12]} of sparse_mla: acme.fast on cpu>"


def test_formats_inside_nested_specs_are_read(plugins):
    spec, limits, *_ = example("dsa_decode")
    plan = hal.plan("dsa_decode", spec, limits, device="cpu")
    assert plan.reads == ("index.fp8.e4m3fn.pow2.page64", "latent.fp8.e4m3fn.tensor")


def test_explain_is_for_people(acme):
    properties = Properties(deterministic=True, batch_invariant=True, capture="full", numerics_id="acme.1")
    acme(
        kernel("sparse_mla", properties=properties, size="fake_kernels:size", numerics=("attn.p=bf16",)),
        kernel("sparse_mla", "plain"),
    )
    plan = hal.plan(
        "sparse_mla",
        dataclasses.replace(SPEC, numerics=("attn.p=bf16",)),
        LIMITS,
        device="cpu",
        implementation="acme.fast",
    )
    lines = plan.explain().splitlines()
    assert lines[0] == "sparse_mla on cpu: acme.fast"
    assert not any("not built" in line for line in lines)
    assert "  acme.plain: implementation='acme.fast' names another" in lines
    assert lines[-4:] == [
        "  runs native, capture full, deterministic, batch-invariant (acme.1), rounds attn.p=bf16",
        "  bytes: workspace 1,600, step 16, persistent 32",
        "  reads latent.fp8.e4m3fn.tensor",
        f"  version 1.0, source {plan.source_hash[:12]}, key {plan.key[:12]}",
    ]


def test_explain_is_for_programs(acme):
    acme(kernel("merge_attn_states"))
    plan = merged()
    told = json.loads(plan.explain(json=True))
    assert (told["chosen"], told["key"], told["device"]) == ("acme.fast", plan.key, "cpu")
    assert told["limits"] == LIMITS.to_dict()
    assert told["bytes"] == {"workspace": 0, "step": 0, "persistent": 0, "records": 0}
    assert [c["full_name"] for c in told["candidates"] if c["chosen"]] == ["acme.fast"]


def test_the_choice_is_logged_at_info(acme, caplog):
    caplog.set_level(logging.INFO, "kimi_hal")
    acme(kernel("merge_attn_states"))
    merged()
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.INFO] == [
        "merge_attn_states: acme.fast, auto found Acme A2 (acme2)"
    ]


def test_weights_are_the_implementations(acme):
    acme(kernel("moe_experts", weights="fake_kernels:weights"))
    spec, limits, *_ = example("moe_experts")
    plan = hal.plan("moe_experts", spec, limits, device="cpu")
    assert plan.weights(w2=2, w13=1) == [1, 2, False]
    assert plan.weights(w2=2, w13=1, donate=True) == [1, 2, True]


def test_an_operator_without_weights_takes_none(acme):
    acme(kernel("merge_attn_states"))
    with pytest.raises(
        PlanError, match=r"merge_attn_states takes no weights: pass its operands to plan\.run"
    ):
        merged().weights(w=1)


def test_an_implementation_that_makes_no_weights_is_the_plugins_error(acme):
    acme(kernel("moe_experts"))
    spec, limits, *_ = example("moe_experts")
    plan = hal.plan("moe_experts", spec, limits, device="cpu")
    with pytest.raises(
        PluginError, match=r"acme\.fast: moe_experts takes weights, and Implementation\.weights names"
    ):
        plan.weights(w13=1)


def test_bind_checks_all_values_once_and_returns_run(acme):
    acme(kernel("sparse_mla"))
    plan = hal.plan("sparse_mla", SPEC, LIMITS, device="cpu")
    args = list(example("sparse_mla").args)
    assert plan.bind(*args) is plan.run
    args[2] = args[2].clone()
    args[2][0, 0] = 48
    with pytest.raises(ContractError, match=r"indices holds 48, beyond the cache's tokens \(48\)"):
        plan.bind(*args)


# --- what is asked for --------------------------------------------------------------------------


def test_another_operators_spec_is_refused():
    with pytest.raises(SpecError) as caught:
        hal.plan("sparse_mla", StoreLatentSpec(latent="latent.fp8.e4m3fn.tensor"), device="cpu")
    assert (
        str(caught.value)
        == "sparse_mla takes a SparseMLASpec, got a StoreLatentSpec, which is for store_latent"
    )
    with pytest.raises(SpecError, match="sparse_mla takes a SparseMLASpec, got a dict"):
        hal.plan("sparse_mla", {"num_heads": 2}, device="cpu")


def test_an_unknown_operator_names_the_nearest():
    with pytest.raises(UnknownNameError, match="unknown operator 'sparse_mal'; did you mean 'sparse_mla'"):
        hal.plan("sparse_mal", SPEC, device="cpu")


def test_without_limits_a_call_may_hold_a_whole_context(plugins):
    plan = hal.plan("merge_attn_states", MERGE, device="cpu")
    assert plan.limits == UNLIMITED
    assert plan.limits.max_rows == 1 << 20


def test_a_call_beyond_the_limits_is_refused(plugins):
    plan = merged()
    with pytest.raises(
        ContractError, match="T=17 is more than the plan's max_rows=16; plan with larger Limits"
    ):
        plan.run(torch.zeros(2, 17, 3, 16, dtype=torch.bfloat16), torch.zeros(2, 17, 3))


def test_operands_of_another_device_are_refused(plugins):
    plan = merged()
    with pytest.raises(ContractError, match="outs is on meta, this plan is for cpu"):
        plan.run(
            torch.zeros(2, 5, 3, 16, dtype=torch.bfloat16, device="meta"), torch.zeros(2, 5, 3, device="meta")
        )


def test_after_freeze_a_changed_setting_is_an_error(acme, monkeypatch):
    acme(kernel("merge_attn_states"))
    hal.freeze()
    assert merged().name == "acme.fast"
    monkeypatch.setenv("KIMI_HAL_BACKEND", "reference")
    with pytest.raises(FrozenError, match=r"changed after hal\.freeze\(\): KIMI_HAL_BACKEND"):
        merged()


# --- groups -------------------------------------------------------------------------------------


def gather(group, **changes):
    dcp = DCP(**{"world": group.size(), "rank": group.rank(), **changes})
    spec = GatherSpec(layout="rank_major", dtype="float32", dcp=dcp)
    return hal.plan("all_gather", spec, LIMITS, device="cpu", group=group)


def test_ranks_that_plan_alike_have_plans_of_their_own(plugins):
    def rank(group):
        plan = gather(group)
        return plan.key, plan.op(torch.full((1, 2), float(group.rank())))[:, 0, 0].tolist()

    keys, results = zip(*LoopbackGroup.run(3, rank), strict=True)
    assert len(set(keys)) == 3
    assert list(results) == [[0.0, 1.0, 2.0]] * 3


def test_a_different_choice_on_one_rank_is_an_error_on_all(plugins):
    def rank(group):
        with pytest.raises(GroupError) as caught:
            gather(group, interleave=1 + (group.rank() == 1))
        return str(caught.value)

    texts = LoopbackGroup.run(3, rank)
    assert len(set(texts)) == 1
    assert texts[0].startswith("ranks do not agree: ranks 0, 2 'reference.torch for all_gather, source")


def test_a_rank_that_cannot_plan_tells_the_others(plugins):
    def rank(group):
        spec = GatherSpec(layout="rank_major", dtype="float32", dcp=DCP(world=3, rank=group.rank()))
        named = "reference.tarch" if group.rank() == 2 else None
        with pytest.raises((GroupError, UnknownNameError)) as caught:
            hal.plan("all_gather", spec, LIMITS, device="cpu", group=group, implementation=named)
        return caught.value

    first, second, third = LoopbackGroup.run(3, rank, timeout=20)
    for error in (first, second):
        assert isinstance(error, GroupError)
        assert (
            '; rank 2 "no plan for all_gather: UnknownNameError: unknown implementation of all_gather'
            in str(error)
        )
    assert isinstance(third, UnknownNameError)
    assert "ranks do not agree" in third.__notes__[0]


def test_an_operator_that_communicates_needs_its_group(plugins):
    spec = GatherSpec(layout="rank_major", dtype="float32", dcp=DCP(world=2))
    with pytest.raises(PlanError) as caught:
        hal.plan("all_gather", spec, device="cpu")
    assert str(caught.value) == (
        "all_gather over 2 ranks needs a group: hal.plan('all_gather', …, "
        "group=hal.parallel.TorchGroup(process_group))"
    )


def test_only_what_meets_others_needs_a_group(plugins):
    replicated, sharded = (DCP(world=2, rank=1, index=how) for how in ("replicated", "sharded"))
    merge = hal.plan("topk_merge", TopKMergeSpec(dcp=replicated, topk=4), device="cpu")
    scores, index = torch.zeros(1, 4), torch.tensor([[0, 1, 2, 3]], dtype=torch.int32)
    local, count, _ = merge.run(scores, index, torch.tensor([4], dtype=torch.int32))
    assert (local.tolist(), count.tolist()) == ([[0, 1, -1, -1]], [2])
    with pytest.raises(PlanError, match=r"^topk_merge over 2 ranks needs a group: hal.plan\('topk_merge'"):
        hal.plan("topk_merge", TopKMergeSpec(dcp=sharded, topk=4), device="cpu")
    spec = GatherSpec(layout="rank_major", dtype="float32", dcp=replicated)
    with pytest.raises(PlanError, match=r"^all_gather over 2 ranks needs a group: "):
        hal.plan("all_gather", spec, device="cpu")


def test_a_group_that_is_not_needed_is_still_compared(plugins):
    def rank(group):
        spec = TopKMergeSpec(dcp=DCP(world=4, index="replicated"), topk=4)
        with pytest.raises(PlanError) as caught:
            hal.plan("topk_merge", spec, device="cpu", group=group)
        return str(caught.value)

    assert LoopbackGroup.run(2, rank)[1] == "topk_merge: dcp says rank 0 of 4, the group is rank 1 of 2"


def test_a_layer_over_replicated_index_keys_gathers_heads_and_needs_its_group(plugins):
    spec = DSACase().spec(DCP(world=2, index="replicated"))
    with pytest.raises(PlanError, match=r"^dsa_decode over 2 ranks needs a group: "):
        hal.plan("dsa_decode", spec, LIMITS, device="cpu")


def test_another_group_than_the_specs_is_refused(plugins):
    def rank(group):
        with pytest.raises(PlanError) as caught:
            gather(group, world=4)
        return str(caught.value)

    assert LoopbackGroup.run(2, rank)[1] == "all_gather: dcp says rank 1 of 4, the group is rank 1 of 2"


def test_tensor_parallel_ranks_are_compared_with_the_group(plugins):
    spec, limits, *_ = example("moe_layer")

    def rank(group):
        with pytest.raises(PlanError) as caught:
            hal.plan("moe_layer", spec, limits, device="cpu", group=group)
        return str(caught.value)

    assert LoopbackGroup.run(2, rank)[0] == "moe_layer: the Spec says tp=1, the group is rank 0 of 2"


# --- verify and commit --------------------------------------------------------------------------


def verify(**changes):
    return hal.plan("kda_verify", KDA, LIMITS, **{"device": "cpu", **changes})


def commit(spec=KDA, limits=LIMITS, **changes):
    return hal.plan("kda_commit", spec, limits, **{"device": "cpu", **changes})


@pytest.fixture
def two_layouts(acme):
    acme(
        kernel("kda_verify", "ring", records="acme.ring", rank=1),
        kernel("kda_verify", "plain", records=sizes.RECORDS),
        kernel("kda_commit", "plain", records=sizes.RECORDS, rank=1),
        kernel("kda_commit", "ring", records="acme.ring"),
    )


def test_a_commit_reads_what_its_pair_writes(two_layouts):
    assert commit(pair=verify()).name == "acme.ring"
    assert commit(pair=verify(implementation="acme.plain")).name == "acme.plain"


def test_a_commit_by_name_that_reads_another_layout_is_refused(two_layouts, monkeypatch):
    with pytest.raises(PlanError) as caught:
        commit(pair=verify(), implementation="acme.plain")
    assert str(caught.value) == (
        "acme.plain reads records 'kda.u_k_g_x.v1', its pair acme.ring writes 'acme.ring'"
    )
    monkeypatch.setenv("KIMI_HAL_OPS", "kda_commit=acme.plain")
    with pytest.raises(PlanError, match=r"acme\.plain reads records 'kda\.u_k_g_x\.v1', its pair acme\.ring"):
        commit(pair=verify())


def test_a_layout_that_nothing_reads_is_refused(acme):
    acme(
        kernel("kda_verify", "ring", records="acme.ring"),
        kernel("kda_commit", "plain", records=sizes.RECORDS),
    )
    with pytest.raises(
        PlanError, match=r"acme has no kda_commit that reads 'acme\.ring', which acme\.ring writes"
    ):
        commit(pair=verify())


def test_what_reads_records_and_was_never_run_is_taken_by_name_only(acme):
    never = kernel("kda_commit", "never", records="acme.ring", not_run="no Acme A2 was here")
    writer = kernel("kda_verify", "ring", records="acme.ring")
    plain = kernel("kda_commit", "plain", records=sizes.RECORDS)
    acme(writer, plain, never)
    with pytest.raises(PlanError) as caught:
        commit(pair=verify())
    assert str(caught.value) == (
        "acme.never reads 'acme.ring', which acme.ring writes, but it was not run: no Acme A2 was here; "
        "name it: KIMI_HAL_OPS=kda_commit=acme.never"
    )
    assert commit(pair=verify(), implementation="acme.never").name == "acme.never"


def test_what_was_run_reads_records_before_what_was_not(acme):
    acme(
        kernel("kda_verify", "ring", records="acme.ring"),
        kernel("kda_commit", "never", records="acme.ring", not_run="no Acme A2 was here"),
        kernel("kda_commit", "plain", records=sizes.RECORDS),
        kernel("kda_commit", "ring", records="acme.ring", rank=-1),
    )
    assert commit(pair=verify()).name == "acme.ring"


def test_without_a_pair_the_processs_verify_decides(two_layouts):
    verify()
    assert commit().name == "acme.ring"


def test_without_a_pair_two_layouts_are_an_error(two_layouts):
    verify()
    verify(implementation="acme.plain")
    with pytest.raises(PlanError) as caught:
        commit()
    assert str(caught.value) == (
        "kda_commit could read the records of acme.plain and acme.ring: say which, pair=<the plan of kda_verify>"
    )


def test_a_pair_has_one_spec_and_one_length_of_records(plugins):
    pair = verify()
    other = dataclasses.replace(KDA, num_heads=4, gate="log")
    with pytest.raises(PlanError) as caught:
        commit(other, pair=pair)
    assert str(caught.value) == (
        "kda_commit and its pair must have one Spec; they differ in gate 'log' and 'raw', num_heads 4 and 2"
    )
    assert commit(dataclasses.replace(KDA, num_layers=69), pair=pair).records_bytes == pair.records_bytes
    with pytest.raises(PlanError, match=r"plan both with the same Limits\.rows_per_req"):
        commit(limits=dataclasses.replace(LIMITS, rows_per_req=8), pair=pair)


def test_a_pair_is_for_what_reads_records(plugins):
    with pytest.raises(
        PlanError, match=r"pair= is for what reads another plan's records \(kda_commit\), not kda_verify"
    ):
        verify(pair=verify())
    with pytest.raises(
        PlanError, match="the pair of kda_commit is a plan of kda_verify, got one of merge_attn_states"
    ):
        commit(pair=merged())


# --- the table ----------------------------------------------------------------------------------


def test_plans_survive_being_written_down(acme, tmp_path):
    acme(kernel("merge_attn_states", "first", rank=1), kernel("merge_attn_states", "second"))
    plan = merged(implementation="acme.second")
    text = hal.dump_plans()
    PLANS.clear()
    (again,) = hal.load_plans(text)
    assert (again.key, again.name) == (plan.key, "acme.second")
    assert PLANS.find(plan.key, "cpu") is again
    file = tmp_path / "plans.json"
    file.write_text(text)
    assert hal.load_plans(file)[0].key == plan.key


def test_a_pair_is_found_again(two_layouts):
    ring, plain = verify(), verify(implementation="acme.plain")
    pairs = {commit(pair=ring).key: ring.key, commit(pair=plain).key: plain.key}
    text = hal.dump_plans()
    PLANS.clear()
    made = hal.load_plans(text)
    assert {p.key: p.pair.key for p in made if p.operator.name == "kda_commit"} == pairs


def test_a_changed_source_makes_another_plan(acme, tmp_path, monkeypatch):
    kernels = tmp_path / "vendor_kernels.py"
    kernels.write_text("from fake_kernels import build")
    monkeypatch.syspath_prepend(str(tmp_path))
    acme(kernel("merge_attn_states", build="vendor_kernels:build"))
    old = merged().key
    text = hal.dump_plans()
    kernels.write_text("from fake_kernels import build  # faster")
    with pytest.raises(PlanError) as caught:
        hal.load_plans(text)
    assert str(caught.value).startswith("acme.fast for merge_attn_states has key ")
    assert f"it was {old[:12]}: its source or version, or the rank, is another" in str(caught.value)


def test_a_plan_with_a_group_is_made_again_with_one(plugins):
    PLANS.clear()

    def rank(group):
        gather(group)
        group.barrier()
        mine = [e for e in json.loads(hal.dump_plans()) if e["spec"]["dcp"]["rank"] == group.rank()]
        with pytest.raises(PlanError, match=r"the plan of all_gather has a group: load_plans\(…, group=…\)"):
            hal.load_plans(json.dumps(mine))
        return hal.load_plans(json.dumps(mine), group=group)[0].key == mine[0]["key"]

    assert LoopbackGroup.run(2, rank) == [True, True]


# --- composites ---------------------------------------------------------------------------------


def test_a_backend_without_a_fused_kernel_composes_its_parts(acme):
    parts = ("quantize_index_query", "indexer_topk", "sparse_mla")
    acme(
        *(
            kernel(name, properties=Properties(deterministic=name != "sparse_mla", capture="full"))
            for name in parts
        )
    )
    spec, limits, args, _ = example("dsa_decode")
    plan = hal.plan("dsa_decode", spec, limits, device="cpu")
    assert plan.name == "acme.composed"
    assert (plan.properties.deterministic, plan.properties.capture) == (False, "full")
    assert "sparse_mla: acme.fast" in plan.explain()
    expected = hal.plan("dsa_decode", spec, limits, device="cpu", implementation="reference.torch").run(*args)
    assert torch.equal(plan.run(*args)[0], expected[0])


# --- the convenience form -----------------------------------------------------------------------


def test_spec_fields_by_name_and_plans_are_kept(acme):
    acme(kernel("merge_attn_states"))
    outs, lses = example("merge_attn_states").args
    fields = {"parts": 2, "num_heads": 3, "dim": 16}
    first = hal.ops.merge_attn_states(outs, lses, **fields)
    hal.ops.merge_attn_states(outs=outs, lses=lses, **fields)
    assert len(fake_kernels.CONTEXTS) == 1
    assert first[1].shape == (4, 0)
    hal.ops.merge_attn_states(outs.repeat(1, 2, 1, 1), lses.repeat(1, 2, 1), **fields)
    assert [ctx.limits.max_rows for ctx in fake_kernels.CONTEXTS] == [4, 8]
    hal.ops.merge_attn_states(outs, lses, **fields)  # a smaller call takes the larger plan
    assert len(fake_kernels.CONTEXTS) == 2


def test_a_changed_setting_makes_another_plan(acme, monkeypatch):
    acme(kernel("merge_attn_states"))
    outs, lses = example("merge_attn_states").args
    hal.ops.merge_attn_states(outs, lses, parts=2, num_heads=3, dim=16)
    monkeypatch.setenv("KIMI_HAL_BACKEND", "reference")
    hal.ops.merge_attn_states(outs, lses, parts=2, num_heads=3, dim=16)
    assert len(fake_kernels.CONTEXTS) == 1


def test_workspace_and_step_are_made_for_the_caller(acme):
    acme(
        kernel(
            "sparse_mla",
            build="fake_kernels:demanding",
            size="fake_kernels:size",
            prepare="fake_kernels:prepare",
        )
    )
    args = example("sparse_mla").args
    fields = {"num_heads": 2, "latent": "latent.fp8.e4m3fn.tensor", "page": 16, "topk": 4}
    assert hal.ops.sparse_mla(*args, **fields) == (
        400,
        None,
    )  # prepare needs row_len, which this call has not


def test_an_unknown_keyword_names_the_nearest():
    outs, lses = example("merge_attn_states").args
    with pytest.raises(
        UnknownNameError, match="unknown argument of merge_attn_states 'num_head'; did you mean 'num_heads'"
    ):
        hal.ops.merge_attn_states(outs, lses, parts=2, num_head=3)


def test_missing_fields_and_operands_are_named():
    outs, lses = example("merge_attn_states").args
    with pytest.raises(SpecError) as caught:
        hal.ops.merge_attn_states(outs, lses)
    assert str(caught.value) == "merge_attn_states needs parts, num_heads by name; MergeSpec has no default"
    with pytest.raises(
        ContractError, match="merge_attn_states: missing a required argument: 'lses'; its operands are"
    ):
        hal.ops.merge_attn_states(outs, parts=2, num_heads=3)
    with pytest.raises(ContractError, match="it has no tensor among its arguments"):
        hal.ops.merge_attn_states(None, None, parts=2, num_heads=3)


def test_a_field_that_shares_an_operands_name_has_a_prefix(plugins):
    spec, _, args, _ = example("moe_experts")
    fields = {n: v for n, v in spec.to_dict().items() if n not in ("weights", "numerics")}
    result = hal.ops.moe_experts(*args, **fields, spec_weights="experts.mxfp4-pack")
    assert result.shape == (3, 64)


@pytest.mark.parametrize("name", OPERATORS)
def test_a_plan_costs_milliseconds(plugins, name):
    spec, limits, *_ = example(name)

    def processor_seconds():
        start = time.process_time()
        hal.plan(name, spec, limits, device="cpu")
        return time.process_time() - start

    processor_seconds()  # imports the reference
    assert min(processor_seconds() for _ in range(3)) < 0.25  # about 10 ms; a composite plans its parts too
