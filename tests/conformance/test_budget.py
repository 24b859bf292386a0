"""The error budget accepts correct rounding and refuses the cheapest real faults."""

from __future__ import annotations

import pytest
import torch

from kimi_hal_conformance.budget import (
    ACCUMULATION_NORM,
    NONE,
    Unit,
    allowed,
    compare,
    compare_exact,
    rounding,
    unit,
)


def exact(n: int = 4096) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_the_correctly_rounded_result_passes_with_room() -> None:
    x = exact()
    measure = compare("out", x.bfloat16(), x, x.float())
    assert not measure.problem
    assert 0.3 < measure.norm < 0.7
    assert 0.3 < measure.maximum < 0.5


def test_a_one_percent_gain_fails() -> None:
    x = exact()
    assert compare("out", (x * 1.01).bfloat16(), x, x.float()).problem


def test_zeros_fail() -> None:
    x = exact() / 10
    assert compare("out", torch.zeros_like(x).bfloat16(), x, x.float()).problem


def test_truncation_instead_of_rounding_fails() -> None:
    x = exact()
    bits = x.float().view(torch.int32) & -65536
    assert compare("out", bits.view(torch.float32).bfloat16(), x, x.float()).problem


def test_one_entry_far_off_fails_by_its_maximum() -> None:
    x = exact()
    got = x.bfloat16()
    got[17] += 0.25
    measure = compare("out", got, x, x.float())
    assert measure.maximum > 1
    assert "times its budget" in measure.problem


def test_another_summation_order_passes_in_float32() -> None:
    terms = torch.randn(512, 2048, generator=torch.Generator().manual_seed(2))
    total = terms.double().sum(1)
    sequential = torch.zeros(512)
    for column in terms.unbind(1):
        sequential += column
    assert not compare("out", sequential, total, terms.sum(1)).problem


def test_nan_must_stand_where_the_oracle_has_it() -> None:
    x = exact(8)
    x[3] = torch.nan
    assert not compare("out", x.bfloat16(), x, x.float()).problem
    got = x.bfloat16()
    got[5] = torch.nan
    problem = compare("out", got, x, x.float()).problem
    assert problem == "NaN at 2 entries, expected at 1; first difference at [5]"


def test_an_infinity_that_rounding_makes_is_expected() -> None:
    x = torch.tensor([1e300, 1.0], dtype=torch.float64)
    assert not compare("out", x.float(), x, x.float()).problem


def test_a_result_that_bf16_can_hold_has_no_room_in_bf16() -> None:
    x = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert not compare("out", x.bfloat16(), x, x.float()).problem
    assert compare("out", torch.tensor([1.0, 2.015625]).bfloat16(), x, x.float()).problem


def test_what_float32_can_hold_may_have_been_computed_with_a_last_bit() -> None:
    """s · (1 / s) is not always 1: a kernel that multiplies by a reciprocal is as good as one that divides."""
    x = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert not compare("out", torch.tensor([1.0, 2.0000002]), x, x.float()).problem
    assert compare("out", torch.tensor([1.0, 2.00001]), x, x.float()).problem


def test_zero_has_no_room() -> None:
    x = torch.zeros(2, dtype=torch.float64)
    measure = compare("out", torch.tensor([0.0, 1e-30]), x, x.float())
    assert measure.norm is None
    assert measure.maximum is None
    assert measure.problem == "error 7.07e-31 rms and 1e-30 at most, where nothing has to be rounded"


def test_another_formula_of_a_kernel_counts_as_accumulation() -> None:
    x = exact(64)
    other = (x * (1 + 1e-5)).float()
    assert compare("out", other, x, x.float()).problem
    assert not compare("out", other, x, x.float(), others=[other]).problem


def test_admitted_roundings_inside_widen_the_budget() -> None:
    x = exact()
    twice = (x + 0.002 * exact().flip(0)).bfloat16()
    assert compare("out", twice, x, x.float(), inner=(x + 0.002 * exact().flip(0)).bfloat16()).norm < 1
    assert compare("out", (x * 1.01).bfloat16(), x, x.float(), inner=x.bfloat16()).problem


def test_few_entries_have_no_budget_by_luck() -> None:
    """0.5 + 2⁻²⁶ is close to a float32 number; a sigmoid that is one unit off is as good as any other."""
    x = torch.tensor([0.5 + 2.0**-32, 1.0], dtype=torch.float64)
    assert not compare("beta", torch.tensor([0.5 + 2.0**-24, 1.0]), x, x.float()).problem
    assert compare("beta", torch.tensor([0.5 + 2.0**-20, 1.0]), x, x.float()).problem


def test_few_entries_may_all_err_as_one_may() -> None:
    x = torch.tensor([0.7, 0.9, 0.8, 0.6], dtype=torch.float64)
    # What a right sum of 576 products was off by, where the reference's own was not.
    off = 12 * 2.0**-24 / 12**0.5
    assert not compare("lse_out", (x + off).float(), x, x.float()).problem
    assert compare("lse_out", (x + 4 * off).float(), x, x.float()).problem
    many = x.repeat(64)
    assert compare("lse_out", (many + off).float(), many, many.float()).problem


@pytest.mark.parametrize("n", [3, 12, 1000])
def test_sums_are_never_allowed_more_than_twice_their_root_mean_square(n: int) -> None:
    one = torch.zeros(n, dtype=torch.float64)
    one[0] = 1.0  # the worst there is: all of the reference's error in one entry
    a = unit(one, torch.zeros_like(one), torch.ones_like(one, dtype=torch.bool))
    limit = allowed(NONE, a, entries=n)
    assert limit.norm == pytest.approx(2 * ACCUMULATION_NORM * a.norm)
    even = unit(torch.ones_like(one), torch.zeros_like(one), torch.ones_like(one, dtype=torch.bool))
    assert allowed(NONE, even, entries=n).norm == pytest.approx(max(1.0, 2 / n**0.5) * ACCUMULATION_NORM)


def test_what_a_dtype_can_hold_costs_nothing() -> None:
    x = torch.tensor([0.5, 3.0, torch.inf], dtype=torch.float64)
    finite = torch.isfinite(x)
    assert rounding(x, torch.bfloat16, finite) == Unit(0.0, 0.0)
    assert rounding(x, torch.float32, torch.zeros(3, dtype=torch.bool)) == Unit(0.0, 0.0)


def test_the_expected_cost_of_rounding_is_the_measured_one() -> None:
    x, every = exact(1 << 16), torch.ones(1 << 16, dtype=torch.bool)
    for dtype in (torch.bfloat16, torch.float32):
        expected, measured = rounding(x, dtype, every), unit(x.to(dtype), x, every)
        assert abs(expected.norm / measured.norm - 1) < 0.01
        assert expected.maximum < measured.maximum


def test_the_parts_of_a_budget_are_said() -> None:
    x = exact()
    problem = compare("out", (x * 1.01).bfloat16(), x, x.float()).problem
    assert problem == (
        "error 0.00993 rms and 0.0372 at most is 4 and 1.94 times its budget "
        "(rounding 0.00166, accumulation 2.52e-08)"
    )


def test_discrete_tensors_are_equal_in_every_entry() -> None:
    expected = torch.tensor([[1, 2], [3, -1]], dtype=torch.int32)
    assert not compare_exact("out", expected.clone(), expected).problem
    got = expected.clone()
    got[1, 0] = 7
    assert (
        compare_exact("out", got, expected).problem
        == "1 of 4 entries differ; first at [1, 0]: got 7, expected 3"
    )


def test_a_wrong_shape_is_said() -> None:
    x = exact(4)
    assert compare("out", x.float()[:3], x, x.float()).problem == "shape [3], expected [4]"
