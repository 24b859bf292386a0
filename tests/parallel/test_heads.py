from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kimi_hal.parallel.groups import Group, LoopbackGroup
from kimi_hal.parallel.heads import to_heads, to_tokens
from kimi_hal.parallel.shards import Shards

LENGTHS = [[13], [2, 40, 1, 0, 9], [1], [0], []]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_rank_gets_its_tokens_with_all_heads(lengths: list[int], world: int, dtype: torch.dtype) -> None:
    shards, heads = Shards.pieces(lengths, world), 2
    whole = torch.randn(shards.total + 3, world * heads, 5).to(dtype)
    parts = whole.chunk(world, dim=1)
    got = LoopbackGroup.run(world, lambda group: to_tokens(group, parts[group.rank()], shards))
    for rank, tokens in enumerate(got):
        assert tokens.shape == (shards.width, world * heads, 5)
        assert tokens.view(torch.uint8).equal(shards.take(whole, rank).view(torch.uint8))


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_there_and_back_are_the_same_bits(lengths: list[int], world: int) -> None:
    shards, heads = Shards.pieces(lengths, world), 3
    rows = shards.total + 2
    q = torch.randn(rows, world * heads, 4)
    marks = torch.arange(rows * world * heads).reshape(rows, world * heads).to(torch.int32)

    def rank(group: Group) -> tuple[Tensor, ...]:
        mine = slice(group.rank() * heads, (group.rank() + 1) * heads)
        kept = (to_tokens(group, x[:, mine], shards) for x in (q, marks))
        return to_heads(group, shards, rows, *kept)

    back = LoopbackGroup.run(world, rank)
    for got, whole in zip(zip(*back, strict=True), (q, marks), strict=True):
        joined = torch.cat(got, dim=1)
        assert joined[: shards.total].equal(whole[: shards.total])
        assert joined[shards.total :].count_nonzero() == 0


def test_filling_is_zero_and_what_it_becomes_reaches_nobody() -> None:
    shards = Shards.pieces([5], 2)

    def rank(group: Group) -> Tensor:
        tokens = to_tokens(group, torch.ones(5, 1, 2), shards)
        filling = shards.rows[group.rank()] < 0
        assert tokens[filling].count_nonzero() == 0
        tokens[filling] = torch.nan
        return to_heads(group, shards, 5, tokens)[0]

    assert all(got.equal(torch.ones(5, 1, 2)) for got in LoopbackGroup.run(2, rank))


def test_results_of_a_rank_travel_in_one_message() -> None:
    shards = Shards.pieces([32], 4)

    def rank(group: Group) -> int:
        out, lse = torch.zeros(8, 8, 512).bfloat16(), torch.zeros(8, 8)
        to_heads(group, shards, 32, out, lse)
        return group.bytes_sent

    piece = 8 * 2 * (512 * 2 + 4)
    assert LoopbackGroup.run(4, rank) == [3 * piece] * 4


def test_switched_off_results_cost_nothing() -> None:
    shards = Shards.pieces([8], 2)

    def rank(group: Group) -> tuple[tuple[int, ...], int]:
        _, lse = to_heads(group, shards, 8, torch.zeros(4, 2, 6), torch.zeros(4, 2, 0))
        return tuple(lse.shape), group.bytes_sent

    assert LoopbackGroup.run(2, rank) == [((8, 1, 0), 4 * 6 * 4)] * 2
