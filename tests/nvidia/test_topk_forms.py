"""How rows are cut over blocks: by their number and length, known without a device."""

from __future__ import annotations

import pytest

from kimi_hal_nvidia.h200 import PROCESSORS
from kimi_hal_nvidia.topk import blocks_of, team_of, way_of


@pytest.mark.parametrize(
    ("rows", "columns", "expected"),
    [
        (1, 8193, ("team", 2)),
        (1, 32768, ("team", 4)),
        (1, 131072, ("team", 16)),
        (8, 131072, ("large_team", 8)),
        (40, 16384, ("team", 2)),
        (41, 16384, ("large_team", 2)),
        (64, 32768, ("large_team", 2)),
        (1, 262144, ("large_team", 16)),
    ],
)
def test_registers_of_the_fewest_blocks_hold_a_row(
    rows: int, columns: int, expected: tuple[str, int]
) -> None:
    assert team_of(rows, columns) == expected


@pytest.mark.parametrize(("rows", "columns"), [(1, 262145), (64, 32769), (133, 8193)])
def test_longer_or_more_rows_are_held_by_no_registers(rows: int, columns: int) -> None:
    assert team_of(rows, columns) is None


@pytest.mark.parametrize("rows", [1, 7, 64, 66, 132])
def test_blocks_of_all_rows_stand_beside_each_other(rows: int) -> None:
    assert rows * blocks_of(rows, 1 << 20) <= PROCESSORS


@pytest.mark.parametrize(
    ("rows", "columns", "expected"),
    [
        (1, 8192, ("short", 1)),
        (2048, 8192, ("short", 1)),
        (1, 16384, ("middle", 1)),
        (2048, 16384, ("middle", 1)),
        (20, 32768, ("team", 4)),
        (21, 32768, ("large_team", 2)),
        (66, 32768, ("large_team", 2)),
        (67, 32768, ("whole", 1)),
        (2048, 32768, ("whole", 1)),
        (133, 32769, ("many", 1)),
        (64, 131072, ("wide", 2)),
        (1, 262144, ("large_team", 16)),
        (1, 1 << 20, ("wide", 16)),
    ],
)
def test_a_row_stands_in_one_block_as_long_as_that_is_the_fastest(
    rows: int, columns: int, expected: tuple[str, int]
) -> None:
    assert way_of(rows, columns, columns) == expected
