from __future__ import annotations

import pytest
import torch

from kimi_hal.ops.spec import DCP
from kimi_hal.parallel import ownership

SHAPES = [(1, 1), (2, 1), (2, 4), (3, 5), (4, 1), (8, 64), (8, 1024)]


def ranks(world: int, interleave: int) -> list[DCP]:
    return [DCP(world=world, rank=rank, interleave=interleave) for rank in range(world)]


@pytest.mark.parametrize(("world", "interleave"), SHAPES)
def test_every_position_has_one_owner_and_comes_back_from_its_place(world: int, interleave: int) -> None:
    positions = torch.arange(3 * world * interleave + 7)
    for dcp in ranks(world, interleave):
        mine = positions[ownership.owner(positions, dcp) == dcp.rank]
        places = ownership.local(mine, dcp)
        assert places.equal(torch.arange(len(mine)))  # dense, ascending: no hole in a rank's shard
        assert ownership.position(places, dcp).equal(mine)


@pytest.mark.parametrize(("world", "interleave"), SHAPES)
def test_local_length_counts_owned_positions(world: int, interleave: int) -> None:
    longest = 2 * world * interleave + 3
    owners = ownership.owner(torch.arange(longest), DCP(world=world, interleave=interleave))
    for dcp in ranks(world, interleave):
        counts = torch.cat([torch.zeros(1, dtype=torch.long), (owners == dcp.rank).cumsum(0)])
        lengths = torch.arange(longest + 1)
        assert ownership.local_length(lengths, dcp).equal(counts)


def test_ints_and_tensors_agree() -> None:
    dcp = DCP(world=3, rank=2, interleave=4)
    numbers = list(range(50))
    for fn in (ownership.owner, ownership.local, ownership.position, ownership.local_length):
        assert fn(torch.tensor(numbers), dcp).tolist() == [fn(n, dcp) for n in numbers]


@pytest.mark.parametrize("length", [-1, -(2**31), 0])
def test_a_length_that_is_not_positive_owns_nothing(length: int) -> None:
    dcp = DCP(world=4, rank=3, interleave=2)
    assert ownership.local_length(length, dcp) == 0
    assert ownership.local_length(torch.tensor([length], dtype=torch.int32), dcp).tolist() == [0]


def test_places_whose_position_passes_two_to_the_31_are_exact_in_int64() -> None:
    dcp = DCP(world=64, rank=63, interleave=1)
    place = torch.tensor([2**31 - 1])
    assert ownership.position(place, dcp).tolist() == [(2**31 - 1) * 64 + 63]


def test_dtype_of_a_length_is_kept() -> None:
    lengths = torch.tensor([9, 10], dtype=torch.int32)
    assert ownership.local_length(lengths, DCP(world=4)).dtype == torch.int32
