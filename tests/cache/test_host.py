"""The host-memory tier and copies inside a process."""

from __future__ import annotations

import pytest
import torch
from cache_cases import Caches, Step, equal, pool_of, small
from torch import Tensor

from kimi_hal import cache
from kimi_hal.cache import HostTier, Move
from kimi_hal.errors import CacheError


def filled() -> tuple[cache.Layout, Tensor]:
    """Return a pool in which a step has been run."""
    layout = cache.plan(small(), block_size=128, num_blocks=13)
    pool = pool_of(layout)
    Step(Caches.packed(layout, pool)).run()
    return layout, pool


def test_blocks_come_back_from_the_tier_bit_for_bit_into_other_blocks() -> None:
    layout, pool = filled()
    rows = pool.view(13, -1)
    before = rows.clone()
    tier = HostTier(layout, 4)
    tier.store(pool, [3, 1, 0], [2, 3, 0])
    rows[[3, 1, 0]] = 0
    tier.load(pool, [2, 3, 0], [10, 11, 12])
    assert equal(rows[[10, 11, 12]], before[[3, 1, 0]])
    others = [2, 4, 5, 6, 7, 8, 9]
    assert equal(rows[others], before[others])


def test_a_step_over_reloaded_blocks_gives_the_same_bits() -> None:
    layout, pool = filled()
    tier = HostTier(layout, 13)
    tier.store(pool, range(13), range(13))
    again = pool_of(layout)
    tier.load(again, range(13), range(13))
    assert equal(pool, again)
    one, two = Step(Caches.packed(layout, pool), seed=5), Step(Caches.packed(layout, again), seed=5)
    for name, value in one.run().items():
        assert equal(value, two.run()[name]), name


def test_a_tier_touches_no_row_that_is_not_named() -> None:
    layout, pool = filled()
    tier = HostTier(layout, 3)
    tier.pool.fill_(7)
    tier.store(pool, [4], [1])
    kept = tier.pool.view(3, -1)
    assert (kept[[0, 2]] == 7).all()
    assert equal(kept[1], pool.view(13, -1)[4])


def test_copy_moves_any_range() -> None:
    source, target = torch.arange(16, dtype=torch.uint8), torch.zeros(16, dtype=torch.uint8)
    cache.copy([Move(2, 10, 4, "x"), Move(0, 0, 1, "y")], source, target)
    assert target.tolist() == [0] * 10 + [2, 3, 4, 5] + [0] * 2


def test_refuses_rows_that_are_not_there_or_named_twice() -> None:
    layout, pool = filled()
    tier = HostTier(layout, 3)
    with pytest.raises(CacheError, match=r"host block ids \[3\] are outside the layout's 3 blocks"):
        tier.store(pool, [0], [3])
    with pytest.raises(CacheError, match=r"device block ids \[-1\] are outside the layout's 13 blocks"):
        tier.load(pool, [0], [-1])
    with pytest.raises(CacheError, match=r"a block is written twice: \[1, 1\]"):
        tier.store(pool, [0, 2], [1, 1])
    with pytest.raises(CacheError, match="2 blocks cannot be moved to 1"):
        tier.store(pool, [0, 2], [1])
    with pytest.raises(CacheError, match="the pool has 1,024 bytes, 13 blocks need"):
        tier.store(pool[:1024], [0], [1])


def test_refuses_a_move_that_leaves_a_pool() -> None:
    small_pool = torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(CacheError, match=r"^x: bytes 6 to 10 are outside the source pool's 8$"):
        cache.copy([Move(6, 0, 4, "x")], small_pool, small_pool)
    with pytest.raises(CacheError, match=r"^x: bytes -1 to 3 are outside the target pool's 8$"):
        cache.copy([Move(0, -1, 4, "x")], small_pool, small_pool)
    with pytest.raises(CacheError, match=r"^x: bytes 0 to 0 are outside the source pool's 8$"):
        cache.copy([Move(0, 0, 0, "x")], small_pool, small_pool)
