from __future__ import annotations

import math
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from index_cases import filled, plain_selection

from kimi_hal.reference import selection

NAN, INF = math.nan, math.inf
SUBNORMAL = 1e-45


def select(row: list[float], k: int, length: int | None = None, **options: object) -> list[int]:
    lengths = torch.tensor([len(row) if length is None else length])
    return selection.select_positions(torch.tensor([row]), lengths, k, **options)[0].tolist()


def test_ordinals_grow_with_the_score() -> None:
    scores = torch.tensor([NAN, -INF, -1.0, -SUBNORMAL, 0.0, SUBNORMAL, 1.0, INF])
    assert selection.ordinal(scores).diff().gt(0).all()


def test_zeros_of_both_signs_have_one_ordinal() -> None:
    assert selection.ordinal(torch.tensor([-0.0, 0.0])).tolist() == [0, 0]


def test_every_nan_has_the_ordinal_below_minus_infinity() -> None:
    bits = torch.tensor([0x7FC00000, 0x7F800001, -0x400000, -1], dtype=torch.int32)
    assert selection.ordinal(bits.view(torch.float32)).tolist() == [selection.NAN] * 4
    assert selection.ordinal(torch.tensor([-INF])).item() > selection.NAN


def test_ordinals_of_bfloat16_are_those_of_its_float32() -> None:
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    assert torch.equal(selection.ordinal(every), selection.ordinal(every.float()))


def test_narrow_ordinals_keep_the_order_of_every_bfloat16() -> None:
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    wide, narrow = (f(selection.ordinal(every)) for f in (lambda x: x, selection.narrow))
    pairs = torch.stack((wide, narrow), dim=1).unique(dim=0)
    assert pairs.diff(dim=0).gt(0).all()
    assert narrow.min().item() == -(1 << 15) + 1
    assert narrow.max().item() < 1 << 15


def test_keys_put_padding_below_nan() -> None:
    key = selection.keys(torch.tensor([selection.NAN, 0]), torch.tensor([(1 << 31) - 1, -1]))
    assert key[0] > key[1]
    assert selection.positions(key).tolist() == [(1 << 31) - 1, -1]


def test_selection_puts_the_best_first_and_ascends() -> None:
    assert select([3.0, 1.0, 4.0, 1.5, 9.0], 3) == [0, 2, 4]


def test_ties_go_to_the_smaller_position() -> None:
    assert select([1.0, 0.5, 0.5, 0.5, 0.5], 3) == [0, 1, 2]


def test_a_zero_of_either_sign_ties() -> None:
    assert select([-0.0, 0.0, -0.0, 0.0], 2) == [0, 1]


def test_nan_ranks_below_minus_infinity_and_above_padding() -> None:
    assert select([NAN, -INF, NAN, 1.0], 2) == [1, 3]
    assert select([NAN, -INF, NAN, 1.0], 3) == [0, 1, 3]
    assert select([NAN, NAN], 3) == [0, 1, -1]


@pytest.mark.parametrize("length", [-3, 0])
def test_a_row_without_keys_is_minus_one(length: int) -> None:
    assert select([1.0, 2.0], 3, length) == [-1, -1, -1]


def test_a_length_beyond_the_row_is_clamped() -> None:
    assert select([1.0, 2.0], 3, 9) == [0, 1, -1]


def test_an_empty_row_is_legal() -> None:
    picked = selection.select_positions(torch.empty(2, 0), torch.tensor([5, 0]), 2)
    assert picked.tolist() == [[-1, -1], [-1, -1]]


def test_no_rows_are_legal() -> None:
    assert selection.select_positions(torch.empty(0, 8), torch.empty(0, dtype=torch.int64), 2).shape == (0, 2)


def test_positions_are_relative_to_the_start() -> None:
    scores = torch.tensor([[9.0, 9.0, 1.0, 3.0, 2.0, 9.0]])
    picked = selection.select_positions(scores, torch.tensor([3]), 2, starts=torch.tensor([2]))
    assert picked.tolist() == [[1, 2]]
    assert selection.scores_at(scores, picked, torch.tensor([2])).tolist() == [[3.0, 2.0]]


def test_starts_differ_from_row_to_row() -> None:
    scores = torch.tensor([[5.0, 1.0, 2.0, 3.0]] * 3)
    picked = selection.select_positions(scores, torch.tensor([2, 2, 0]), 1, starts=torch.tensor([0, 2, 4]))
    assert picked.tolist() == [[0], [1], [-1]]


def test_scores_where_nothing_is_selected_are_minus_infinity() -> None:
    assert selection.scores_at(torch.tensor([[NAN, 2.0]]), torch.tensor([[1, -1]])).tolist() == [[2.0, -INF]]


def test_scores_are_rounded_to_the_score_type_first() -> None:
    close = [1.0, 1.0 + 2**-9, 1.0 + 2**-10]  # one bfloat16
    assert select(close, 1) == [1]
    assert select(close, 1, score=torch.bfloat16) == [0]


def test_rounding_is_to_nearest_even() -> None:
    tie_down, tie_up = 1.0 + 2**-8, 1.0 + 3 * 2**-8  # halfway, to 1 and to 1 + 2^-6
    assert selection.as_score(torch.tensor([tie_down, tie_up]), torch.bfloat16).tolist() == [1.0, 1.0 + 2**-6]


def test_float64_is_rounded_to_float32_before_bfloat16() -> None:
    # Halfway between two bfloat16 but for 2^-40: one rounding goes up, the float32 sum is a tie and goes down.
    value = torch.tensor([1.0 + 2**-8 + 2**-40], dtype=torch.float64)
    assert selection.as_score(value, torch.bfloat16).item() == 1.0


def test_other_score_types_are_refused() -> None:
    with pytest.raises(TypeError, match=r"selection is over float32 or bfloat16 scores, got torch.float64"):
        selection.select_positions(torch.zeros(1, 2, dtype=torch.float64), torch.tensor([2]), 1)


def test_strided_scores_are_read_where_they_are() -> None:
    wide = torch.full((3, 64), NAN)
    wide[:, 5:9] = torch.tensor([1.0, 4.0, 2.0, 3.0])
    assert selection.select_positions(wide[:, 5:9], torch.tensor([4, 2, 3]), 2).tolist() == [
        [1, 3],
        [0, 1],
        [1, 2],
    ]


SCORES = st.sampled_from([0.0, -0.0, 0.5, 1.0, -1.0, SUBNORMAL, -SUBNORMAL, INF, -INF, NAN])


@settings(max_examples=200, deadline=None)
@given(st.lists(SCORES, max_size=40), st.integers(1, 20), st.integers(-2, 45))
def test_selection_equals_sorting(row: list[float], k: int, length: int) -> None:
    scores = torch.tensor([row], dtype=torch.float32).reshape(1, len(row))
    kept = row[: max(0, length)]
    picked = selection.select_positions(scores, torch.tensor([length]), k)[0].tolist()
    assert picked == filled(plain_selection(kept, k), k)


def test_rows_cut_into_pieces_select_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    scores, lengths = torch.randn(7, 50), torch.tensor([50, 0, 3, 50, 17, 49, 50])
    whole = selection.select_positions(scores, lengths, 10)
    monkeypatch.setattr(selection, "AT_ONCE", 100)
    assert torch.equal(selection.select_positions(scores, lengths, 10), whole)


def test_a_row_of_a_million_keys_is_selected_within_half_a_second() -> None:
    scores = torch.randn(1, 1 << 20)
    began = time.process_time()
    picked = selection.select_positions(scores, torch.tensor([1 << 20]), 2048)
    spent = time.process_time() - began
    assert torch.equal(picked[0], scores[0].topk(2048).indices.sort().values)
    assert spent < 0.5
