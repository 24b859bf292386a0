"""What a layer exchanges over a group: query heads, partial attention results, partial sums.

Each function is made of ``Group.all_gather`` and ``Group.all_to_all``; ranks pass tensors of one shape.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_hal.parallel.groups import Group

#: Bytes that a sum over the group gathers at once, from all ranks together.
GATHERED = 1 << 29
#: Alignment of what stands behind each other in one message.
ALIGN = 16


def gather_heads(group: Group, q: Tensor) -> Tensor:
    """Return the heads of all ranks in rank order: ``[T, H, D]`` becomes ``[T, W·H, D]``."""
    return group.all_gather(q).transpose(0, 1).flatten(1, 2)


def exchange_heads(group: Group, out: Tensor, lse: Tensor, how: str = "a2a") -> tuple[Tensor, Tensor]:
    """Give heads back: from each rank its partial result for the heads of this one.

    Args:
        group: W ranks.
        out: ``[T, W·H, V]``, this rank's part for the heads of all ranks.
        lse: ``[T, W·H]``.
        how: ``"a2a"``: both in one message to each rank. ``"ag_rs"``: every part is gathered whole and the
            own heads are cut out.

    Returns:
        ``outs [W, T, H, V]`` and ``lses [W, T, H]``, as ``merge_attn_states`` takes them: each part's rows are
        contiguous, ``stride(0)`` is not.
    """
    world, rank = group.size(), group.rank()
    if how == "ag_rs":
        mine = slice(rank * out.shape[1] // world, (rank + 1) * out.shape[1] // world)
        return group.all_gather(out)[:, :, mine].contiguous(), group.all_gather(lse)[:, :, mine].contiguous()
    outs, lses = swap(group, *(torch.stack(x.chunk(world, dim=1)) for x in (out, lse)))
    return outs, lses


def swap(group: Group, *pieces: Tensor) -> tuple[Tensor, ...]:
    """Exchange several ``[W, …]`` in one message: ``x[i]`` goes to rank i, ``result[j]`` came from rank j.

    Each piece stands at a multiple of 16 bytes in the message, so that a result is a view of it: its
    ``stride(0)`` is free, the rest is contiguous. Without any bytes nothing is sent.
    """
    if not any(piece.numel() for piece in pieces):
        return pieces
    received, start = group.all_to_all(torch.cat([_bytes(piece) for piece in pieces], dim=1)), 0
    results = []
    for piece in pieces:
        flat = received[:, start : start + piece[0].nbytes]
        results.append(flat.view(piece.dtype).view(piece.shape))
        start += _padded(piece[0].nbytes)
    return tuple(results)


def _bytes(piece: Tensor) -> Tensor:
    """Return ``[W, bytes]`` of ``[W, ...]``, each row padded to the alignment."""
    flat = piece.contiguous().flatten(1).view(torch.uint8)
    return torch.nn.functional.pad(flat, (0, _padded(flat.shape[1]) - flat.shape[1]))


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def sum_in_rank_order(group: Group, x: Tensor) -> Tensor:
    """Return the sum of every rank's ``x [T, …]``, added from rank 0 up in x's dtype: the same bits everywhere.

    Rows are gathered in pieces of bounded size.
    """
    total = torch.empty_like(x)
    rows = max(1, GATHERED // max(1, group.size() * x[:1].nbytes))
    for start in range(0, x.shape[0], rows):
        piece = slice(start, start + rows)
        parts = group.all_gather(x[piece])
        added = parts[0]
        for part in parts[1:]:
            added = added + part
        total[piece] = added
    return total
