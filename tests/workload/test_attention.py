from __future__ import annotations

import pytest
import torch

from kimi_hal.workload import attention
from kimi_hal.workload.attention import Projection

SHIFT = 2.0**-17


@pytest.fixture
def projection() -> Projection:
    g = torch.Generator().manual_seed(1)
    weight = torch.randint(-32767, 32768, (384, 384), generator=g, dtype=torch.int16)
    return Projection(weight, torch.randint(-9000, 9000, (384,), generator=g, dtype=torch.int32))


@pytest.fixture
def hidden() -> torch.Tensor:
    g = torch.Generator().manual_seed(2)
    return torch.randint(-(1 << 19), 1 << 19, (3, 384), generator=g).double()


def test_projection_is_the_exact_integer_sum(projection: Projection, hidden: torch.Tensor) -> None:
    exact = hidden.long() @ projection.weight.long().T
    expected = [[round(v * SHIFT) for v in row] for row in exact.tolist()]
    assert (projection(hidden) - projection.bias).tolist() == expected


def test_the_order_of_a_sum_does_not_matter(projection: Projection, hidden: torch.Tensor) -> None:
    order = torch.randperm(384, generator=torch.Generator().manual_seed(3))
    shuffled = Projection(projection.weight[:, order], projection.bias)
    assert shuffled(hidden[:, order]).equal(projection(hidden))


def test_the_precision_setting_does_not_matter(projection: Projection, hidden: torch.Tensor) -> None:
    before, expected = torch.get_float32_matmul_precision(), projection(hidden)
    torch.set_float32_matmul_precision("medium")
    try:
        assert projection(hidden).equal(expected)
    finally:
        torch.set_float32_matmul_precision(before)


def test_joined_heads_are_the_layers_own(projection: Projection, hidden: torch.Tensor) -> None:
    heads = projection(hidden).view(3, 12, 32)
    assert projection.joined([4, 6, 9, 10])(hidden).equal(heads[:, [4, 6, 9, 10]].flatten(1))


def test_an_absorbed_query_scores_hidden_states_as_the_query_scores_keys(
    projection: Projection, hidden: torch.Tensor
) -> None:
    query = torch.randint(-(1 << 16), 1 << 16, (2, 384), generator=torch.Generator().manual_seed(4)).double()
    keys = (hidden @ projection.weight.double().T).view(3, 12, 32)
    expected = torch.einsum("thd,shd->ths", query.view(2, 12, 32), keys) * 2.0**-25
    scores = torch.einsum("thc,sc->ths", projection.absorb(query), hidden)
    torch.testing.assert_close(scores, expected, rtol=1e-12, atol=0)


def test_96_heads_are_all_different_and_equally_long() -> None:
    first, second, share, other = attention.pairs(torch.arange(96))
    mixtures = torch.zeros(96, 12, dtype=torch.float64)
    mixtures[torch.arange(96), first] += share
    mixtures[torch.arange(96), second] += other
    torch.testing.assert_close(mixtures.norm(dim=-1), torch.ones(96, dtype=torch.float64))
    overlap = (mixtures @ mixtures.T - torch.eye(96)).abs()
    assert float(overlap.max()) < 0.9


def test_the_first_12_heads_are_the_encoders() -> None:
    first, _, share, other = attention.pairs(torch.arange(12))
    assert first.tolist() == list(range(12))
    assert share.tolist() == [1.0] * 12
    assert other.tolist() == [0.0] * 12
