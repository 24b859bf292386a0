from __future__ import annotations

import torch

from kimi_hal.workload import codes


def test_every_code_survives() -> None:
    values = torch.arange(-31, 33)[:64].clamp(max=31).view(4, 16).to(torch.int8)
    assert codes.unpack(codes.pack(values)).equal(values)


def test_the_first_code_is_in_the_lowest_bits() -> None:
    # (1, 0, 0, 0) + 32 = 33, 32, 32, 32 -> 33 | 32<<6 | 32<<12 | 32<<18
    word = 33 | 32 << 6 | 32 << 12 | 32 << 18
    packed = codes.pack(torch.tensor([1, 0, 0, 0]))
    assert packed.tolist() == [word & 255, word >> 8 & 255, word >> 16]


def test_four_codes_take_three_bytes() -> None:
    assert codes.pack(torch.zeros(5, 384)).shape == (5, 288)
