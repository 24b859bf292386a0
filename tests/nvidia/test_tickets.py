"""Words by which the blocks of a launch of scores share pages: no two launches that may overlap have the same."""

from __future__ import annotations

import pytest
import torch

from kimi_hal_nvidia import scores, sizes
from kimi_hal_nvidia.scores import Ring, Tickets


@pytest.fixture
def tickets(monkeypatch: pytest.MonkeyPatch) -> Tickets:
    monkeypatch.setattr(scores, "is_current_stream_capturing", lambda: False)
    return Tickets(torch.zeros(sizes.TICKETS, dtype=torch.uint8))


def test_a_stream_keeps_its_words_and_another_has_others(tickets: Tickets) -> None:
    first, second = tickets.of(7), tickets.of(8)
    assert first == tickets.words.data_ptr()
    assert second == first + sizes.TICKET
    assert (tickets.of(7), tickets.of(8)) == (first, second)


def test_each_captured_launch_has_words_of_its_own(tickets: Tickets, monkeypatch: pytest.MonkeyPatch) -> None:
    eager = tickets.of(7)
    monkeypatch.setattr(scores, "is_current_stream_capturing", lambda: True)
    assert len({eager, tickets.of(7), tickets.of(7), tickets.of(8)}) == 4


def test_where_words_are_used_up_shares_are_fixed(tickets: Tickets) -> None:
    streams = range(7, 7 + sizes.TICKETS // sizes.TICKET)
    given = [tickets.of(stream) for stream in streams]
    assert 0 not in given
    assert len(set(given)) == len(given)
    assert tickets.of(-1) == 0
    assert tickets.of(7) == given[0]


def test_launches_of_several_threads_on_their_default_streams_share_no_words(
    tickets: Tickets, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tickets.of(2) == 0
    monkeypatch.setattr(scores, "is_current_stream_capturing", lambda: True)
    assert tickets.of(2) != tickets.of(2)


def test_without_words_shares_are_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "is_current_stream_capturing", lambda: False)
    assert Tickets(None).of(7) == 0


@pytest.mark.parametrize(
    ("rows", "requests", "name"),
    [
        (1, 1, "_one"),
        (2, 1, "_one"),
        (3, 1, ""),
        (2, 2, ""),
        (128, 64, ""),
        (129, 129, "_many"),
        (2048, 1, "_many"),
    ],
)
def test_each_number_of_rows_has_its_kernel(rows: int, requests: int, name: str) -> None:
    ring = Ring(32, 2, {})
    assert ring.kernel("fp8", ring.kind(rows, requests)) == f"fp8_32x2{name}"
