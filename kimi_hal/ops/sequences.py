"""Checks of how rows are cut into sequences and which state slots those name. Used only in checked mode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any


def counts(t: Mapping[str, Any]) -> list[int]:
    """Return the rows that each sequence has, −1 for one that is padding (``state_ids`` below 0)."""
    bounds = t["cu_seqlens"].tolist()
    rows = [max(end - start, 0) for start, end in pairwise(bounds)]
    return [count if slot >= 0 else -1 for count, slot in zip(rows, t["state_ids"].tolist(), strict=True)]


def cuts(t: Mapping[str, Any], rows: int) -> Iterator[str]:
    """Yield for a ``cu_seqlens`` that does not start at 0, decreases, or ends beyond the rows."""
    bounds = t["cu_seqlens"].tolist()
    if bounds[0] != 0:
        yield f"cu_seqlens must start at 0, got {bounds[0]}"
    for n, (start, end) in enumerate(pairwise(bounds)):
        if end < start:
            yield f"cu_seqlens decreases from {start} to {end} at sequence {n}"
            break
    if bounds[-1] > rows:
        yield f"cu_seqlens ends at {bounds[-1]}, beyond the {rows} rows"


def slots(name: str, ids: Sequence[int], live: Sequence[bool], capacity: int) -> Iterator[str]:
    """Yield for a slot beyond the pool, and for one that two live rows name. Negative ids pass."""
    beyond = [slot for slot in ids if slot >= capacity]
    if beyond:
        yield f"{name} holds {beyond[0]}, beyond the pool's {capacity} slots"
    used: set[int] = set()
    for slot, counts_here in zip(ids, live, strict=True):
        if slot < 0 or not counts_here:
            continue
        if slot in used:
            yield f"{name} names slot {slot} in two live rows"
            return
        used.add(slot)


def checkpoints(
    t: Mapping[str, Any], offsets: str, rows: Sequence[int], written: Sequence[int], capacity: int
) -> Iterator[str]:
    """Yield for a checkpoint beyond its sequence, or in a slot that the call writes for another purpose.

    Args:
        t: operands; ``t["checkpoint_ids"]`` and ``t[offsets]`` are looked at where both are given.
        offsets: the argument that says after how many rows.
        rows: rows of each sequence, −1 where nothing is stored.
        written: slots that receive final states.
        capacity: slots of the pool.
    """
    if t.get("checkpoint_ids") is None or t.get(offsets) is None:
        return
    taken = set(written)
    table = zip(t["checkpoint_ids"].tolist(), t[offsets].tolist(), rows, strict=True)
    for n, (slot, offset, count) in enumerate(table):
        if slot < 0 or count < 0:
            continue
        if slot >= capacity:
            yield f"checkpoint_ids holds {slot}, beyond the pool's {capacity} slots"
        elif slot in taken:
            yield f"checkpoint_ids names slot {slot}, which this call writes for another purpose"
        if not 0 <= offset <= count:
            yield f"{offsets} holds {offset} for sequence {n}, which has {count} rows"
        taken.add(slot)
