"""Each operator as a torch operator: schemas, fakes, autograd, ``torch.compile``."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch
from fake_kernels import kernel

import kimi_hal as hal
from inputs import example
from kimi_hal.dispatch import schema, torch_ops
from kimi_hal.dispatch.capture import tensors_of
from kimi_hal.dispatch.contract import Probe
from kimi_hal.dispatch.scalars import field_argument, flatten, scalars, spec_of
from kimi_hal.dispatch.table import PLANS
from kimi_hal.errors import ContractError, PlanError
from kimi_hal.ops import OPERATORS
from kimi_hal.ops.operator import output_shapes, torch_dtype
from kimi_hal.ops.sparse_mla import SparseMLASpec
from kimi_hal.ops.spec import DCP

#: What stands in a column of scores that nobody writes, where the reference allocates.
BLANK = {"float32": -torch.inf, "bfloat16": -torch.inf}
RETURNING = [name for name, op in OPERATORS.items() if op.outs]
SPEC = SparseMLASpec(num_heads=2, latent="latent.fp8.e4m3fn.tensor", page=16, topk=4)


def packet(name):
    return getattr(torch.ops.kimi_hal, name)


def call(name, **variant):
    """Return plan, positional operands, and the keywords of the torch operator, for an operator's example."""
    spec, limits, args, kwargs = example(name, **variant)
    plan = hal.plan(name, spec, limits, device="cpu")
    return plan, args, {**kwargs, **flatten(plan.operator, spec)}


def buffers(plan, args):
    given = plan.operator.signature.bind(*args).arguments
    shapes = output_shapes(plan.operator, plan.spec, plan.limits, given)
    return {s.keyword: torch.full(s.shape, BLANK.get(s.dtype, 0), dtype=torch_dtype(s.dtype)) for s in shapes}


def same(a, b):
    pairs = zip(tensors_of([a]), tensors_of([b]), strict=True)
    return all(
        torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8)) for x, y in pairs
    )


# --- schemas ------------------------------------------------------------------------------------


def test_the_schema_is_operands_then_fields_then_plan():
    hal.plan("merge_attn_states", *example("merge_attn_states")[:2], device="cpu")
    assert str(packet("merge_attn_states").default._schema) == (
        'kimi_hal::merge_attn_states(Tensor outs, Tensor lses, *, str numerics="", int parts, int num_heads, '
        'int dim=512, str dtype="bfloat16", bool return_lse=False, str plan="") -> (Tensor, Tensor)'
    )


def test_a_written_buffer_is_marked_and_the_out_form_returns_nothing():
    assert "Tensor(d!) cache" in schema.functional(OPERATORS["store_latent"])
    assert schema.functional(OPERATORS["store_latent"]).endswith("-> ()")
    assert schema.out(OPERATORS["store_latent"]) is None
    text = schema.out(OPERATORS["sparse_mla"])
    assert text.endswith('str plan="", Tensor(i!) out, Tensor(j!) lse_out) -> ()')
    assert "Tensor(z!)? workspace=None" in text


def test_lists_of_written_buffers_and_absent_operands_have_their_types():
    text = schema.functional(OPERATORS["kda_commit"])
    assert text.startswith("kda_commit(Tensor(a!)[] conv_states, Tensor(b!)[] states, Tensor[] records, ")
    assert "Tensor[]? A_logs, Tensor[]? dt_biases, Tensor state_ids" in text
    assert "Tensor? out_ids=None" in text


def test_a_field_with_the_name_of_an_operand_gets_a_prefix():
    names = [s.name for s in scalars(OPERATORS["moe_experts"])]
    assert "spec_weights" in names
    assert "weights" not in names


def test_nested_specs_travel_as_flat_dcp_and_as_json():
    op = OPERATORS["dsa_decode"]
    spec = example("dsa_decode").spec
    flat = flatten(op, spec)
    assert flat["attn"] == spec.attn.key()
    assert "merge" not in flat
    assert spec_of(op, flat) == spec
    dcp = dataclasses.replace(SPEC, dcp=DCP(world=4, rank=3, interleave=2), numerics=("attn.p=bf16",))
    assert flatten(OPERATORS["sparse_mla"], dcp) == {
        "numerics": "attn.p=bf16",
        "num_heads": 2,
        "latent": "latent.fp8.e4m3fn.tensor",
        "page": 16,
        "topk": 4,
        "dcp_world": 4,
        "dcp_rank": 3,
        "dcp_interleave": 2,
    }


@pytest.mark.parametrize("name", OPERATORS)
def test_a_spec_survives_its_scalars(name):
    spec = example(name).spec
    assert spec_of(OPERATORS[name], flatten(OPERATORS[name], spec)) == spec


def test_floats_survive_the_schema_text():
    defaults = {a.name: a.default_value for a in packet("sparse_mla").default._schema.arguments}
    assert defaults["softmax_scale"] == 192**-0.5


# --- calls --------------------------------------------------------------------------------------


def by_name(plan):
    """Return the Spec's fields as keywords of the convenience form."""
    fields = {f.name: getattr(plan.spec, f.name) for f in dataclasses.fields(plan.spec)}
    return {field_argument(plan.operator, name): value for name, value in fields.items()}


ENTRIES = {
    "op": lambda name, plan, args, keywords: plan.op(*args),
    "torch with the key": lambda name, plan, args, keywords: packet(name)(*args, **keywords, plan=plan.key),
    "torch with the fields": lambda name, plan, args, keywords: packet(name)(*args, **keywords),
    "hal.ops": lambda name, plan, args, keywords: getattr(hal.ops, name)(*args, **by_name(plan)),
}


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("entry", ENTRIES)
def test_every_entry_gives_the_bits_of_run(plugins, name, entry):
    plan, written, _ = call(name)
    expected = plan.run(*written)
    plan, args, keywords = call(name)
    result = ENTRIES[entry](name, plan, args, keywords)
    if name == "indexer_logits":  # without a plan the width is what the block table holds
        width = min(result.shape[1], expected.shape[1])
        result, expected = result[:, :width], expected[:, :width]
    assert same(result, expected)
    assert same(args, written)


@pytest.mark.parametrize("name", RETURNING)
def test_the_out_form_fills_the_buffers_and_returns_nothing(plugins, name):
    plan, args, keywords = call(name)
    expected = plan.run(*args)
    plan, args, keywords = call(name)
    outs = buffers(plan, args)
    assert packet(name).out(*args, **keywords, plan=plan.key, **outs) is None
    assert same(list(outs.values()), expected)
    plan, args, keywords = call(name)
    outs = buffers(plan, args)
    result = plan.op(*args, **outs)
    assert all(a is b for a, b in zip(tensors_of([result]), outs.values(), strict=True))
    assert same(result, expected)


def test_plan_op_takes_all_outputs_or_none(plugins):
    plan, args, _ = call("sparse_mla")
    out = buffers(plan, args)["out"]
    with pytest.raises(
        ContractError, match=r"plan\.op takes all of out, lse_out or none: one node writes all its"
    ):
        plan.op(*args, out=out)


def test_a_key_that_no_plan_has_says_how_to_get_it(plugins):
    _, args, keywords = call("sparse_mla")
    with pytest.raises(
        PlanError, match=r"no plan 0123456789ab in this process: .* hal.load_plans\(hal.dump_plans\(\)"
    ):
        packet("sparse_mla")(*args, **keywords, plan="0123456789abcdef")


def test_giving_inputs_away_is_for_plan_run_alone(plugins):
    plan, args, keywords = call("prepare_moe_weights")
    with pytest.raises(
        ContractError, match=r"donate=True gives its inputs away, which no graph allows: use plan\.run"
    ):
        packet("prepare_moe_weights")(*args, donate=True, **keywords)
    assert plan.run(*args, donate=True)[0] is args[0]


# --- opcheck ------------------------------------------------------------------------------------


def comparable(name):
    """Return an index format whose queries are bytes: opcheck compares tensors, which torch cannot with FP8."""
    return {"index": "index.mxfp4.page64"} if OPERATORS[name].family == "indexer" else {}


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("keyed", [True, False], ids=["plan", "fields"])
def test_opcheck_passes(plugins, name, keyed):
    plan, args, keywords = call(name, **comparable(name))
    key = {"plan": plan.key} if keyed else {}
    torch.library.opcheck(packet(name).default, args, {**keywords, **key})


@pytest.mark.parametrize("name", RETURNING)
def test_opcheck_passes_for_the_out_form(plugins, name):
    plan, args, keywords = call(name, **comparable(name))
    torch.library.opcheck(packet(name).out, args, {**keywords, "plan": plan.key, **buffers(plan, args)})


def test_a_written_workspace_is_declared(plugins):
    acme = Probe(present=True, arch="acme2")
    plugins.add("acme", kernel("moe_experts", build="fake_kernels:scribbles"), torch_device="cpu", probe=acme)
    plan, args, keywords = call("moe_experts")
    workspace = torch.zeros(64, dtype=torch.uint8)
    torch.library.opcheck(
        packet("moe_experts").default, args, {**keywords, "plan": plan.key, "workspace": workspace}
    )
    plan.op(*args, workspace=workspace)
    assert workspace.unique().tolist() == [0xAB]


# --- autograd -----------------------------------------------------------------------------------


def test_an_input_that_requires_grad_meets_a_sentence(plugins):
    plan, args, _ = call("merge_attn_states")
    outs = args[0].float().requires_grad_()
    spec = dataclasses.replace(plan.spec, dtype="float32")
    plan = hal.plan("merge_attn_states", spec, device="cpu")
    with pytest.raises(ContractError) as caught:
        plan.op(outs, args[1])
    assert str(caught.value) == (
        "kimi_hal.merge_attn_states: it has no backward, and an input requires grad; "
        "call it under torch.no_grad() or detach it"
    )
    with torch.no_grad():
        assert plan.op(outs, args[1])[0].shape == (4, 3, 16)
    assert plan.op(outs.detach(), args[1])[0].requires_grad is False


def test_inference_mode_works(plugins):
    with torch.inference_mode():
        plan, args, _ = call("store_latent")
        plan.op(*args)


def test_autograd_is_told_what_is_written(plugins):
    plan, args, _ = call("kda_decode")
    state = args[7]
    before = state._version
    plan.op(*args)
    assert state._version > before


# --- torch.compile ------------------------------------------------------------------------------


def compiled(fn, **options):
    torch._dynamo.reset()
    return torch.compile(fn, fullgraph=True, backend="aot_eager", **options)


@pytest.mark.parametrize("name", [n for n, op in OPERATORS.items() if not op.listed])
def test_a_compiled_call_is_one_graph_with_the_same_bits(plugins, name):
    plan, args, _ = call(name)
    expected, written = plan.run(*args), args
    plan, args, _ = call(name)

    def step(*operands):
        return plan.op(*operands)

    assert same(compiled(step)(*args), expected)
    assert same(args, written)


LONE = [name for name, op in OPERATORS.items() if torch_ops.lone_workspace(op)]


def inductor(name):
    plan, args, _ = call(name)
    expected, written = plan.run(*args), args
    plan, args, _ = call(name)
    torch._dynamo.reset()
    assert same(torch.compile(lambda *operands: plan.op(*operands), fullgraph=True)(*args), expected)
    assert same(args, written)


@pytest.mark.parametrize("name", LONE)
def test_inductor_takes_an_operator_whose_only_written_argument_is_absent(plugins, name):
    inductor(name)


@pytest.mark.full
@pytest.mark.parametrize("name", [n for n, op in OPERATORS.items() if not op.listed and n not in LONE])
def test_inductor_takes_every_operator(plugins, name):
    inductor(name)


@pytest.mark.parametrize("name", RETURNING)
def test_a_compiled_call_fills_the_callers_buffers(plugins, name):
    plan, args, _ = call(name)
    expected = plan.run(*args)
    plan, args, _ = call(name)
    outs = buffers(plan, args)

    def step(*operands):
        return plan.op(*operands, **outs)

    assert same(compiled(step)(*args), expected)
    assert same(list(outs.values()), expected)


def test_caches_that_are_views_of_one_packed_buffer_are_written_in_one_graph(plugins):
    plan, (kv_c, k_pe, slots, _, k_scale), _ = call("store_latent")
    width = plan.spec.page * 576

    def views():
        packed = torch.zeros(3, 2 * width + 64, dtype=torch.uint8)
        return packed, packed[:, :width], packed[:, width : 2 * width]

    def step(first, second):
        plan.op(kv_c, k_pe, slots, first, k_scale)
        plan.op(-kv_c, k_pe, slots, second, k_scale)

    eager, *caches = views()
    step(*caches)
    traced, *caches = views()
    compiled(step)(*caches)
    assert torch.equal(traced, eager)
    assert eager[:, :width].any()
    assert eager[:, width:].any()


def test_one_graph_serves_every_row_count(plugins):
    plan, args, _ = call("sparse_mla")
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    step = torch.compile(lambda *a: plan.op(*a), fullgraph=True, dynamic=True, backend=backend)
    q, cache, indices, k_scale = args
    for rows in (7, 2, 5, 9):  # the first is no other size of the call, or the tracer would tie them
        more = (q.repeat(3, 1, 1)[:rows], cache, indices.repeat(3, 1)[:rows], k_scale)
        assert same(step(*more), plan.run(*more))
    assert len(graphs) == 1


@pytest.mark.parametrize("name", [n for n, op in OPERATORS.items() if not op.listed])
def test_shapes_under_tracing_are_those_of_the_call(plugins, name):
    from torch._subclasses import FakeTensorMode

    plan, args, _ = call(name)
    with FakeTensorMode() as mode:
        given = [[mode.from_tensor(t) for t in a] if isinstance(a, list) else a for a in args]
        given = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in given]
        traced = plan.op(*given)
    real = plan.run(*args)
    for fake, tensor in zip(tensors_of([traced]), tensors_of([real]), strict=True):
        assert (fake.shape, fake.dtype, fake.stride()) == (tensor.shape, tensor.dtype, tensor.stride())


def test_the_graph_holds_the_plans_key_and_so_does_what_is_cached_by_it(plugins):
    plan, args, _ = call("sparse_mla")
    nodes = []

    def backend(graph, inputs):
        nodes.extend(n for n in graph.graph.nodes if n.op == "call_function" and "kimi_hal" in str(n.target))
        return graph

    torch._dynamo.reset()
    torch.compile(lambda *a: plan.op(*a), fullgraph=True, backend=backend)(*args)
    (node,) = nodes
    assert node.kwargs["plan"] == plan.key
    assert node.target is packet("sparse_mla").default


# --- registration -------------------------------------------------------------------------------


def run_python(text):
    return subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_importing_the_package_imports_no_torch_and_registers_nothing():
    assert run_python("import kimi_hal, sys; print('torch' in sys.modules)") == "False"


def test_importing_the_plan_registers_the_operators():
    text = "import kimi_hal.dispatch.plan, torch; print(torch.ops.kimi_hal.sparse_mla.out._schema.name)"
    assert run_python(text) == "kimi_hal::sparse_mla"


def test_registering_twice_changes_nothing():
    before = packet("sparse_mla").default
    torch_ops.register()
    assert packet("sparse_mla").default is before


def test_plans_of_one_key_are_told_apart_by_device(plugins):
    plan, _, _ = call("sparse_mla")
    assert PLANS.find(plan.key, "cpu") is plan
    with pytest.raises(PlanError, match=f"plan {plan.key[:12]} is for cpu, the operands are on cuda:0"):
        PLANS.find(plan.key, "cuda:0")
