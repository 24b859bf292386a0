"""Which rank owns a position under decode context parallelism, and where it stands there.

``owner(p) = (p // I) % W``, ``local(p) = (p // (W·I))·I + p % I`` and its inverse
``position(j) = (j // I)·(W·I) + r·I + j % I``, for interleave I, world W, rank r
(vLLM ``v1/attention/backends/utils.py``).

Each function takes a Python int or an integer tensor and returns its like. Arithmetic stays in the tensor's
own dtype: give int64, since ``position`` of a 32-bit place can pass 2³¹. A negative number is a sentinel, not
a position: mask it before or after, its result means nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from kimi_hal.ops.spec import DCP

if TYPE_CHECKING:
    from torch import Tensor

Int = TypeVar("Int", int, "Tensor")


def of_keys(dcp: DCP) -> DCP:
    """Return how the index keys are spread: as positions are, or not at all where every rank holds them all."""
    return DCP() if dcp.index == "replicated" else dcp


def owner(position: Int, dcp: DCP) -> Int:
    """Return the rank that owns a global position."""
    return position // dcp.interleave % dcp.world


def local(position: Int, dcp: DCP) -> Int:
    """Return the place of a global position on its owner."""
    return position // (dcp.world * dcp.interleave) * dcp.interleave + position % dcp.interleave


def position(index: Int, dcp: DCP) -> Int:
    """Return the global position of a place on rank ``dcp.rank``."""
    run = dcp.world * dcp.interleave
    return index // dcp.interleave * run + dcp.rank * dcp.interleave + index % dcp.interleave


def local_length(length: Int, dcp: DCP) -> Int:
    """Return how many of the first ``length`` positions rank ``dcp.rank`` owns; a negative length is 0."""
    run = dcp.world * dcp.interleave
    if isinstance(length, int):
        whole = max(length, 0)
        rest = whole % run - dcp.rank * dcp.interleave
        return whole // run * dcp.interleave + min(max(rest, 0), dcp.interleave)
    bound = length.clamp(min=0)
    over = (bound % run - dcp.rank * dcp.interleave).clamp(0, dcp.interleave)
    return bound // run * dcp.interleave + over
