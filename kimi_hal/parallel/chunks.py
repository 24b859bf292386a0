"""Prompts cut into the microbatches of a pipeline: each costs about the same, so that no stage waits.

A row of a layer with an indexer costs more the more tokens stand before it, so equal numbers of rows are not
equal work: later chunks of a long prompt have fewer rows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from kimi_hal.errors import ContractError
from kimi_hal.parallel.shards import whole_lengths


@dataclass(frozen=True)
class Chunk:
    """Rows ``start`` to ``end`` of one request's new tokens."""

    request: int
    start: int
    end: int


def microbatches(
    new: Sequence[int],
    cached: Sequence[int],
    rows: int,
    *,
    even: int | None = None,
    multiple: int = 1,
) -> list[list[Chunk]]:
    """Cut requests into microbatches, in order; a request's chunks are never in one microbatch twice.

    Args:
        new: tokens to compute of each request.
        cached: tokens before them that need no computing.
        rows: of one microbatch, at most.
        even: how many earlier tokens cost a row as much as everything else in it does; a microbatch then costs
            no more than ``rows`` rows of a request without a cache. ``None``: rows alone count.
        multiple: a chunk that does not end its request ends at a multiple of so many tokens from the request's
            start (a cache block, a plan's ``checkpoint_multiple``), where that leaves it any rows.

    Raises:
        ContractError: ``rows`` is less than 1 or less than ``multiple``: nothing could move on. ``new`` and
            ``cached`` of different lengths, or with what is no number of tokens; ``even`` or ``multiple`` below 1.
    """
    new, cached = (whole_lengths("microbatches", each) for each in (new, cached))
    _check(len(new), len(cached), rows, even, multiple)
    budget = _cost(0, rows, even)
    batches: list[list[Chunk]] = [[]]
    used, left = 0.0, rows
    for request, (count, before) in enumerate(zip(new, cached, strict=True)):
        start = 0
        while start < count:
            size = _fitting(before + start, min(count - start, left), budget - used, even)
            if start + size < count:
                size = _aligned(before + start, size, multiple)
            if size < 1 and not batches[-1]:
                size = min(count - start, _step(before + start, multiple))  # more than a budget, alone
            if size < 1:
                batches.append([])
                used, left = 0.0, rows
                continue
            batches[-1].append(Chunk(request, start, start + size))
            used += _cost(before + start, size, even)
            left -= size
            start += size
            if start < count:
                batches.append([])
                used, left = 0.0, rows
    return [batch for batch in batches if batch]


def _check(new: int, cached: int, rows: int, even: int | None, multiple: int) -> None:
    reasons = []
    if new != cached:
        reasons.append(f"new names {new} requests, cached {cached}")
    for name, value in (("multiple", multiple), ("even", even), ("rows", rows)):
        if value is not None and (not isinstance(value, int) or value < 1):
            reasons.append(f"{name}={value!r} must be a whole number from 1")
    if not reasons and rows < multiple:
        reasons.append(f"rows={rows}: a microbatch has at least {multiple} (multiple={multiple})")
    if reasons:
        raise ContractError("microbatches", reasons)


def last_stop(start: int, end: int, block: int) -> int | None:
    """Return the rows after which the last block of a chunk is full, or ``None``: what a prefix cache stores.

    Args:
        start: tokens of the request before the chunk.
        end: tokens after it.
        block: tokens of a cache block.

    Raises:
        ContractError: ``block`` is below 1.
    """
    if block < 1:
        raise ContractError("last_stop", [f"block={block} must be at least 1"])
    stop = end // block * block - start
    return stop if stop > 0 else None


def _cost(before: int, rows: int, even: int | None) -> float:
    """Return the cost of ``rows`` rows after ``before`` tokens, in rows of no context."""
    return rows if even is None else rows + rows * (before + (rows - 1) / 2) / even


def _fitting(before: int, rows: int, budget: float, even: int | None) -> int:
    """Return the most rows, up to ``rows``, that cost no more than ``budget``."""
    return bisect_right(range(1, rows + 1), budget, key=lambda n: _cost(before, n, even))


def _aligned(before: int, size: int, multiple: int) -> int:
    """Return the rows up to the last multiple within ``size`` rows after ``before`` tokens."""
    return (before + size) // multiple * multiple - before


def _step(before: int, multiple: int) -> int:
    """Return the rows up to the next multiple."""
    return multiple - before % multiple
