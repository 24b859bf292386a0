"""What ranks send each other through a group on the host: real rows, and no copy where there are no others."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_hal_tpu.xla.exchange import TRACE, Exchange


class Twice:
    """A group of two ranks that send the same, and keep what all of them got."""

    def all_gather(self, x: Tensor) -> Tensor:
        self.received = torch.stack((x, x))
        return self.received


def gathered(x: Tensor, rows: int | None) -> tuple[Tensor, Tensor]:
    group = Twice()
    with TRACE:
        return Exchange(group, on_host=True, rows=rows).all_gather(x), group.received


def test_padded_rows_are_not_sent_and_stand_behind_what_was() -> None:
    x = torch.arange(8.0).view(4, 2)
    found, received = gathered(x, 3)
    assert torch.equal(found, torch.stack((x, x)))
    assert tuple(received.shape) == (2, 3, 2)


def test_where_nothing_is_padded_what_arrives_is_not_copied() -> None:
    for rows in (None, 4):
        found, received = gathered(torch.arange(8.0).view(4, 2), rows)
        assert found is received
