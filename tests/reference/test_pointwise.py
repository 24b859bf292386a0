"""Elementwise functions and sums whose bits do not depend on place, layout or neighbours."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kda_cases import same_bits
from torch import Tensor

from kimi_hal.reference import pointwise

FUNCTIONS = [pointwise.sigmoid, pointwise.silu, pointwise.softplus]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 60, 63, 64, 128])
def test_tree_sum_adds_everything_once(size: int):
    x = torch.arange(1.0, 6 * size + 1).view(2, size, 3)  # exact in float32
    assert torch.equal(pointwise.tree_sum(x, 1), x.sum(1))
    assert torch.equal(pointwise.tree_sum(x, -2), x.sum(1))


def test_tree_sum_has_one_order():
    # 1e8 + 1 rounds to 1e8: halves are added first, (1e8 − 1e8) + (1 + 1)
    assert pointwise.tree_sum(torch.tensor([1e8, 1.0, -1e8, 1.0]), 0) == 2.0
    # an odd one out waits in the last place: 1e8 − 1e8, then + 1
    assert pointwise.tree_sum(torch.tensor([1e8, 1.0, -1e8]), 0) == 1.0


def test_tree_sum_ignores_layout_and_neighbours():
    x = torch.randn(64, 60, 3, generator=torch.Generator().manual_seed(0))
    whole = pointwise.tree_sum(x, 1)
    assert same_bits(pointwise.tree_sum(x.transpose(1, 2).contiguous(), 2), whole)
    assert same_bits(pointwise.tree_sum(x.transpose(0, 2), 1).T, whole)
    assert same_bits(pointwise.tree_sum(x[5:6], 1), whole[5:6])


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_element_has_the_same_bits_at_every_place(
    function: Callable[[Tensor], Tensor], dtype: torch.dtype
):
    x = 5 * torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=dtype)
    whole = function(x)
    assert same_bits(torch.cat([function(one) for one in x.split(1)]), whole)
    assert same_bits(torch.cat([function(some) for some in x.split(19)]), whole)
    assert same_bits(function(x[::3]), whole[::3])


@pytest.mark.parametrize(
    ("function", "torchs"),
    [
        (pointwise.sigmoid, torch.sigmoid),
        (pointwise.silu, torch.nn.functional.silu),
        (pointwise.softplus, torch.nn.functional.softplus),
    ],
    ids=["sigmoid", "silu", "softplus"],
)
def test_values_are_torchs(function: Callable[[Tensor], Tensor], torchs: Callable[[Tensor], Tensor]):
    x = torch.linspace(-700, 700, 2801, dtype=torch.float64)
    torch.testing.assert_close(function(x), torchs(x), rtol=1e-14, atol=1e-300)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_extremes(function: Callable[[Tensor], Tensor]):
    x = torch.tensor([-3e38, 3e38, float("inf"), float("nan")])
    limits = {"sigmoid": [0.0, 1.0, 1.0], "silu": [0.0, 3e38, float("inf")]}
    low, high, inf, nan = function(x).tolist()
    assert [low, high, inf] == pytest.approx(limits.get(function.__name__, [0.0, 3e38, float("inf")]))
    assert nan != nan


def test_l2_normalized_adds_eps_to_the_sum_of_squares():
    x = torch.tensor([[3e-3, 4e-3], [0.0, 0.0]], dtype=torch.float64)
    got = pointwise.l2_normalized(x, eps=7.5e-5)  # 25e-6 + 75e-6 = 1e-4
    assert got[0].tolist() == pytest.approx([0.3, 0.4], rel=1e-12)
    assert got[1].tolist() == [0.0, 0.0]
