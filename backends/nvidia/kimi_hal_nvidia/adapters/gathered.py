"""Selected rows of the cache beside each other, as they stand, for a kernel of whole pages; zeros where none is.

A kernel that masks what lies behind a row's keys still multiplies it by 0, and 0 times a NaN is one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Bytes that are moved together, and tokens that a program moves.
WORD, TOKENS = 8, 16


@triton.jit
def _gather(
    index,
    cache,
    out,
    tokens,
    page_words,
    PAGE: tl.constexpr,
    WORDS: tl.constexpr,
    SPAN: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Copy ``TOKENS`` rows of ``WORDS`` words."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(index + token, mask=token < tokens, other=-1).to(tl.int64)
    live = slot >= 0
    start = tl.where(live, slot // PAGE * page_words + slot % PAGE * WORDS, 0)
    word = tl.arange(0, SPAN)
    inside = word[None, :] < WORDS
    held = tl.load(cache + start[:, None] + word[None, :], mask=live[:, None] & inside, other=0)
    tl.store(out + token[:, None] * WORDS + word[None, :], held, mask=(token < tokens)[:, None] & inside)


def gather(index: Tensor, cache: Tensor, page: int, row_bytes: int, out: Tensor) -> None:
    """Copy the rows that ``index`` names into ``out``; there is at least one.

    Args:
        index: ``[T, k]`` int32, packed: ``page · P + place``, −1 for a row of zeros.
        cache: ``[pages, page_bytes]`` uint8; its address and stride are multiples of 16.
        page: tokens of a page.
        row_bytes: of a token, a multiple of 8.
        out: at least ``T · k · row_bytes`` bytes, packed.
    """
    words = row_bytes // WORD
    _gather[(triton.cdiv(index.numel(), TOKENS),)](
        index,
        cache.view(torch.int64),
        out.view(torch.int64),
        index.numel(),
        cache.stride(0) // WORD,
        PAGE=page,
        WORDS=words,
        SPAN=triton.next_power_of_2(words),
        TOKENS=TOKENS,
    )
