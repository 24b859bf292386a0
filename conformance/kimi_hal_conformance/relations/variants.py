"""Other operands of the same call: some of its rows or sequences, in another order, or marked as padding.

What holds of one must hold of the other, whoever computes them: that is what relations are made of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kimi_hal_conformance.case import Checkpoint, Operands
from kimi_hal_conformance.shrink import places

#: Operand -> what it holds where its row or sequence is padding (``docs/contract.md``, "What marks padding").
PADDING = {"slots": -1, "state_ids": -1, "row_len": 0, "indices": -1, "topk_ids": -1}

#: Operands with a row a request.
TABLES = ("block_table", "latent_table", "index_table")


def count(operator: str, operands: Operands) -> int:
    """Return how many sequences a call has, or rows where it has no sequences."""
    if "cu_seqlens" in operands:
        return int(operands["cu_seqlens"].numel()) - 1
    return total(operator, operands)


def total(operator: str, operands: Operands) -> int:
    """Return how many rows a call has, padding included; some operands may have more."""
    dims = places(operator)
    return min(
        (_tensor(operands, n).shape[at["T"]] for n, at in dims.items() if _has(operands, n, at, "T")),
        default=0,
    )


def divisible(operator: str, operands: Operands) -> bool:
    """Tell whether a call can be cut into rows or sequences at all, and put together from them."""
    return count(operator, operands) > 1 and not {"more", "num_tokens"} & operands.keys()


def taken(operator: str, operands: Operands, numbers: Sequence[int], tail: bool = False) -> dict[str, Any]:
    """Return the operands of some rows or sequences alone, in the order given.

    Args:
        operator: its name.
        operands: of the whole call.
        numbers: of the rows, or of the sequences where the call has those.
        tail: keep what stands behind the rows: padding behind the last sequence, rows that no slot asks for.
    """
    kept, rows = dict(operands), rows_of(operator, operands, numbers, tail)
    whole = total(operator, operands)
    if "cu_seqlens" in operands:
        lengths = operands["cu_seqlens"].diff()[list(numbers)]
        kept["cu_seqlens"] = ends_of(lengths)
    for name, at in places(operator).items():
        for letter, chosen in (("T", rows), ("N", list(numbers))):
            if _has(kept, name, at, letter):
                surplus = range(whole, kept[name].shape[at[letter]]) if tail and letter == "T" else ()
                kept[name] = _along(kept[name], at[letter], [*chosen, *surplus])
    return kept


def rows_of(operator: str, operands: Operands, numbers: Sequence[int], tail: bool = False) -> list[int]:
    """Return the rows of some rows or sequences, in the order given, and with ``tail`` those of no sequence."""
    if "cu_seqlens" not in operands:
        return list(numbers)
    ends = operands["cu_seqlens"].tolist()
    rows = [row for n in numbers for row in range(ends[n], ends[n + 1])]
    return [*rows, *(range(ends[-1], total(operator, operands)) if tail else ())]


def ends_of(lengths: Tensor) -> Tensor:
    """Return the offsets of sequences of these lengths."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()


def backwards(operator: str, operands: Operands) -> dict[str, Any]:
    """Return the operands with the last row or sequence first, and the last request first."""
    kept = taken(operator, operands, order(count(operator, operands)), tail=True)
    tables = [name for name in TABLES if isinstance(kept.get(name), Tensor)]
    if tables and isinstance(kept.get("row_req"), Tensor):
        requests, own = kept[tables[0]].shape[0], kept["row_req"]
        kept |= {name: kept[name].flip(0) for name in tables}
        kept["row_req"] = torch.where((own >= 0) & (own < requests), requests - 1 - own, own)
    return kept


def order(number: int) -> range:
    """Return the rows' old numbers in ``backwards``."""
    return range(number - 1, -1, -1)


def padded(operator: str, operands: Operands, numbers: Sequence[int]) -> dict[str, Any] | None:
    """Return the operands with some rows or sequences marked as padding; ``None`` where nothing marks them."""
    markers = [n for n in PADDING if isinstance(operands.get(n), Tensor)]
    if not markers or "more" in operands or not numbers:
        return None
    kept = dict(operands)
    for name in markers:
        kept[name] = operands[name].clone()
        kept[name][list(numbers)] = PADDING[name]
    return kept


def alike(one: Any, other: Any) -> bool:
    """Tell whether operands can take each other's places: tensors of one dtype and shape, equal scalars."""
    if isinstance(one, Checkpoint) or isinstance(other, Checkpoint):
        return isinstance(one, Checkpoint) and isinstance(other, Checkpoint)
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and (one.shape, one.dtype) == (other.shape, other.dtype)
    if isinstance(one, Mapping):
        same = isinstance(other, Mapping) and one.keys() == other.keys()
        return same and all(alike(value, other[name]) for name, value in one.items())
    if isinstance(one, list | tuple):
        same = isinstance(other, list | tuple) and len(one) == len(other)
        return same and all(map(alike, one, other))
    return bool(one == other)


def with_weights_of(first: Operands, other: Operands) -> dict[str, Any]:
    """Return other operands with the first ones' weights: those stay where they are as long as a model is loaded."""
    return {n: first[n] if isinstance(value, Checkpoint) else value for n, value in other.items()}


def rescaled(first: Operands, other: Operands) -> dict[str, Any]:
    """Return other operands with half of each scale that is one number, where no seed changes it."""
    return {
        name: value / 2 if _is_scale(value) and torch.equal(value, first[name]) else value
        for name, value in other.items()
    }


def _is_scale(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and value.dtype == torch.float32


def _along(tensor: Tensor, dim: int, numbers: Sequence[int]) -> Tensor:
    """Return a run of rows as a view, whose strides are the call's own; others in new memory."""
    if list(numbers) == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else False:
        return tensor.narrow(dim, numbers[0], len(numbers))
    return tensor.index_select(dim, torch.tensor(numbers, dtype=torch.int64))


def _tensor(operands: Operands, name: str) -> Tensor:
    found: Tensor = operands[name]
    return found


def _has(operands: Operands, name: str, at: Mapping[str, int], letter: str) -> bool:
    return letter in at and isinstance(operands.get(name), Tensor)
