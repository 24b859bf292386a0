from __future__ import annotations

from typing import Any

import pytest
import torch

from kimi_hal.errors import ContractError
from kimi_hal.ops.spec import DCP
from kimi_hal.parallel import ownership
from kimi_hal.parallel.shards import Shards, padded_rows


def held(shards: Shards) -> list[list[int]]:
    """Return the rows of each rank."""
    return [[row for row in line if row >= 0] for line in shards.rows.tolist()]


def test_a_rank_holds_an_early_and_a_late_piece() -> None:
    assert held(Shards.pieces([16], 4)) == [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("length", [16, 17, 33, 100, 241])
def test_rank_r_holds_pieces_r_and_2w_minus_1_minus_r(length: int, world: int) -> None:
    size = -(-length // (2 * world))
    pieces = [list(range(length))[i * size : (i + 1) * size] for i in range(2 * world)]
    assert held(Shards.pieces([length], world)) == [
        pieces[r] + pieces[2 * world - 1 - r] for r in range(world)
    ]


def test_pieces_at_the_end_may_be_short_or_empty() -> None:
    # 17 rows on 8 ranks: pieces of 2, eight of them whole, one of 1, seven empty.
    assert held(Shards.pieces([17], 8)) == [
        [0, 1],
        [2, 3],
        [4, 5],
        [6, 7],
        [8, 9],
        [10, 11],
        [12, 13],
        [14, 15, 16],
    ]


def test_requests_stand_behind_each_other() -> None:
    assert held(Shards.pieces([4, 0, 6], 2)) == [[0, 3, 4, 5], [1, 2, 6, 7, 8, 9]]


def test_rows_of_short_requests_go_round() -> None:
    # By pieces alone, every one-row request would be rank 0's.
    assert held(Shards.pieces([1] * 8, 4)) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert held(Shards.pieces([3, 2], 4)) == [[0, 4], [1], [2], [3]]
    assert Shards.pieces([5] * 64, 8).width == 40


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_no_rows(lengths: list[int]) -> None:
    shards = Shards.pieces(lengths, 3)
    assert (shards.rows.shape, shards.total) == ((3, 0), 0)
    assert shards.restore(shards.deal(torch.zeros(2, 5)), 2).tolist() == [[0.0] * 5] * 2


@pytest.mark.parametrize(("total", "world", "interleave"), [(10, 4, 1), (10, 2, 4), (3, 8, 1), (130, 4, 64)])
def test_interleaved_rows_are_dealt_as_positions_are(total: int, world: int, interleave: int) -> None:
    shards = Shards.interleaved(total, world, interleave)
    for rank, rows in enumerate(held(shards)):
        dcp = DCP(world=world, rank=rank, interleave=interleave)
        assert rows == [row for row in range(total) if ownership.owner(row, dcp) == rank]


@pytest.mark.parametrize("lengths", [[37], [5, 90, 1, 1, 64], [200, 3]])
@pytest.mark.parametrize("world", [1, 2, 3, 8, 32])
def test_every_row_has_one_rank(lengths: list[int], world: int) -> None:
    shards = Shards.pieces(lengths, world)
    assert sorted(row for rows in held(shards) for row in rows) == list(range(sum(lengths)))
    assert shards.width == max(map(len, held(shards)))
    assert shards.width <= padded_rows(sum(lengths), len(lengths), world)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int32])
def test_what_is_dealt_is_restored_bit_for_bit(dtype: torch.dtype) -> None:
    x = (5 * torch.randn(60, 3)).to(dtype)
    shards = Shards.pieces([37, 2, 18], 4)
    parts = shards.deal(x)
    assert parts.shape == (4, shards.width, 3)
    assert (parts.float()[shards.rows < 0] == 0).all()
    back = shards.restore(parts, 60)
    assert back[:57].view(torch.uint8).equal(x[:57].view(torch.uint8))
    assert (back[57:].float() == 0).all()  # rows of nobody
    assert shards.take(x, 2).view(torch.uint8).equal(parts[2].view(torch.uint8))


def test_rows_of_any_stride_and_shape_are_taken() -> None:
    wide = torch.arange(80.0).reshape(10, 8)
    shards = Shards.pieces([10], 2)
    assert shards.restore(shards.deal(wide[:, ::2])).equal(wide[:, ::2])
    assert shards.restore(shards.deal(torch.arange(10))).equal(torch.arange(10))
    assert shards.restore(shards.deal(torch.zeros(10, 4, 0))).shape == (10, 4, 0)


def test_filling_of_a_shard_reaches_nobody() -> None:
    shards = Shards.pieces([5], 2)
    parts = torch.full((2, shards.width, 1), torch.nan)
    parts[shards.rows >= 0] = 1.0
    assert shards.restore(parts).equal(torch.ones(5, 1))


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: Shards.pieces([-3, 5], 2), "a length is at least 0, got -3 in [-3, 5]"),
        (lambda: Shards.pieces([1.5], 2), "lengths must be whole numbers, got [1.5]"),
        (lambda: Shards.pieces([5], 0), "world=0 must be at least 1"),
        (lambda: Shards.interleaved(-1, 2), "a length is at least 0, got -1 in [-1]"),
        (lambda: Shards.pieces([5], 2).take(torch.ones(4), 0), "x must have at least 5 rows, got [4]"),
        (lambda: Shards.pieces([5], 2).take(torch.ones(5), -1), "rank=-1 is outside 0 to 1"),
        (
            lambda: Shards.pieces([5], 2).restore(torch.ones(3, 3)),
            "parts must be [2, 3] by rank and row, got [3, 3]",
        ),
        (lambda: Shards.pieces([5], 2).restore(torch.ones(2, 3), 4), "rows=4 is less than the shards' 5"),
    ],
)
def test_rows_that_cannot_be_parted_are_refused(call: Any, sentence: str) -> None:
    with pytest.raises(ContractError) as caught:
        call()
    assert str(caught.value) == f"shards: {sentence}"
