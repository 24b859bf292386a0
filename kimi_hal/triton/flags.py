"""Flags of a block as words of 32 bits, and the places of those that are set, in order.

Thousands of flags become hundreds of words by adding bits, and only what is set is looked for: cheaper than giving each
element of the block its place by a prefix sum.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def popcount(word):
    """Return how many bits of an int32 are set."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24) & 63


@triton.jit
def nth_bit(word, n):
    """Return the place of the n-th set bit, counted from 0."""
    place = tl.zeros_like(word)
    for halving in tl.static_range(5):
        width = 16 >> halving
        lower = popcount(word & ((1 << width) - 1))
        beyond = n >= lower
        n = tl.where(beyond, n - lower, n)
        word = tl.where(beyond, word >> width, word)
        place += tl.where(beyond, width, 0)
    return place


@triton.jit
def packed(flags, BLOCK: tl.constexpr):
    """Return ``BLOCK`` flags as words, how many are set before each word, and in all."""
    bits = tl.reshape(flags.to(tl.int32), (BLOCK // 32, 32)) << tl.arange(0, 32)[None, :]
    words = tl.sum(bits, axis=1)
    number = popcount(words)
    return words, tl.cumsum(number, 0) - number, tl.sum(number)


@triton.jit
def last_at_most(starts, n, SIZE: tl.constexpr, HALVINGS: tl.constexpr):
    """Return the last of ``SIZE`` = ``2**HALVINGS`` ascending starts that is at most n, for every n."""
    at = tl.zeros_like(n)
    for halving in tl.static_range(HALVINGS):
        probe = at + (SIZE >> (halving + 1))
        at = tl.where(tl.gather(starts, probe, 0) <= n, probe, at)
    return at


@triton.jit
def place_of(words, before, n, WORDS: tl.constexpr, HALVINGS: tl.constexpr):
    """Return the place in the block of the n-th set flag, for every n."""
    word = last_at_most(before, n, WORDS, HALVINGS)
    return word * 32 + nth_bit(tl.gather(words, word, 0), n - tl.gather(before, word, 0))
