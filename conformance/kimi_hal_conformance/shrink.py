"""Make a failing case smaller: one row of it, or one sequence, that still fails alone."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from kimi_hal import ops
from kimi_hal_conformance.case import PART, Case, Operands, drawn

#: Rows or sequences that are tried, at most.
TRIED = 32
#: Operators whose cases hold the operands of the call before theirs.
BEFORE = {"kda_commit": "kda_verify"}


def smallest(case: Case, seed: int, fails: Callable[[Case], bool], seconds: float = math.inf) -> Case:
    """Return this case cut down to one row or sequence that fails alone, or as it is where none does.

    No piece is begun after so many seconds.
    """
    end = time.monotonic() + seconds
    for piece in pieces(case, seed):
        if time.monotonic() > end:
            break
        if fails(piece):
            return piece
    return case


def pieces(case: Case, seed: int) -> Iterator[Case]:
    """Yield the case cut down to each of its rows, or of its sequences where it has those."""
    operands = drawn(case, seed)
    dims = places(case.operator)
    first = operands["ranks"][0] if case.ranks else operands
    rows = next((first[name].shape[at["T"]] for name, at in dims.items() if _has(first, name, at, "T")), 0)
    if "num_tokens" in first:  # it counts rows from the first
        return
    if "cu_seqlens" in first:
        kind, count = "sequence", first["state_ids"].shape[0]
    else:
        kind, count = "row", rows
    for number in range(min(count, TRIED) if count > 1 else 0):
        yield dataclasses.replace(
            case,
            id=f"{case.id}{PART}{kind} {number} of {count}",
            make=_cut(case, seed, dims, number),
            sparse={name: far for name, far in case.sparse.items() if far.ids},  # not rows that are cut
        )


def places(operator: str) -> Mapping[str, Mapping[str, int]]:
    """Return where each operand has its rows (T) and its sequences (N)."""
    args = {
        name: arg
        for op in (BEFORE.get(operator, operator), operator)
        for name, arg in ops.get(op).args.items()
    }
    found: dict[str, dict[str, int]] = {}
    for name, arg in args.items():
        letters = [word.removeprefix(">=") for word in arg.shape.split()]
        found[name] = {letter: letters.index(letter) for letter in ("T", "N") if letter in letters}
    return found


def _has(operands: Mapping[str, Any], name: str, at: Mapping[str, int], letter: str) -> bool:
    return letter in at and isinstance(operands.get(name), Tensor)


def _cut(
    case: Case, seed: int, dims: Mapping[str, Mapping[str, int]], number: int
) -> Callable[[torch.Generator], Operands]:
    """Return what makes the piece; its operands are those of the whole case at the same seed."""

    def make(_: torch.Generator) -> Operands:
        operands = drawn(case, seed)
        if case.ranks:
            return {"ranks": [_piece(own, dims, number) for own in operands["ranks"]]}
        return _piece(operands, dims, number)

    return make


def _piece(operands: Operands, dims: Mapping[str, Mapping[str, int]], number: int) -> Operands:
    rows = slice(number, number + 1)
    cuts = operands.get("cu_seqlens")
    own = rows if cuts is None else slice(int(cuts[number]), int(cuts[number + 1]))
    kept = dict(operands)
    for name, at in dims.items():
        for letter, part in (("T", own), ("N", rows)):
            if _has(kept, name, at, letter):
                kept[name] = kept[name][(slice(None),) * at[letter] + (part,)]
    if cuts is not None:
        kept["cu_seqlens"] = torch.tensor([0, own.stop - own.start], dtype=cuts.dtype)
    return kept


def described(case: Case, seed: int) -> str:
    """Say what a case's operands are: names, dtypes and shapes, and the values of a few integers."""
    operands = drawn(case, seed)
    first = operands["ranks"][0] if case.ranks else operands
    ranks = f" on each of {case.ranks} ranks" if case.ranks else ""
    return ", ".join(f"{name} {_described(value)}" for name, value in first.items()) + ranks


def _described(value: Any) -> str:
    if isinstance(value, Mapping | list | tuple):
        inner = value.values() if isinstance(value, Mapping) else value
        return f"({', '.join(map(_described, inner))})"
    if not isinstance(value, Tensor):
        return repr(value)
    if not value.is_floating_point() and value.dtype != torch.uint8 and value.numel() <= 8:
        return f"{value.tolist()}"
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
