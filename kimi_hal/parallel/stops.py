"""States at given tokens inside a call: which an operator stores itself, and where its call is cut for them.

``kda_prefill`` stores one state a sequence, at a multiple of its plan's own chunk. For more of them, or at any
other token, the sequence is cut there: its parts run one after another, and between two of them the state lies
in its slot. Parts stay where they are in the rows; those that are not due are padding of the call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_hal.errors import ContractError
from kimi_hal.parallel.shards import whole_lengths

#: For one sequence: token counts from the call's first row, ascending, and the slots that get the state there.
Stops = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Round:
    """One call over M parts of sequences.

    Attributes:
        cu_seqlens: int32 ``[M + 1]``, all parts of all sequences.
        state_ids: int32 ``[M]``, −1 for a part of another round.
        has_initial_state: bool ``[M]``.
        checkpoint_offsets: int32 ``[M]``, −1 for none.
        checkpoint_ids: int32 ``[M]``, likewise.
        host: ``cu_seqlens`` on the host, for ``prepare``.
        rows: int64, the rows of this round's parts.
        copied: int64 ``[2, C]``, slots copied after the call: from, to.
        zeroed: bool ``[C]``: the state that is handed over is none yet, whatever the slot holds.
    """

    cu_seqlens: Tensor
    state_ids: Tensor
    has_initial_state: Tensor
    checkpoint_offsets: Tensor
    checkpoint_ids: Tensor
    host: Tensor
    rows: Tensor
    copied: Tensor
    zeroed: Tensor

    def hand_over(self, pool: Tensor) -> None:
        """Copy the states of a pool ``[slots, …]`` that are due after this call."""
        source, target = self.copied
        live = (source < len(pool)) & (target < len(pool))  # beyond the pool is padding
        states = pool[source[live]]
        states[self.zeroed[live]] = 0
        pool[target[live]] = states


@dataclass(frozen=True)
class Part:
    """Rows ``start`` to ``end`` of a sequence, the ``turn``-th of its parts; after them, what is stored where.

    ``native`` is (offset, slot) that the operator stores itself, ``copied`` the slots copied at the end.
    """

    sequence: int
    turn: int
    start: int
    end: int
    native: tuple[int, int]
    copied: tuple[int, ...]


def rounds(
    lengths: Sequence[int],
    state_ids: Tensor,
    has_initial_state: Tensor | None,
    stops: Mapping[int, Stops],
    multiple: int | None,
) -> tuple[Round, ...]:
    """Return the calls that leave a state at every stop.

    Args:
        lengths: rows of each sequence.
        state_ids: int32 ``[N]``.
        has_initial_state: bool ``[N]``; ``None``: all True.
        stops: by sequence.
        multiple: what the offsets that the operator stores itself are multiples of; ``None``: it stores none.

    Raises:
        ContractError: stops of a sequence that does not exist, that do not ascend, or lie outside it; a slot
            that two of them store to; fewer state ids than sequences.
    """
    lengths = whole_lengths("state stops", lengths)
    problems = [*_problems(lengths, stops)]
    for name, given in (("state_ids", state_ids), ("has_initial_state", has_initial_state)):
        if given is not None and len(given) < len(lengths):
            problems.append(f"{name} has {len(given)} entries for {len(lengths)} sequences")
    if problems:
        raise ContractError("state stops", problems)
    if has_initial_state is None:
        has_initial_state = torch.ones_like(state_ids, dtype=torch.bool)
    parts = [
        part for n, length in enumerate(lengths) for part in _parts(n, length, stops.get(n, ()), multiple)
    ]
    turns = max((part.turn for part in parts), default=0) + 1
    return tuple(_round(parts, turn, lengths, state_ids, has_initial_state) for turn in range(turns))


def _problems(lengths: Sequence[int], stops: Mapping[int, Stops]) -> Iterator[str]:
    for sequence, wanted in stops.items():
        if not 0 <= sequence < len(lengths):
            yield f"there is no sequence {sequence} among {len(lengths)}"
            continue
        offsets = [offset for offset, _ in wanted]
        if offsets != sorted(offsets):
            yield f"stops of sequence {sequence} do not ascend: {offsets}"
        if not all(isinstance(number, int) for stop in wanted for number in stop):
            yield f"stops of sequence {sequence} must be whole numbers, got {[*wanted]}"
        outside = [offset for offset in offsets if not 0 <= offset <= lengths[sequence]]
        if outside:
            yield f"stop {outside[0]} of sequence {sequence} is outside its {lengths[sequence]} rows"
    stored = Counter(slot for wanted in stops.values() for _, slot in wanted if slot >= 0)
    yield from (f"slot {slot} is stored to by {n} stops" for slot, n in stored.items() if n > 1)


def _parts(sequence: int, length: int, stops: Stops, multiple: int | None) -> Iterator[Part]:
    """Cut one sequence where it must be."""
    start, turn, native = 0, 0, (-1, -1)
    left = [stop for stop in stops if stop[1] >= 0]
    while left:
        offset, slot = left.pop(0)
        if multiple and native == (-1, -1) and (offset - start) % multiple == 0:
            native = (offset - start, slot)
            continue
        together = [slot, *(other for at, other in left if at == offset)]
        left = [stop for stop in left if stop[0] != offset]
        yield Part(sequence, turn, start, offset, native, tuple(together))
        start, turn, native = offset, turn + 1, (-1, -1)
    if start < length or not turn:
        yield Part(sequence, turn, start, length, native, ())


def _round(
    parts: list[Part], turn: int, lengths: Sequence[int], state_ids: Tensor, has_initial_state: Tensor
) -> Round:
    """Return the call in which every sequence's ``turn``-th part is due."""
    device = state_ids.device
    begins = torch.tensor([0, *lengths]).cumsum(0).tolist()
    cuts = torch.tensor([0, *(begins[p.sequence] + p.end for p in parts)], dtype=torch.int32)
    sequence = torch.tensor([p.sequence for p in parts], dtype=torch.int64, device=device)
    due = torch.tensor([p.turn == turn for p in parts], dtype=torch.bool, device=device)
    begun = torch.tensor([p.start > 0 for p in parts], dtype=torch.bool, device=device)
    native = torch.tensor([p.native for p in parts], dtype=torch.int32, device=device).view(-1, 2)
    native = torch.where(due[:, None], native, -1)
    live = [p for p in parts if p.turn == turn]
    rows = [torch.arange(begins[p.sequence] + p.start, begins[p.sequence] + p.end) for p in live]
    copied, zeroed = _copies(live, state_ids, has_initial_state)
    return Round(
        cu_seqlens=cuts.to(device),
        state_ids=torch.where(due, state_ids[sequence], -1),
        has_initial_state=has_initial_state[sequence] | begun,
        checkpoint_offsets=native[:, 0].contiguous(),
        checkpoint_ids=native[:, 1].contiguous(),
        host=cuts,
        rows=torch.cat([torch.empty(0, dtype=torch.int64), *rows]).to(device),
        copied=copied,
        zeroed=zeroed,
    )


def _copies(live: list[Part], state_ids: Tensor, has_initial_state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the slots to copy after a call, and which of them hold no state yet; none of padding."""
    wanted = [(p.sequence, slot, p.end) for p in live for slot in p.copied]
    sequence, slot, end = (
        torch.tensor(wanted, dtype=torch.int64, device=state_ids.device).view(-1, 3).unbind(1)
    )
    source = state_ids.long()[sequence]
    kept = source >= 0
    zeroed = (end == 0) & ~has_initial_state[sequence]
    return torch.stack((source[kept], slot[kept])), zeroed[kept]
