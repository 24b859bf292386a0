"""Every operator has a small legal call in ``inputs.py``, which other tests rely on."""

from __future__ import annotations

import pytest
import torch

import kimi_hal as hal
from inputs import CALLS, example
from kimi_hal.dispatch.capture import tensors_of
from kimi_hal.ops import OPERATORS, check
from kimi_hal.ops.check import Terms
from kimi_hal.ops.operator import output_shapes, torch_dtype


def test_every_operator_has_an_example():
    assert sorted(CALLS) == sorted(OPERATORS)


@pytest.mark.parametrize("name", OPERATORS)
def test_an_example_is_a_legal_call_with_finite_results(plugins, monkeypatch, name):
    monkeypatch.setenv("KIMI_HAL_CHECK", "args")
    spec, limits, args, kwargs = example(name)
    result = hal.plan(name, spec, limits, device="cpu").run(*args, **kwargs)
    for tensor in tensors_of([result]):
        if tensor.is_floating_point():
            assert not torch.isnan(tensor.float()).any()


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("device", [None, "cpu"])
def test_the_straight_line_passes_a_legal_call_alone(monkeypatch, name, device):
    spec, limits, args, kwargs = example(name)
    checker = check.compiled(OPERATORS[name], spec, limits, device=device)
    given = OPERATORS[name].signature.bind(*args, **kwargs).arguments
    monkeypatch.setattr(check, "problems", lambda *a: pytest.fail("the long way was taken"))
    checker(**given)
    checker(**given, **buffers(name, spec, limits, given))


def buffers(name, spec, limits, given):
    shapes = output_shapes(OPERATORS[name], spec, limits, given)
    return {s.keyword: torch.empty(s.shape, dtype=torch_dtype(s.dtype)) for s in shapes}


@pytest.mark.parametrize("name", OPERATORS)
def test_both_forms_of_the_check_agree_on_every_wrong_operand(name):
    op = OPERATORS[name]
    spec, limits, args, kwargs = example(name)
    given = dict(op.signature.bind(*args, **kwargs).arguments)
    given |= buffers(name, spec, limits, given)
    checker, terms = check.compiled(op, spec, limits), Terms(limits=limits)
    refuses = 0
    for operand in [*op.args, *(out.keyword for out in op.outs)]:
        for wrong in spoiled(given.get(operand)):
            changed = {**given, operand: wrong}
            reasons = check.problems(op, spec, changed, terms)
            if not reasons:
                checker(**changed)
                continue
            refuses += 1
            with pytest.raises(hal.errors.ContractError) as caught:
                checker(**changed)
            assert list(caught.value.reasons) == reasons
    assert refuses > len(op.args)


def spoiled(value):
    """Yield wrong operands in the place of a right one; some may be legal for an operand."""
    if value is None:
        yield torch.zeros(1)
        return
    yield None
    yield "text"
    if isinstance(value, list):
        yield value[0]
        yield value[:-1]
        yield from ([*value[:-1], wrong] for wrong in spoiled(value[-1]) if isinstance(wrong, torch.Tensor))
        return
    if not isinstance(value, torch.Tensor):
        return
    yield value.to(torch.float64) if value.dtype != torch.float64 else value.float()
    yield value[None]
    yield value[..., None].expand(*value.shape, 2)
    yield torch.cat([value, value], dim=-1)
    if value.dim() > 1:
        yield value.transpose(-1, -2).contiguous().transpose(-1, -2)
        yield value.transpose(0, 1)
