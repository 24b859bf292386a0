"""Seeded permutations, signs and uniform numbers that are the same on every machine and library version.

torch's generators promise no stream across versions; an extendable hash does. Nothing here uses a floating
point operation that may round differently elsewhere.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def words(seed: int, name: str, count: int) -> Tensor:
    """Return ``count`` independent 62-bit words of the stream ``name`` as ``[count]`` int64, all ≥ 0.

    The stream is SHAKE-256 of ``"seed/name"``, eight bytes a word, little-endian, the upper two bits dropped.
    """
    if not count:
        return torch.empty(0, dtype=torch.int64)
    stream = hashlib.shake_256(f"{seed}/{name}".encode()).digest(8 * count)
    return torch.frombuffer(bytearray(stream), dtype=torch.int64) & ((1 << 62) - 1)


def permutation(seed: int, name: str, count: int) -> Tensor:
    """Return a permutation of ``range(count)``, ``[count]`` int64: the stable order of the stream's words."""
    return words(seed, name, count).argsort(stable=True)


def signs(seed: int, name: str, count: int) -> Tensor:
    """Return ``[count]`` float64 of −1 and 1: bit 40 of the stream's words."""
    return ((words(seed, name, count) >> 40) & 1).double() * 2 - 1


def uniform(seed: int, name: str, count: int) -> Tensor:
    """Return ``[count]`` float64 in [0, 1), whole multiples of 2⁻²⁴ and so exact in float32 too."""
    return (words(seed, name, count) >> 38).double() * 2**-24
