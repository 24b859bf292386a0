"""Matching: what a capability covers, closed world, and every reason against it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from typing import ClassVar

import pytest
from fake_plugins import FP8, LIMITS, SPEC, capability

from kimi_hal.dispatch import fields, matching
from kimi_hal.dispatch.contract import Capability, Preference, Properties, TensorCap
from kimi_hal.dispatch.matching import Target
from kimi_hal.domain import OneOf, Range
from kimi_hal.ops import sparse_mla
from kimi_hal.ops.sparse_mla import SparseMLASpec
from kimi_hal.ops.spec import DCP, Limits, Record, Spec

ACME2 = Target(arch="acme2", facts={"acme-driver": "5.1"})


def reasons(covered, spec=SPEC, limits=LIMITS, target=ACME2):
    return list(matching.refusals(sparse_mla, spec, limits, covered, target))


def spec(**changes):
    return dataclasses.replace(SPEC, **changes)


def test_what_is_covered_has_no_reason():
    assert reasons(capability()) == []


def test_a_field_that_is_not_named_is_covered_at_its_default_only():
    assert reasons(capability(), spec(page=128, return_lse=False)) == [
        "page=128 is not covered, only its default 64",
        "return_lse=False is not covered, only its default True",
    ]


def test_a_named_field_is_covered_in_its_domain_only():
    covered = capability(spec={"page": OneOf((128,)), "num_heads": Range(16, 64, multiple=16)})
    assert reasons(covered) == ["num_heads=12 is not 16 to 64, a multiple of 16", "page=64 is not 128"]


def test_a_required_field_that_is_not_named_is_not_covered():
    assert reasons(Capability(("acme2",), {"latent": OneOf((FP8,))})) == ["num_heads=12 is not covered"]


def test_nested_fields_are_dotted():
    under = spec(dcp=DCP(world=4, rank=3))
    assert reasons(capability(), under) == [
        "dcp.world=4 is not covered, only its default 1",
        "dcp.rank=3 is not covered, only its default 0",
    ]
    assert reasons(capability(spec={"dcp.world": Range(1, 8), "dcp.rank": Range(0, 7)}), under) == []


def test_an_architecture_is_covered_by_name_or_star():
    assert reasons(capability(arch=("acme1", "acme3"))) == ["arch acme2 is not acme1 | acme3"]
    assert reasons(capability(arch=("*",))) == []


def test_away_from_its_device_the_architecture_does_not_count():
    assert reasons(capability(arch=("acme1",)), target=Target(foreign=True)) == []


def test_limits_are_unconstrained_unless_named():
    large = Limits(max_rows=9000, max_reqs=9000)
    assert reasons(capability(), limits=large) == []
    assert reasons(capability(limits={"max_rows": Range(1, 4096)}), limits=large) == [
        "max_rows=9000 is not 1 to 4096"
    ]


def test_unknown_limits_are_not_covered_where_they_are_named():
    assert reasons(capability(limits={"max_rows": Range(1, 4096)}), limits=None) == [
        "max_rows is unknown without Limits; it covers 1 to 4096"
    ]


def test_every_bucket_must_be_covered():
    buckets = Limits(max_rows=256, max_reqs=64, row_buckets=(8, 12))
    assert reasons(capability(limits={"row_buckets": Range(8, 256, multiple=8)}), limits=buckets) == [
        "row_buckets=(8, 12) is not 8 to 256, a multiple of 8"
    ]


def test_static_rows_need_buckets():
    static = capability(properties=Properties(static_rows=True))
    assert reasons(static) == ["it needs Limits.row_buckets, the row counts to compile for"]
    assert reasons(static, limits=Limits(max_rows=8, max_reqs=8, row_buckets=(8,))) == []


def test_a_tensor_dtype_that_the_spec_asks_and_the_kernel_lacks():
    only = capability(
        spec={"q_dtype": OneOf(("bfloat16", "float8_e4m3fn"))}, tensors={"q": TensorCap(("bfloat16",))}
    )
    assert reasons(only) == []
    assert reasons(only, spec(q_dtype="float8_e4m3fn")) == ["q: bfloat16 only, Spec asks float8_e4m3fn"]


@pytest.mark.parametrize(
    ("requires", "expected"),
    [
        ({"acme-driver": ">=5.0"}, []),
        ({"acme-driver": ">=6"}, ["acme-driver 5.1 is installed; it needs acme-driver>=6"]),
        ({"pluggy": ">=1.7"}, []),
        (
            {"pluggy": "<1"},
            [f"pluggy {importlib.metadata.version('pluggy')} is installed; it needs pluggy<1"],
        ),
        ({"acme-runtime": ">=1"}, ["acme-runtime is not installed; it needs acme-runtime>=1"]),
    ],
)
def test_requirements_are_probe_facts_or_distributions(requires, expected):
    assert reasons(capability(requires=requires)) == expected


def test_a_fact_that_is_no_version_is_a_reason():
    assert reasons(
        capability(requires={"firmware": ">=2"}), target=Target("acme2", {"firmware": "blue"})
    ) == ["firmware>=2 cannot be checked: 'blue' is not a version number"]


def test_away_from_its_device_its_driver_is_not_required():
    covered = capability(requires={"acme-driver": ">=5"})
    away = Target(facts={}, foreign=True, probed=("acme-driver",))
    assert reasons(covered, target=away) == []


def test_a_library_is_required_away_from_the_device_too():
    away = Target(facts={}, foreign=True, probed=("acme-driver",))
    covered = capability(requires={"acme-runtime": ">=1"})
    assert reasons(covered, target=away) == ["acme-runtime is not installed; it needs acme-runtime>=1"]


def test_all_reasons_are_told():
    covered = capability(arch=("acme1",), limits={"max_rows": Range(1, 8)}, requires={"acme-driver": ">=6"})
    assert reasons(covered, spec(num_heads=128, page=128)) == [
        "arch acme2 is not acme1",
        "page=128 is not covered, only its default 64",
        "max_rows=256 is not 1 to 8",
        "acme-driver 5.1 is installed; it needs acme-driver>=6",
    ]


@pytest.mark.parametrize(
    ("preference", "expected"),
    [
        (Preference(rank=1), True),
        (Preference(rank=1, spec={"num_heads": Range(1, 64)}), True),
        (Preference(rank=1, spec={"num_heads": Range(64, 128)}), False),
        (Preference(rank=1, limits={"max_rows": Range(1, 320)}), True),
        (Preference(rank=1, limits={"max_rows": Range(1, 32)}), False),
        (Preference(rank=1, arch=("acme2",)), True),
        (Preference(rank=1, arch=("acme1",)), False),
    ],
)
def test_a_preference_is_about_what_it_names(preference, expected):
    assert matching.prefers(preference, SPEC, LIMITS, ACME2) is expected


def test_a_preference_by_limits_does_not_match_unknown_limits():
    assert not matching.prefers(Preference(rank=1, limits={"max_rows": Range(1, 320)}), SPEC, None, ACME2)


def test_away_from_its_device_a_preference_for_any_architecture_counts():
    elsewhere = Preference(rank=1, arch=("acme1",))
    assert matching.prefers(elsewhere, SPEC, LIMITS, Target(foreign=True))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part(Record):
    size: int
    flag: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Whole(Spec):
    part: Part
    other: Part | None = None
    quota: int | None = None
    bound: float | None = -5.0

    DOMAIN: ClassVar = {"quota": Range(1, 64)}


def test_fields_are_flat_and_optional_records_stand_for_themselves():
    assert list(fields.leaves(Whole)) == [
        "part.size", "part.flag", "other", "other.size", "other.flag", "quota", "bound",
    ]  # fmt: skip
    assert fields.values(Whole(part=Part(size=1))) == {
        "part.size": 1, "part.flag": False, "other": None, "quota": None, "bound": -5.0,
    }  # fmt: skip


def of_whole(covered, whole):
    return list(matching.refusals(sparse_mla, whole, None, Capability(("*",), covered), Target()))


ONE = {"part.size": Range(1, 4)}


def test_none_is_covered_where_it_is_the_default():
    assert of_whole(ONE | {"quota": Range(1, 8)}, Whole(part=Part(size=1))) == []


def test_none_is_not_covered_where_it_is_not_the_default():
    whole = Whole(part=Part(size=1), bound=None)
    assert of_whole(ONE | {"bound": Range(-5, 0)}, whole) == ["bound=None is not -5 to 0"]
    assert of_whole(ONE | {"bound": OneOf((None,))}, whole) == []


def test_an_optional_record_is_covered_by_its_fields():
    whole = Whole(part=Part(size=1), other=Part(size=2, flag=True))
    assert of_whole(ONE, whole) == [
        "other is given; it is not covered, only its default None",
        "other.size=2 is not covered",
        "other.flag=True is not covered, only its default False",
    ]
    assert of_whole(ONE | {"other.size": Range(1, 4), "other.flag": OneOf((True,))}, whole) == []


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Usual(Spec):
    part: Part | None = Part(size=1)


def test_an_absent_record_is_not_covered_where_it_is_usual():
    assert of_whole(ONE, Usual(part=None)) == ["part=None is not covered"]
    assert of_whole(ONE | {"part": OneOf((None,))}, Usual(part=None)) == []


def test_the_same_field_twice_is_the_same_default():
    assert fields.leaves(SparseMLASpec)["dcp.interleave"].default == 1
    assert fields.leaves(SparseMLASpec)["num_heads"].default is fields.REQUIRED
