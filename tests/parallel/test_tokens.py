from __future__ import annotations

import pytest
import torch

from kimi_hal.parallel.groups import Faults, LoopbackGroup
from kimi_hal.parallel.shards import Shards
from kimi_hal.parallel.tokens import gather_tokens, reduce_tokens

LAYOUTS = [
    Shards.pieces([13, 2, 40], 4),
    Shards.interleaved(55, 4),
    Shards.interleaved(55, 4, 16),
    Shards.interleaved(2, 4),
    Shards.pieces([], 4),
]


@pytest.mark.parametrize("shards", LAYOUTS)
def test_every_rank_gets_all_tokens_in_order(shards: Shards) -> None:
    whole = torch.randn(shards.total, 3).bfloat16()
    got = LoopbackGroup.run(4, lambda g: gather_tokens(g, shards.take(whole, g.rank()), shards))
    assert all(each.equal(whole) for each in got)


def test_rows_beyond_the_tokens_are_zero() -> None:
    shards = LAYOUTS[0]
    got = LoopbackGroup.run(4, lambda g: gather_tokens(g, torch.ones(shards.width, 2), shards, 60))
    assert all(each[:55].eq(1).all() and each[55:].eq(0).all() for each in got)


@pytest.mark.parametrize("shards", LAYOUTS)
@pytest.mark.parametrize("seed", [None, 1])
def test_partial_sums_are_added_from_rank_0_up(shards: Shards, seed: int | None) -> None:
    partial = torch.randn(4, shards.total, 3) * 10.0 ** torch.randint(-4, 5, (4, shards.total, 3))
    expected = ((partial[0] + partial[1]) + partial[2]) + partial[3]
    got = LoopbackGroup.run(
        4, lambda g: reduce_tokens(g, partial[g.rank()], shards), faults=Faults(reorder=seed)
    )
    assert shards.restore(torch.stack(got)).equal(expected)


def test_a_reduction_sends_every_rank_its_own_rows_alone() -> None:
    shards = Shards.interleaved(64, 4)

    def rank(group: LoopbackGroup) -> int:
        reduce_tokens(group, torch.zeros(64, 6), shards)
        return group.bytes_sent

    assert LoopbackGroup.run(4, rank) == [3 * 16 * 6 * 4] * 4
