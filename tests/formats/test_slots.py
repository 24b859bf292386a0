from __future__ import annotations

import pytest
import torch

from kimi_hal.formats import slots


@pytest.mark.parametrize(
    ("where", "rows"),
    [
        ([7, 9, 7, 9, 7, 8], [3, 4, 5]),
        ([5], [0]),
        ([0, 0, 0], [2]),
        ([2, 1, 0], [0, 1, 2]),
        ([], []),
        ([1 << 40, 3, 1 << 40], [1, 2]),
    ],
)
def test_the_last_row_of_each_slot_is_written(where, rows):
    kept = slots.last_writer(torch.tensor(where, dtype=torch.int64))
    assert sorted(kept.tolist()) == rows


def test_no_two_kept_rows_share_a_slot_in_a_large_batch():
    where = torch.randint(0, 500, (20_000,), generator=torch.Generator().manual_seed(0))
    kept = slots.last_writer(where)
    last = {slot: row for row, slot in enumerate(where.tolist())}
    assert sorted(kept.tolist()) == sorted(last.values())
