"""The sizes that programs are compiled for. XLA compiles a program a shape: what comes in any size is padded to one.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from kimi_hal.errors import ContractError
from kimi_hal.ops.spec import Limits

#: Rows of the smallest bucket where Limits name none.
SMALLEST = 8


def of_rows(limits: Limits | None) -> tuple[int, ...]:
    """Return the row counts that a plan compiles for.

    They are ``Limits.row_buckets``, or powers of two up to ``max_rows`` where there are none.
    """
    if limits is None:
        return ()
    if limits.row_buckets:
        # None has 0 rows: XLA slices no such array.
        return tuple(rows for rows in limits.row_buckets if rows) or (1,)
    found = [SMALLEST]
    while found[-1] < limits.max_rows:
        found.append(found[-1] * 2)
    return tuple(found)


def on_device(limits: Limits | None) -> tuple[int, ...]:
    """Return the row counts that a call on the device may have beside 0.

    They are those of ``of_rows``; where Limits name none, ``max_rows`` is the largest, which no call exceeds, and 1 at
    least: a call on 0 rows that writes something is compiled for the smallest.
    """
    if limits is None or limits.row_buckets:
        return of_rows(limits)
    most = max(1, limits.max_rows)
    return *(rows for rows in of_rows(limits) if rows < most), most


def fit(operator: str, what: str, size: int, buckets: Sequence[int]) -> int:
    """Return the smallest bucket that holds ``size``; without buckets the next power of two.

    Raises:
        ContractError: it is in no bucket; the buckets are named.
    """
    if not buckets:
        return power(size)
    found = next((bucket for bucket in buckets if bucket >= size), None)
    if found is None:
        raise ContractError(operator, [outside(what, size, buckets)])
    return found


def exact(operator: str, what: str, size: int, buckets: Sequence[int]) -> None:
    """Refuse a size that is no bucket: on the device a padded copy would be a program a size.

    Raises:
        ContractError: it is none; the buckets are named.
    """
    if buckets and size not in buckets:
        raise ContractError(operator, [outside(what, size, buckets)])


def outside(what: str, size: int, buckets: Sequence[int]) -> str:
    """Say that a size is in no bucket."""
    listed = ", ".join(map(str, buckets))
    return (
        f"{what}={size} is in no bucket; this plan compiles for {listed}. Plan with Limits(row_buckets=…) that hold "
        f"it, and pad to one: a length of 0 or an index of −1 marks a padded row"
    )


def power(size: int, least: int = 1) -> int:
    """Return the smallest power of two that is no less than a size, and no less than ``least``."""
    return max(least, 1 << max(0, size - 1).bit_length())
