from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from index_cases import planned
from torch import Tensor

from kimi_hal.errors import ContractError
from kimi_hal.ops import all_gather
from kimi_hal.ops.all_gather import DTYPES, GatherSpec
from kimi_hal.ops.spec import DCP
from kimi_hal.parallel.groups import LoopbackGroup

Make = Callable[[int], Tensor]


def gather(
    make: Make, world: int, layout: str, interleave: int = 1, total: int | None = None
) -> list[Tensor]:
    """Gather ``make(rank)`` on every rank through the reference's run function."""

    def one_rank(group: LoopbackGroup) -> Tensor:
        x = make(group.rank())
        dcp = DCP(world=world, rank=group.rank(), interleave=interleave)
        dtype = str(x.dtype).removeprefix("torch.")
        spec = GatherSpec(layout=layout, dtype=dtype, ndim=x.dim(), dcp=dcp)
        return planned(all_gather, spec, group=group)(x, total)

    return LoopbackGroup.run(world, one_rank)


def coded(*shape: int) -> Make:
    """Return tensors in which every element tells its rank and its place."""
    return lambda rank: torch.arange(torch.Size(shape).numel()).reshape(shape) + 1000 * rank


def any_bits(dtype: torch.dtype, *shape: int) -> Make:
    """Return tensors of random bytes, so with every kind of NaN."""

    def make(rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(rank)
        if dtype == torch.bool:
            return torch.randint(0, 2, shape, generator=generator).bool()
        wide = (*shape[:-1], shape[-1] * dtype.itemsize)
        return torch.randint(0, 256, wide, generator=generator).to(torch.uint8).view(dtype)

    return make


def as_bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def test_rank_major_puts_rank_r_at_r() -> None:
    for y in gather(coded(2, 3), 3, "rank_major"):
        assert torch.equal(y, torch.stack([coded(2, 3)(r) for r in range(3)]))


def test_last_dim_puts_the_ranks_side_by_side() -> None:
    for y in gather(coded(2, 2, 3), 2, "last_dim"):
        assert torch.equal(y, torch.cat([coded(2, 2, 3)(r) for r in range(2)], dim=-1))


@pytest.mark.parametrize(
    ("interleave", "total", "order"),
    [
        (1, None, [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2), (0, 3), (1, 3)]),
        (2, None, [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]),
        (1, 5, [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2)]),
        (4, 6, [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]),
        (8, 3, [(0, 0), (0, 1), (0, 2)]),
        (1, 0, []),
    ],
)
def test_token_order_follows_ownership(
    interleave: int, total: int | None, order: list[tuple[int, int]]
) -> None:
    expected = [[1000 * rank + 2 * row, 1000 * rank + 2 * row + 1] for rank, row in order]
    for y in gather(coded(4, 2), 2, "token_order", interleave, total):
        assert y.tolist() == expected


@pytest.mark.parametrize("layout", ["rank_major", "token_order", "last_dim"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_every_bit_pattern_arrives(dtype: str, layout: str) -> None:
    make = any_bits(getattr(torch, dtype), 4, 8)
    parts = [as_bytes(make(rank)) for rank in range(2)]
    expected = {
        "rank_major": torch.stack(parts),
        "last_dim": torch.cat(parts, dim=-1),
        "token_order": torch.stack(parts, dim=1).flatten(0, 1),
    }
    for y in gather(make, 2, layout):
        assert y.dtype == getattr(torch, dtype)
        assert torch.equal(as_bytes(y), expected[layout])


@pytest.mark.parametrize(
    ("layout", "shape"), [("rank_major", (2, 3)), ("token_order", (6,)), ("last_dim", (6,))]
)
def test_one_dimension_is_legal(layout: str, shape: tuple[int, ...]) -> None:
    for y in gather(coded(3), 2, layout):
        assert y.shape == shape
        assert sorted(y.flatten().tolist()) == [0, 1, 2, 1000, 1001, 1002]


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0,)])
@pytest.mark.parametrize("layout", ["rank_major", "token_order", "last_dim"])
def test_zero_length_dimensions_are_legal(layout: str, shape: tuple[int, ...]) -> None:
    assert all(y.numel() == 0 for y in gather(coded(*shape), 2, layout))


def test_any_strides_are_honoured() -> None:
    def make(rank: int) -> Tensor:
        return coded(5, 4)(rank).t()

    for y in gather(make, 2, "rank_major"):
        assert torch.equal(y, torch.stack([make(0), make(1)]))


def test_one_rank_needs_no_group_and_gets_a_copy() -> None:
    x = torch.arange(6.0).reshape(3, 2)
    spec = GatherSpec(layout="token_order", dtype="float32")
    y = planned(all_gather, spec)(x, 2)
    assert torch.equal(y, x[:2])
    assert y.data_ptr() != x.data_ptr()


def test_a_given_buffer_is_filled_and_returned() -> None:
    out = torch.zeros(1, 2, 2)
    x = torch.ones(2, 2)
    assert planned(all_gather, GatherSpec(layout="rank_major", dtype="float32"))(x, out=out) is out
    assert (out == 1).all()


def refusal(layout: str, x: Tensor, total: int | None, **dcp: Any) -> str:
    spec = GatherSpec(layout=layout, dtype="float32", ndim=x.dim(), dcp=DCP(**dcp))
    with pytest.raises(ContractError) as caught:
        planned(all_gather, spec)(x, total)
    return str(caught.value)


def test_a_total_is_refused_with_other_layouts() -> None:
    text = refusal("rank_major", torch.zeros(2, 2), 3)
    assert text == "all_gather: total is for layout='token_order', this is 'rank_major'"


@pytest.mark.parametrize("total", [-1, 9])
def test_a_total_outside_the_ranks_rows_is_refused(total: int) -> None:
    text = refusal("token_order", torch.zeros(4, 1), total, world=2)
    assert text == f"all_gather: total={total} is outside 0 to 8, 2 ranks of 4 rows"


@pytest.mark.parametrize("total", [None, 8])
def test_a_total_that_overfills_the_first_rank_is_refused(total: int | None) -> None:
    text = refusal("token_order", torch.zeros(4, 1), total, world=2, interleave=8)
    assert text == "all_gather: total=8 puts 8 rows on rank 0 at interleave 8, x has 4"


def test_another_number_of_dimensions_is_refused() -> None:
    spec = GatherSpec(layout="rank_major", dtype="float32", ndim=3)
    with pytest.raises(ContractError, match=r"^all_gather: x must have 3 dimensions, got shape \[2, 2\]$"):
        planned(all_gather, spec)(torch.zeros(2, 2))
