"""The reference as an implementation: one rounding, the caller's buffers, no input given back."""

from __future__ import annotations

import inspect

import pytest
import torch

import kimi_hal as hal
from inputs import LIMITS, example
from kimi_hal.dispatch.capture import tensors_of
from kimi_hal.ops import OPERATORS
from kimi_hal.ops.all_gather import GatherSpec
from kimi_hal.reference.backend import function

RETURNING = [name for name, op in OPERATORS.items() if op.outs]


def planned(name, spec=None):
    own, limits, args, _ = example(name)
    return hal.plan(name, spec or own, limits, device="cpu", implementation="reference.torch"), args


@pytest.mark.parametrize("name", OPERATORS)
def test_run_has_the_operators_own_signature(plugins, name):
    plan, _ = planned(name)
    assert inspect.signature(plan.run) == OPERATORS[name].signature
    assert plan.run.__code__.co_argcount + plan.run.__code__.co_kwonlyargcount == len(
        OPERATORS[name].signature.parameters
    )


@pytest.mark.parametrize("name", OPERATORS)
def test_no_result_is_an_input(plugins, name):
    plan, args = planned(name)
    homes = {t.untyped_storage().data_ptr() for t in tensors_of(args)}
    for tensor in tensors_of([plan.run(*args)]):
        assert not tensor.numel() or tensor.untyped_storage().data_ptr() not in homes


@pytest.mark.parametrize("layout", ["rank_major", "last_dim", "token_order"])
def test_a_gather_over_one_rank_is_a_copy(plugins, layout):
    x = torch.randn(4, 3)
    plan = hal.plan("all_gather", GatherSpec(layout=layout, dtype="float32"), LIMITS, device="cpu")
    y = plan.run(x)
    y.zero_()
    assert x.abs().min() > 0


@pytest.mark.parametrize("name", RETURNING)
def test_the_callers_buffers_are_filled_and_given_back(plugins, name):
    plan, args = planned(name)
    expected = [t.clone() for t in tensors_of([plan.run(*args)])]
    plan, args = planned(name)
    outs = {o.keyword: torch.empty_like(t) for o, t in zip(plan.operator.outs, expected, strict=True)}
    if name == "indexer_logits":
        outs["out"].fill_(-torch.inf)  # what nobody writes keeps its bytes
    result = plan.run(*args, **outs)
    assert isinstance(result, tuple) == (len(outs) > 1)
    for given, got, wanted in zip(outs.values(), tensors_of([result]), expected, strict=True):
        assert got is given
        assert torch.equal(got.view(torch.uint8), wanted.contiguous().view(torch.uint8))


def test_results_are_rounded_once(plugins):
    plan, args = planned("merge_attn_states")
    unrounded, _ = function(OPERATORS["merge_attn_states"])(plan.spec, *args)
    assert unrounded.dtype == torch.float32
    assert torch.equal(plan.run(*args)[0], unrounded.bfloat16())


def test_scores_for_tests_stand_beside_the_same_selection(plugins):
    plan, args = planned("indexer_topk")
    everything = torch.full((3, 128), torch.nan)
    index, scores, same = plan.run.return_scores(*args, all_scores_out=everything)
    assert same is everything
    assert all(torch.equal(a, b) for a, b in zip((index, scores), plan.run(*args), strict=True))
    assert torch.equal(everything[0, index[0].long()], scores[0])
    assert everything[0, 100:].isnan().all()
