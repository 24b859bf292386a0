"""``topk_select`` without a sort: the device compares and counts. 32 rounds find the score that k keys reach.

Scores become unsigned integers in the order of rule 2. The k-th largest is built bit by bit from the top; all
above it are winners, and of those equal to it the first by position.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from kimi_hal.dispatch.contract import BuildContext
from kimi_hal.parallel import ownership
from torch import Tensor

#: What is no key is 0, any NaN 1, −inf and everything above it more.
NAN = 1


def build(ctx: BuildContext) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the function that selects the best keys of each row for one Spec."""
    spec, check = ctx.spec, ctx.check
    score, shards = getattr(torch, spec.score), ownership.of_keys(spec.dcp)

    def run(
        scores: Tensor,
        row_len: Tensor,
        row_start: Tensor | None = None,
        *,
        out: Tensor | None = None,
        scores_out: Tensor | None = None,
        workspace: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        check(
            scores=scores,
            row_len=row_len,
            row_start=row_start,
            out=out,
            scores_out=scores_out,
            workspace=workspace,
        )
        rounded = scores.float().to(score)
        length = ownership.local_length(row_len.long(), shards)
        position, key = window(length, row_start, scores.shape[1])
        won = winners(ordinals(rounded, key), key, spec.topk)
        index = compact(position, won, spec.topk, -1).int()
        selected = compact(rounded, won, spec.topk if spec.return_selected else 0, -torch.inf)
        return place(index, out), place(selected, scores_out)

    return run


def window(length: Tensor, start: Tensor | None, width: int) -> tuple[Tensor, Tensor]:
    """Return each column's position in its row's window, and whether it is a key."""
    first = torch.zeros_like(length) if start is None else start.long().clamp(0, width)
    position = torch.arange(width, device=length.device) - first[:, None]
    return position, (position >= 0) & (position < length[:, None])


def ordinals(scores: Tensor, key: Tensor) -> Tensor:
    """Return int64 numbers below 2^32 in the order of the scores: no key, NaN, −inf … +inf; −0 equals +0."""
    bits = (scores.float() + 0.0).contiguous().view(torch.int32).long()  # −0 + 0 is +0
    unsigned = torch.where(bits < 0, -1 - bits, bits + (1 << 31))  # a larger negative number has larger bits
    return unsigned.masked_fill(scores.isnan(), NAN).masked_fill(~key, 0)


def winners(ordinal: Tensor, key: Tensor, k: int) -> Tensor:
    """Return which columns of each row are among its k best keys."""
    threshold = ordinal.new_zeros((ordinal.shape[0], 1))
    for bit in reversed(range(32)):
        raised = threshold | (1 << bit)
        reached = (ordinal >= raised).sum(dim=1, keepdim=True) >= k
        threshold = torch.where(reached, raised, threshold)
    above, equal = ordinal > threshold, (ordinal == threshold) & key
    left = k - above.sum(dim=1, keepdim=True)
    return (above & key) | (equal & (equal.cumsum(dim=1) <= left))


def compact(values: Tensor, won: Tensor, k: int, filler: Any) -> Tensor:
    """Return the winners' values at the front of ``[T, k]``, in the order of their positions."""
    target = torch.where(won, won.cumsum(dim=1) - 1, k).clamp(max=k)
    rows = values.new_full((values.shape[0], k + 1), filler)  # the losers meet in the last column
    return rows.scatter_(1, target, values)[:, :k]


def place(value: Tensor, buffer: Tensor | None) -> Tensor:
    """Return a result, in the caller's buffer if there is one."""
    return value.contiguous() if buffer is None else buffer.copy_(value)
