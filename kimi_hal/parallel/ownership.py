"""Which rank owns a position under decode context parallelism, and where it stands there.

``owner(p) = (p // I) % W``, ``local(p) = (p // (W·I))·I + p % I`` and its inverse
``position(j) = (j // I)·(W·I) + r·I + j % I``, for interleave I, world W, rank r
(vLLM ``v1/attention/backends/utils.py``). Each works on ints and on integer tensors alike.
"""

from __future__ import annotations

from typing import Any, TypeVar

from kimi_hal.ops.spec import DCP

Int = TypeVar("Int", bound=Any)


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
    """Return how many of the first ``length`` positions rank ``dcp.rank`` owns; negative counts as 0."""
    run = dcp.world * dcp.interleave
    full = length // run * dcp.interleave
    rest = length % run - dcp.rank * dcp.interleave
    if isinstance(length, int):
        return 0 if length <= 0 else full + min(max(rest, 0), dcp.interleave)
    return (full + rest.clamp(0, dcp.interleave)).where(length > 0, 0)
