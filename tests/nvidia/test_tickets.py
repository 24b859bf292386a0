"""Words by which the blocks of a launch share work: no two launches that may overlap have the same."""

from __future__ import annotations

import pytest
import torch

from kimi_hal_nvidia import sizes
from kimi_hal_nvidia import tickets as module
from kimi_hal_nvidia.tickets import Tickets

#: Launches and bytes of each: of scores, and of attention to three items.
KINDS = {"scores": (sizes.SCORES_LAUNCHES, sizes.TICKET), "attention": (sizes.ATTENTION_LAUNCHES, 32)}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> tuple[int, int]:
    return KINDS[request.param]


@pytest.fixture
def tickets(kind: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> Tickets:
    monkeypatch.setattr(module, "is_current_stream_capturing", lambda: False)
    launches, each = kind
    return Tickets(torch.zeros(launches * each, dtype=torch.uint8), launches, each)


def test_a_stream_keeps_its_words_and_another_has_others(tickets: Tickets, kind: tuple[int, int]) -> None:
    first, second = tickets.of(7), tickets.of(8)
    assert first == tickets.words.data_ptr()
    assert second == first + kind[1]
    assert (tickets.of(7), tickets.of(8)) == (first, second)


def test_each_captured_launch_has_words_of_its_own(tickets: Tickets, monkeypatch: pytest.MonkeyPatch) -> None:
    eager = tickets.of(7)
    monkeypatch.setattr(module, "is_current_stream_capturing", lambda: True)
    assert len({eager, tickets.of(7), tickets.of(7), tickets.of(8)}) == 4


def test_no_launch_gets_words_beyond_the_last_ones(tickets: Tickets, kind: tuple[int, int]) -> None:
    launches, each = kind
    given = [tickets.of(stream) for stream in range(7, 7 + launches)]
    assert 0 not in given
    assert len(set(given)) == len(given)
    assert max(given) + each == tickets.words.data_ptr() + tickets.words.numel()
    assert tickets.of(-1) == 0
    assert tickets.of(7) == given[0]


def test_launches_of_several_threads_on_their_default_streams_share_no_words(
    tickets: Tickets, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tickets.of(2) == 0
    monkeypatch.setattr(module, "is_current_stream_capturing", lambda: True)
    assert tickets.of(2) != tickets.of(2)


def test_without_words_no_launch_has_any(kind: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_current_stream_capturing", lambda: False)
    assert Tickets(None, *kind).of(7) == 0
