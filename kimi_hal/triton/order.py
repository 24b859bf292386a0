"""The strict total order of rule 2 (``docs/contract.md``) inside kernels: scores as integers, and their k-th.

The same numbers as ``kimi_hal/reference/selection.py``: an ordinal is an int32 that grows with the score, −0 equals
+0, NaN is the least, and what is no key is below that.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: The ordinal of what is no key.
NO_KEY = tl.constexpr(-(1 << 31))
#: The ordinal of −inf.
LOWEST = tl.constexpr(-2139095041)


@triton.jit
def as_score(x, ROUND: tl.constexpr):
    """Return scores as float32; ``ROUND``: rounded once to bfloat16, to nearest even."""
    return x.to(tl.bfloat16).to(tl.float32) if ROUND else x.to(tl.float32)


@triton.jit
def ordinal(x, live, LOW: tl.constexpr):
    """Return the ordinals of float32 scores, ``NO_KEY`` where not ``live``.

    ``LOW`` is 16 for scores that are bfloat16 numbers, whose ordinals differ above their low 16 bits, and 0 for
    others: so many low bits are zero.
    """
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = tl.where(bits == NO_KEY, 0, key) & (-1 << LOW)  # −0 has just these bits
    key = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, NO_KEY + (1 << LOW), key)
    return tl.where(live, key, NO_KEY)


@triton.jit
def score_of(key):
    """Return the float32 score of an ordinal, −inf for those below it."""
    key = tl.maximum(key, LOWEST)
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def kth(key, count, k, LOW: tl.constexpr):
    """Return an ordinal that just ``k`` of a block's keys reach, or where there is none the k-th largest.

    It is found bit by bit below what all keys have in common, down to bit ``LOW``. An ordinal that just ``k`` reach
    ends the search: it parts them from the others.

    Args:
        key: ordinals; ``NO_KEY`` is none of the keys.
        count: how many keys there are. With at most ``k`` the answer is ``NO_KEY``, which all of them reach.
        k: how many are wanted.
        LOW: as in ``ordinal``; more for a coarser answer, which more than ``k`` may reach.
    """
    least = tl.min(tl.where(key == NO_KEY, 0x7FFFFFFF, key))
    differ = least ^ tl.max(key)
    bit = 31
    while (bit >= LOW) & (((differ >> tl.maximum(bit, 0)) & 1) == 0):
        bit -= 1
    # In the order of unsigned patterns, which the flipped sign bit gives, a set bit only makes larger.
    low = (least ^ NO_KEY) & (-1 << LOW) & tl.where(bit < 0, -1, (-1 << tl.maximum(bit, 0)) << 1)
    reach = count
    while (bit >= LOW) & (reach > k):
        tried = low | (1 << bit)
        found = tl.sum((key >= (tried ^ NO_KEY)).to(tl.int32))
        enough = found >= k
        low = tl.where(enough, tried, low)
        reach = tl.where(enough, found, reach)
        bit -= 1
    return tl.where(count > k, low ^ NO_KEY, NO_KEY)
