from __future__ import annotations

import random

import pytest

from kimi_hal.errors import ContractError
from kimi_hal.parallel.chunks import Chunk, last_stop, microbatches


def sizes(batches: list[list[Chunk]]) -> list[list[tuple[int, int, int]]]:
    return [[(c.request, c.start, c.end) for c in batch] for batch in batches]


def test_a_prompt_is_cut_into_equal_rows() -> None:
    assert sizes(microbatches([10], [0], 4)) == [[(0, 0, 4)], [(0, 4, 8)], [(0, 8, 10)]]


def test_short_requests_share_a_microbatch() -> None:
    assert sizes(microbatches([2, 1, 6], [0, 9, 0], 5)) == [[(0, 0, 2), (1, 0, 1), (2, 0, 2)], [(2, 2, 6)]]


def test_chunks_end_at_multiples_of_the_requests_own_tokens() -> None:
    # 3 tokens are cached: the first chunk ends at token 8.
    assert sizes(microbatches([20], [3], 8, multiple=4)) == [[(0, 0, 5)], [(0, 5, 13)], [(0, 13, 20)]]
    # The second request has no room for a whole multiple behind the first.
    assert sizes(microbatches([6, 9], [0, 0], 8, multiple=4)) == [[(0, 0, 6)], [(1, 0, 8)], [(1, 8, 9)]]


def test_later_chunks_of_a_long_prompt_have_fewer_rows() -> None:
    even, rows = 1000, 512
    batches = microbatches([20000], [0], rows, even=even)
    counts = [c.end - c.start for (c,) in batches]
    assert counts[0] == rows
    assert counts[:-1] == sorted(counts[:-1], reverse=True)
    costs = [(c.end - c.start) * (1 + (c.start + c.end - 1) / 2 / even) for (c,) in batches[:-1]]
    assert max(costs) <= rows * (1 + (rows - 1) / 2 / even)
    assert min(costs) > 0.9 * max(costs)  # whole rows, of which the last chunks have few


def test_a_cached_prefix_counts() -> None:
    first = microbatches([4000], [100_000], 512, even=10_000)[0][0]
    assert first.end < 512 // 8


def test_a_row_that_costs_more_than_a_microbatch_stands_alone() -> None:
    batches = microbatches([3, 8], [1000, 1000], 4, even=1)
    assert sizes(batches)[:3] == [[(0, 0, 1)], [(0, 1, 2)], [(0, 2, 3)]]
    assert sizes(microbatches([8], [1000], 4, even=1, multiple=4)) == [[(0, 0, 4)], [(0, 4, 8)]]


@pytest.mark.parametrize("seed", range(20))
def test_every_row_is_computed_once_and_in_order(seed: int) -> None:
    draw = random.Random(seed)
    new = [draw.choice((0, 1, draw.randrange(300))) for _ in range(draw.randrange(1, 9))]
    cached = [draw.choice((0, draw.randrange(2000))) for _ in new]
    multiple = draw.choice((1, 16, 64))
    rows, even = draw.randrange(multiple, 200), draw.choice((None, 500))
    batches = microbatches(new, cached, rows, even=even, multiple=multiple)
    seen = [0] * len(new)
    for batch in batches:
        assert 0 < sum(c.end - c.start for c in batch) <= rows
        assert len({c.request for c in batch}) == len(batch)
        for c in batch:
            assert c.start == seen[c.request]
            seen[c.request] = c.end
            assert c.end == new[c.request] or (cached[c.request] + c.end) % multiple == 0
    assert seen == new


@pytest.mark.parametrize(
    ("new", "cached", "rows", "more", "sentence"),
    [
        ([5], [0], 0, {}, "rows=0 must be a whole number from 1"),
        ([5], [0], 8, {"multiple": 16}, "rows=8: a microbatch has at least 16 (multiple=16)"),
        ([5], [0], 8, {"multiple": 0}, "multiple=0 must be a whole number from 1"),
        ([5], [0], 8, {"even": 0}, "even=0 must be a whole number from 1"),
        ([5, 6], [0], 8, {}, "new names 2 requests, cached 1"),
        ([-5], [0], 8, {}, "a length is at least 0, got -5 in [-5]"),
    ],
)
def test_a_microbatch_that_could_not_move_on_is_refused(
    new: list[int], cached: list[int], rows: int, more: dict[str, int], sentence: str
) -> None:
    with pytest.raises(ContractError) as caught:
        microbatches(new, cached, rows, **more)
    assert str(caught.value) == f"microbatches: {sentence}"


@pytest.mark.parametrize(
    ("start", "end", "stop"), [(0, 63, None), (0, 64, 64), (0, 130, 128), (64, 127, None), (70, 200, 122)]
)
def test_a_prefix_cache_stores_where_the_last_block_is_full(start: int, end: int, stop: int | None) -> None:
    assert last_stop(start, end, 64) == stop
