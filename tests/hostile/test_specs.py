"""Specs and Limits from hostile hands: values that only look like the ones meant, and JSON that is none."""

from __future__ import annotations

import enum
import json

import numpy as np
import pytest

import kimi_hal as hal
from kimi_hal.errors import SpecError
from kimi_hal.ops.indexer import IndexQuerySpec
from kimi_hal.specs import KDASpec, Limits, SparseMLASpec

FP8 = "latent.fp8.e4m3fn.tensor"
LIMITS = Limits(max_rows=4, max_reqs=4)


class Heads(enum.IntEnum):
    TWO = 2


class Latent(enum.StrEnum):
    FP8 = FP8


class OldLatent(str, enum.Enum):  # noqa: UP042  (how it was written before StrEnum; its str() is another)
    FP8 = FP8


def mla(**fields: object) -> SparseMLASpec:
    return SparseMLASpec(**{"num_heads": 2, "latent": FP8, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "given", "plain"),
    [
        ("softmax_scale", 1, 1.0),
        ("softmax_scale", np.float64(0.5), 0.5),
        ("softmax_scale", -0.0, 0.0),
        ("num_heads", Heads.TWO, 2),
        ("latent", Latent.FP8, FP8),
        ("latent", OldLatent.FP8, FP8),
        ("latent", np.str_(FP8), FP8),
        ("index_space", np.str_("local"), "local"),
    ],
)
def test_a_value_that_equals_another_gives_the_same_spec_and_key(field, given, plain):
    spec, other = mla(**{field: given}), mla(**{field: plain})
    assert spec == other
    assert spec.key() == other.key()
    assert type(getattr(spec, field)) is type(plain)
    assert repr(spec) == repr(other)


@pytest.mark.parametrize(("bound", "same"), [(-5, -5.0), (-0.0, 0.0), (0, 0.0)])
def test_an_optional_float_has_one_form_too(bound, same):
    assert KDASpec(num_heads=1, lower_bound=bound).key() == KDASpec(num_heads=1, lower_bound=same).key()
    assert KDASpec(num_heads=1, lower_bound=None).lower_bound is None


def test_a_number_beyond_any_float_is_refused():
    with pytest.raises(SpecError, match=r"softmax_scale=10+ is not 0 to 65536"):
        mla(softmax_scale=10**400)


def test_tuples_hold_plain_values():
    numerics = (np.str_("attn.p=bf16"),)
    assert json.loads(mla(numerics=numerics).key())["numerics"] == ["attn.p=bf16"]
    assert type(mla(numerics=numerics).numerics[0]) is str


def test_an_enums_member_can_be_planned_and_run_as_a_torch_operator():
    spec = IndexQuerySpec(index="index.fp8.e4m3fn.f32.page64", num_heads=Heads.TWO)
    plan = hal.plan("quantize_index_query", spec, LIMITS, device="cpu")
    assert plan.key == hal.plan("quantize_index_query", _with_two_heads(), LIMITS, device="cpu").key


def _with_two_heads() -> IndexQuerySpec:
    return IndexQuerySpec(index="index.fp8.e4m3fn.f32.page64", num_heads=2)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "SparseMLASpec: no JSON text: Expecting value: line 1 column 1 (char 0)"),
        ("[]", "SparseMLASpec is made of an object of fields, got list []"),
        ("null", "SparseMLASpec is made of an object of fields, got NoneType None"),
        ('"latent"', "SparseMLASpec is made of an object of fields, got str 'latent'"),
        ("{}", "SparseMLASpec needs num_heads, latent: no default"),
        (
            f'{{"num_heads": {{"a": 1}}, "latent": "{FP8}"}}',
            "SparseMLASpec: num_heads must be int, got dict {'a': 1}; num_heads={'a': 1} is not 1 to 128",
        ),
        (
            f'{{"num_heads": 2, "latent": "{FP8}", "dcp": {{"world": {{}}}}}}',
            "DCP: world must be int, got dict {}; world={} is not 1 to 64",
        ),
        (
            f'{{"num_heads": 2, "latent": "{FP8}", "numerics": [["a"]]}}',
            "SparseMLASpec: numerics must be tuple[str, ...], got tuple (['a'],)",
        ),
    ],
)
def test_json_that_is_no_spec_is_a_sentence(text, sentence):
    with pytest.raises(SpecError) as error:
        SparseMLASpec.from_json(text)
    assert str(error.value) == sentence


def test_a_field_that_is_no_name_is_a_sentence():
    with pytest.raises(SpecError, match="SparseMLASpec has no field 1"):
        SparseMLASpec.from_dict({1: 2})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("buckets", "sentence"),
    [
        ((-1,), "Limits: row_buckets holds -1, outside 0 to max_rows=8"),
        ((4, 9), "Limits: row_buckets holds 9, outside 0 to max_rows=8"),
        ((8, 4), "Limits: row_buckets must ascend, got [8, 4]"),
        ((4, 4), "Limits: row_buckets must ascend, got [4, 4]"),
    ],
)
def test_buckets_that_no_call_can_fill_are_refused(buckets, sentence):
    with pytest.raises(SpecError) as error:
        Limits(max_rows=8, max_reqs=1, row_buckets=buckets)
    assert str(error.value) == sentence
