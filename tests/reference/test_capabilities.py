"""What the reference declares: every legal Spec of every operator, and nothing that the loader refuses."""

from __future__ import annotations

import dataclasses

import pytest
from fake_plugins import LIMITS

from kimi_hal.dispatch import fields, validation
from kimi_hal.dispatch.selection import select
from kimi_hal.domain import OneOf, Range
from kimi_hal.errors import SpecError
from kimi_hal.ops import OPERATORS
from kimi_hal.ops.kda import KDASpec
from kimi_hal.ops.sparse_mla import SparseMLASpec
from kimi_hal.ops.spec import ANY_FLOAT
from kimi_hal.presets import Deployment
from kimi_hal.reference import capabilities
from kimi_hal.settings import Settings

FORMATS = {"index.mxfp4.page64", "latent.nvfp4.352", "experts.mxfp4-pack"}


def choose(op, spec):
    return select(op, spec, LIMITS, device="cpu", implementation=None, settings=Settings())


def test_every_operator_has_one_implementation():
    assert sorted(i.operator for i in capabilities.IMPLEMENTATIONS) == sorted(OPERATORS)
    assert {i.name for i in capabilities.IMPLEMENTATIONS} == {"torch"}


def test_the_loader_has_nothing_against_it():
    assert list(validation.implementations_problems(capabilities.IMPLEMENTATIONS)) == []


@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_every_field_is_named_and_of_its_own_kind(name):
    for covered in capabilities.coverage(OPERATORS[name].spec_type):
        for leaf in fields.leaves(OPERATORS[name].spec_type).values():
            domain = covered[leaf.name]
            strings = isinstance(leaf.default, str) or leaf.hint is str
            assert not strings or isinstance(domain, OneOf), f"{leaf.name} is text, its domain {domain}"
            assert domain is not ANY_FLOAT or leaf.hint in (float, float | None), leaf.name


@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_the_models_own_specs_are_covered(plugins, name):
    spec = Deployment(tp=8).specs()[name]
    assert choose(OPERATORS[name], spec).full_name == "reference.torch"


def edges(domain):
    """Return the ends of a range, or every listed value."""
    return domain.values if isinstance(domain, OneOf) else (domain.low, domain.high)


@pytest.mark.parametrize(
    ("op", "spec"),
    [
        ("sparse_mla", SparseMLASpec(num_heads=12, latent="latent.bf16")),
        ("kda_decode", KDASpec(num_heads=12)),
    ],
)
def test_every_legal_value_is_covered(plugins, op, spec):
    tried = 0
    for field in dataclasses.fields(spec):
        if field.name not in spec.DOMAIN:
            continue
        for value in edges(spec.DOMAIN[field.name]):
            try:
                changed = dataclasses.replace(spec, **{field.name: value})
            except SpecError:  # illegal beside the other fields
                continue
            assert choose(OPERATORS[op], changed).full_name == "reference.torch"
            tried += 1
    assert tried > len(spec.DOMAIN)


def test_a_field_that_may_be_none_is_covered_with_and_without(plugins):
    for bound in (-5.0, None):
        assert (
            choose(OPERATORS["kda_gate"], KDASpec(num_heads=12, lower_bound=bound)).full_name
            == "reference.torch"
        )


def test_nothing_else_is_made_at_each_reading():
    with pytest.raises(AttributeError, match="has no attribute 'IMPLEMENTATION'"):
        capabilities.IMPLEMENTATION  # noqa: B018


def test_formats_are_listed():
    named = set()
    for implementation in capabilities.IMPLEMENTATIONS:
        for capability in implementation.capabilities:
            for domain in capability.spec.values():
                named |= set(domain.values) if not isinstance(domain, Range) else set()
    assert named >= FORMATS
