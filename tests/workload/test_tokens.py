from __future__ import annotations

import pytest

from kimi_hal.errors import KimiHalError
from kimi_hal_conformance.workload import text
from kimi_hal_conformance.workload.tokens import tokenize, window

pytestmark = pytest.mark.usefixtures("encoder_package")


def test_nothing_is_cut_and_nothing_is_padded() -> None:
    assert len(tokenize("heap " * 5000).ids) == 5000
    assert len(tokenize("heap").ids) == 1


def test_no_marks_are_added() -> None:
    assert not {101, 102} & set(tokenize("a heap is a tree").ids.tolist())


def test_offsets_name_the_characters() -> None:
    content = text.read().content[:3000]
    tokens = tokenize(content)
    words = [content[s : s + n] for s, n in zip(tokens.start.tolist(), tokens.length.tolist(), strict=True)]
    assert "".join(words) == "".join(content.split())


def test_a_window_ends_with_a_word_that_it_repeats() -> None:
    content = "queue a " * 20
    found = window(tokenize(content), content, 26)
    assert found.start[0] == 6  # the first window, from 0, would end with "a"
    assert content[int(found.start[-1]) :][: int(found.length[-1])] == "queue"
    assert len(found.ids) == 26


@pytest.mark.parametrize(
    "content",
    ["queue a " * 8, "heap a " * 40, "queues_a " * 40],
    ids=["seldom", "short", "part of a name"],
)
def test_without_such_a_word_the_first_window_is_taken(content: str) -> None:
    tokens = tokenize(content)
    found = window(tokens, content, len(tokens.ids) - 1)
    assert found.ids.equal(tokens.ids[:-1])


def test_the_tokens_of_a_window_keep_their_places() -> None:
    content = "queue a " * 20
    tokens = tokenize(content)
    assert window(tokens, content, 26).start.equal(tokens.start[1:27])


def test_too_short_a_text_is_an_error() -> None:
    with pytest.raises(KimiHalError, match=r"^the text has 2 tokens, 1,000 were asked for; ask for fewer$"):
        tokenize("two words", 1000)
