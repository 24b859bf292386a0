"""``KIMI_HAL_CHECK=shadow:N``: the reference repeats one call in N; a wrong kernel is found in a running engine."""

from __future__ import annotations

import dataclasses

import fake_kernels
import pytest
import torch
from fake_kernels import kernel

import kimi_hal as hal
from inputs import LIMITS, example
from kimi_hal.dispatch import budget, policy, touched
from kimi_hal.dispatch.contract import Probe, Properties
from kimi_hal.dispatch.table import PLANS
from kimi_hal.errors import ContractError, ShadowError
from kimi_hal.ops import OPERATORS
from kimi_hal.reference import sizes, weights

COMPARED = [name for name, op in OPERATORS.items() if not op.listed and not op.composite]


@pytest.fixture
def shadow(plugins, monkeypatch):
    """Return a function that plans an example under ``shadow:N``, its kernel spoilt or not."""
    monkeypatch.setattr(fake_kernels, "SPOILT", {})

    def plan(name, spoil=None, every=1, spec=None, **fields):
        fields.setdefault("records", sizes.RECORDS if name in ("kda_verify", "kda_commit") else None)
        fields.setdefault("weights_format", weights.FORMAT if "weights" in OPERATORS[name].args else None)
        plugins.points.clear()
        policy.thaw()
        plugins.add(
            "acme", kernel(name, **fields), torch_device="cpu", probe=Probe(present=True, arch="acme2")
        )
        monkeypatch.setenv("KIMI_HAL_CHECK", f"shadow:{every}")
        if spoil is not None:
            fake_kernels.SPOILT[name] = spoil
        own, limits, args, _ = example(name)
        return hal.plan(name, spec or own, limits, device="cpu", implementation="acme.fast"), list(args)

    return plan


def difference(plan, args, **kwargs):
    with pytest.raises(ShadowError) as caught:
        plan.run(*args, **kwargs)
    return caught.value


@pytest.mark.parametrize("name", COMPARED)
def test_a_right_kernel_passes(shadow, name):
    plan, args = shadow(name)
    assert plan.run.__name__ == f"shadowed_{name}"
    result = plan.run(*args)
    PLANS.clear()  # else a commit would look for its pair among two plans of a verify
    reference, again = (
        hal.plan(name, plan.spec, LIMITS, device="cpu", implementation="reference.torch"),
        example(name).args,
    )
    expected = reference.run(*again)
    for mine, theirs in zip(flat(result), flat(expected), strict=True):
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(flat(args), flat(again), strict=True):
        assert mine.shape[-1] == 0 or mine.dtype == torch.uint8 or torch.equal(mine, theirs)


def flat(value):
    if isinstance(value, list | tuple):
        return [t for inner in value for t in flat(inner)]
    return [value] if isinstance(value, torch.Tensor) else []


def test_a_wrong_result_is_named_with_its_call(shadow):
    plan, args = shadow("sparse_mla", lambda results, given: (results[0] * 1.1, results[1]))
    error = difference(plan, args)
    assert (error.operator, error.implementation, error.call) == ("sparse_mla", "acme.fast", 1)
    assert str(error).startswith("sparse_mla: acme.fast differs in call 1: out is off by up to ")
    assert str(error).endswith("of its norm, the budget is 0.0156")


def test_one_call_in_n_is_compared_beginning_with_the_first(shadow):
    calls = []

    def spoil(results, given):
        calls.append(1)
        return results if len(calls) in (1, 4) else (results[0] + 1, results[1])

    plan, args = shadow("sparse_mla", spoil, every=3)
    for _ in range(6):
        plan.run(*args)  # calls 1 and 4 are compared, and right
    assert difference(plan, args).call == 7


def test_every_output_that_differs_is_told(shadow):
    plan, args = shadow("merge_attn_states", lambda results, given: (results[0] + 3, results[1] - 2))
    out, lse = difference(plan, args).reasons
    assert out.startswith("out is off by up to 3")
    assert lse.startswith("lse_out is off by up to 2;")


def test_an_output_of_zeros_is_found(shadow):
    plan, args = shadow("sparse_mla", lambda results, given: (results[0] * 0, results[1]))
    assert "the error of row 0 is 1 of its norm" in str(difference(plan, args))


def test_nan_where_the_reference_has_none_is_found(shadow):
    def spoil(results, given):
        results[0][2, 1, 7] = torch.nan
        return results

    plan, args = shadow("sparse_mla", spoil)
    assert "out is nan in row 2, the reference has " in str(difference(plan, args))


def test_an_lse_of_a_row_without_keys_must_be_minus_infinity(shadow):
    plan, args = shadow("sparse_mla", lambda results, given: (results[0], results[1].clamp(min=-1e30)))
    assert "lse_out is -1.0000000150474662e+30 in row 1, the reference has -inf (2 such elements)" in str(
        difference(plan, args)
    )


def test_a_byte_written_beside_its_slot_is_found(shadow):
    def spoil(results, given):
        given["cache"][0, 5] ^= 1  # slot 3 of page 0 is written, this byte is slot 0's

    plan, args = shadow("store_latent", spoil)
    assert (
        difference(plan, args)
        .reasons[0]
        .startswith("cache differs in 1 of 18432 elements, first at [0, 5]: ")
    )


def test_a_cache_is_compared_where_slots_name_it_and_copied_nowhere_else(shadow):
    plan, args = shadow("store_latent")
    cache = args[3]
    taken = touched.snapshot(plan.operator, plan.spec, dict(zip(plan.operator.args, args, strict=True)))
    assert taken.arguments["cache"].shape == (2, cache.shape[1])  # slots 3 and 20: pages 0 and 1 of 3
    assert taken.arguments["slots"].tolist() == [3, -1, 20]
    args[2] = torch.tensor([-5, 40, 1 << 40])
    taken = touched.snapshot(plan.operator, plan.spec, dict(zip(plan.operator.args, args, strict=True)))
    assert taken.arguments["slots"].tolist() == [-5, 8, 16]  # page 2 alone; what is out of range stays so


def test_a_slot_out_of_range_writes_nothing_and_is_no_difference(shadow):
    plan, args = shadow("store_latent")
    args[2] = torch.tensor([48, 1 << 40, 7])
    plan.run(*args)


def test_a_state_that_advances_twice_is_found(shadow):
    def spoil(results, given):
        given["state"][0] *= 1.5

    plan, args = shadow("kda_decode", lambda results, given: spoil(results, given) or results)
    assert difference(plan, args).reasons[0].startswith("state is off by up to ")


def test_every_layer_of_a_commit_is_compared(shadow):
    def spoil(results, given):
        given["states"][1][2] += 1

    plan, args = shadow("kda_commit", spoil)
    assert [r.split()[0] for r in difference(plan, args).reasons] == ["states[1]"]


def test_a_verify_leaves_states_alone_and_its_records_are_its_own(shadow):
    def spoil(results, given):
        given["records"].random_(0, 255)
        return results

    plan, args = shadow("kda_verify", spoil, records="acme.ring")
    plan.run(*args)


def test_an_output_over_its_own_input_is_compared_with_the_input_as_it_was(shadow):
    plan, args = shadow("merge_attn_states")
    plan.run(*args, out=args[0][0])
    plan, args = shadow("merge_attn_states", lambda results, given: (results[0].mul_(2), results[1]))
    assert "out is off" in str(difference(plan, args, out=args[0][0]))


def test_columns_that_are_unspecified_are_not_compared(shadow):
    def spoil(results, given):
        results[0, 100:] = torch.nan
        results[2] = torch.nan
        return results

    plan, args = shadow("indexer_logits", spoil)
    plan.run(*args)

    def visible(results, given):
        results[1, 6] += 1
        return results

    plan, args = shadow("indexer_logits", visible)
    assert difference(plan, args).reasons[0].startswith("out is off by up to 1;")


# --- selections ---------------------------------------------------------------------------------


def test_the_order_of_a_selection_is_free(shadow):
    spec = dataclasses.replace(example("indexer_topk").spec, ordered=False)

    def spoil(results, given):
        return results[0].flip(1), results[1].flip(1)

    plan, args = shadow("indexer_topk", spoil, spec=spec)
    plan.run(*args)


def test_a_selection_that_misses_a_better_key_is_found(shadow):
    def spoil(results, given):
        chosen = set(results[0][0].tolist())
        results[0][0, 0] = next(i for i in range(100) if i not in chosen)
        return results

    plan, args = shadow("indexer_topk", spoil)
    reason = difference(plan, args).reasons[0]
    assert reason.startswith("out selects another set in 1 of 3 rows; row 0 has [")


def test_a_near_tie_may_fall_either_way(shadow):
    plan, args = shadow("indexer_topk")
    index, scores = plan.built.run(*args)
    last = int(index[0, scores[0].argmin()])
    cache, table = args[3], args[4]
    free = next(i for i in range(100) if i not in index[0].tolist())
    fmt = hal.formats.index(plan.spec.index)
    page, other = (int(table[0, i // 64]) * 64 + i % 64 for i in (last, free))
    fmt.write(cache, torch.tensor([other]), fmt.read(cache, torch.tensor([page])))  # now the two tie exactly

    def spoil(results, given):
        if last < free:  # the contract takes the smaller position
            results[0][0][results[0][0] == last] = free
        else:
            results[0][0][results[0][0] == free] = last
        return results

    plan, _ = shadow("indexer_topk", spoil)
    plan.run(*args)


def test_a_selection_from_given_scores_has_no_freedom(shadow):
    def spoil(results, given):
        results[0][0, 0] = (results[0][0, 0] + 1) % 20
        return results

    plan, args = shadow("topk_select", spoil)
    assert "out selects another set in 1 of 3 rows" in str(difference(plan, args))


def test_scores_are_compared_by_their_ids(shadow):
    plan, args = shadow("topk_select", lambda results, given: (results[0].flip(1), results[1]))
    assert "scores_out is" in str(difference(plan, args))


def test_routed_weights_are_compared_by_expert(shadow):
    plan, args = shadow("moe_route", lambda results, given: (results[0].flip(1), results[1].flip(1)))
    plan.run(*args)
    plan, args = shadow("moe_route", lambda results, given: (results[0].flip(1), results[1]))
    assert "weights_out is off" in str(difference(plan, args))


# --- what cannot be compared --------------------------------------------------------------------


def test_weights_that_the_reference_cannot_read_are_not_compared_and_that_is_said(shadow, caplog):
    plan, _ = shadow("moe_experts", lambda results, given: results * 0, weights_format="acme.tiles")
    assert plan.run is plan.built.run
    why = "the reference cannot read weights in acme.tiles"
    assert f"moe_experts: KIMI_HAL_CHECK=shadow cannot compare acme.fast: {why}" in caplog.text
    assert f"  KIMI_HAL_CHECK=shadow:1, not compared: {why}" in plan.explain()


def test_records_that_the_reference_cannot_read_are_not_compared(shadow):
    plan, _ = shadow("kda_commit", records="acme.ring")
    assert plan.unshadowed == "the reference cannot read records in acme.ring"


def test_prepared_weights_are_not_compared(shadow):
    plan, _ = shadow("prepare_moe_weights")
    assert plan.unshadowed == "its result is the implementation's own format"


def test_the_reference_is_not_its_own_shadow(plugins, monkeypatch):
    monkeypatch.setenv("KIMI_HAL_CHECK", "shadow:1")
    spec, limits, *_ = example("merge_attn_states")
    plan = hal.plan("merge_attn_states", spec, limits, device="cpu")
    assert plan.run is plan.built.run


def test_a_traced_call_is_refused(shadow):
    plan, args = shadow("merge_attn_states")
    torch._dynamo.reset()
    with pytest.raises(
        Exception,
        match=r"KIMI_HAL_CHECK=shadow compares values, which a call traced by torch\.compile does not have",
    ):
        torch.compile(lambda *a: plan.run(*a), fullgraph=True, backend="eager")(*args)


def test_a_call_that_breaks_the_contract_is_the_callers(shadow):
    plan, args = shadow("merge_attn_states")
    with pytest.raises(ContractError, match="lses must be float32, got float64"):
        plan.run(args[0], args[1].double())


# --- budgets ------------------------------------------------------------------------------------


def test_a_declared_class_of_rounding_widens_the_budget(shadow):
    def spoil(results, given):
        return results[0] * 1.05, results[1]

    spec = dataclasses.replace(example("sparse_mla").spec, numerics=("attn.p=bf16",))
    plan, args = shadow("sparse_mla", spoil, spec=spec, numerics=("attn.p=bf16",))
    plan.run(*args)


def test_the_budget_follows_the_dtype_and_the_worst_class():
    assert budget.allowed("bfloat16", ()) == 2**-6
    assert budget.allowed("float32", ("attn.p=bf16",)) == 2**-7
    assert budget.allowed("float32", ("attn.p=bf16", "moe.act=fp8_block")) == 2**-4
    assert budget.allowed("bfloat16", ("attn.p=fp8",)) == 0.5


def test_one_wrong_row_is_not_hidden_by_the_others():
    right = torch.randn(1000, 64, generator=torch.Generator().manual_seed(0))
    wrong = right.clone()
    wrong[500] = wrong[501]
    assert next(budget.floats("out", wrong, right, ())).startswith("out is off by up to ")
    assert list(budget.floats("out", right * 1.0005, right, ())) == []


def test_a_row_of_almost_nothing_is_measured_against_the_largest():
    right = torch.zeros(2, 8)
    right[0] = 1000.0
    near = right.clone()
    near[1] = 1e-3
    assert list(budget.floats("out", near, right, ())) == []


def test_a_writer_that_breaks_ties_otherwise_is_judged_by_what_its_bytes_mean(shadow):
    def spoil(results, given):
        row = given["cache"][0].view(16, 576)[3]
        row[:] = torch.where(row & 7 == 0, row | 1, row)  # the next code up, in some places

    away = Properties(deterministic=True, writer_tie="away")
    plan, args = shadow("store_latent", spoil, properties=away)
    plan.run(*args)
    plan, args = shadow("store_latent", spoil)
    assert "cache differs in " in str(difference(plan, args))

    def negated(results, given):
        given["cache"][0].view(16, 576)[3] ^= 0x80

    plan, args = shadow("store_latent", negated, properties=away)
    assert "cache is off by up to " in str(difference(plan, args))
