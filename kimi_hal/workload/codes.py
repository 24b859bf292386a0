"""Six-bit integers, four in three bytes: how the workload file stores hidden states."""

from __future__ import annotations

import torch
from torch import Tensor

#: Codes run from −31 to 31, so that a channel's range is symmetric; −32 is not used.
LIMIT = 31


def pack(codes: Tensor) -> Tensor:
    """Pack integers in [−31, 31], ``[..., 4n]``, into ``[..., 3n]`` uint8, the first in the lowest bits."""
    word = (codes.to(torch.int32) + 32).view(*codes.shape[:-1], codes.shape[-1] // 4, 4)
    word = word[..., 0] | word[..., 1] << 6 | word[..., 2] << 12 | word[..., 3] << 18
    return torch.stack([word & 255, word >> 8 & 255, word >> 16], -1).flatten(-2).to(torch.uint8)


def unpack(packed: Tensor) -> Tensor:
    """Return the ``[..., 4n]`` int8 codes of ``packed [..., 3n]`` uint8."""
    low, middle, high = packed.to(torch.int32).view(*packed.shape[:-1], packed.shape[-1] // 3, 3).unbind(-1)
    word = low | middle << 8 | high << 16
    codes = torch.stack([word & 63, word >> 6 & 63, word >> 12 & 63, word >> 18], -1)
    return (codes.flatten(-2) - 32).to(torch.int8)
