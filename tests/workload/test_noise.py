from __future__ import annotations

import torch

from kimi_hal.workload import noise


def test_the_stream_is_pinned() -> None:
    # A change here changes every widened activation: it needs another file.FORMAT.
    assert noise.words(31, "pin", 3).tolist() == [
        1421119078230027497,
        4059520066628577932,
        2808564501196972689,
    ]
    assert noise.permutation(31, "pin", 8).tolist() == [3, 7, 0, 6, 5, 2, 1, 4]
    assert noise.signs(31, "pin", 8).tolist() == [-1, 1, -1, -1, 1, -1, -1, 1]


def test_a_permutation_has_every_index_once() -> None:
    assert noise.permutation(3, "any", 1000).sort().values.equal(torch.arange(1000))


def test_no_words_of_an_empty_stream() -> None:
    assert noise.words(31, "pin", 0).shape == (0,)
    assert noise.permutation(31, "pin", 0).shape == (0,)


def test_seed_and_name_both_matter() -> None:
    first = noise.permutation(1, "a", 64)
    assert not first.equal(noise.permutation(2, "a", 64))
    assert not first.equal(noise.permutation(1, "b", 64))


def test_signs_are_balanced() -> None:
    signs = noise.signs(31, "balance", 10_000)
    assert set(signs.tolist()) == {-1.0, 1.0}
    assert abs(float(signs.mean())) < 0.04


def test_uniform_numbers_are_exact_in_float32() -> None:
    numbers = noise.uniform(31, "u", 10_000)
    assert numbers.float().double().equal(numbers)
    assert float(numbers.min()) >= 0
    assert float(numbers.max()) < 1
    assert abs(float(numbers.mean()) - 0.5) < 0.02
