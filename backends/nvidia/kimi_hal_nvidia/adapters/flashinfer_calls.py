"""The run function of ``sparse_mla`` around a library that takes row numbers of the cache, and no row without any.

Indices of any space become rows of the cache, those that count at the front; many rows of a call go in parts, so that
what a library wants for each has a bound; rows without a key are put right behind it, whatever it left there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kimi_hal.dispatch.contract import BuildContext
from kimi_hal_nvidia.adapters import compacted, slots
from kimi_hal_nvidia.adapters.pages import with_stride
from kimi_hal_nvidia.streams import on_device

#: Indices of a row come in whole numbers of these; what is read of them at a time divides it.
INDICES = 128


@dataclass(frozen=True)
class Operands:
    """What some rows of a call attend with.

    Args:
        q: ``[T, H, 576]``.
        cache: ``[pages, page_bytes]`` uint8, not empty.
        index: ``[T, k]`` int32, ``page · P + place`` of the keys of each row, −1 behind them; k is a multiple of 128.
        count: ``[T]`` int32 keys of each row; 0 is possible.
        k_scale: ``[1]`` float32 or None.
        q_scale: ``[1]`` float32 or None.
    """

    q: Tensor
    cache: Tensor
    index: Tensor
    count: Tensor
    k_scale: Any
    q_scale: Any


class Attend(Protocol):
    """Attends by a library."""

    def __call__(self, given: Operands, workspace: Tensor) -> tuple[Tensor, Any]:
        """Return out ``[T, H, 512]`` and its natural LSE ``[T, H]``, or None where none was asked for.

        Rows whose count is 0 may hold anything.
        """
        ...


def built(ctx: BuildContext, attend: Attend, together: int) -> Callable[..., Any]:
    """Make the run function of ``sparse_mla``.

    Args:
        ctx: what the builder was given.
        attend: by the library, for at most ``together`` rows.
        together: rows of a part.
    """
    spec, check, size = ctx.spec, ctx.check, ctx.sizes.workspace
    lse_width = spec.num_heads if spec.return_lse else 0

    def run(
        q: Any,
        cache: Any,
        indices: Any,
        k_scale: Any = None,
        q_scale: Any = None,
        index_len: Any = None,
        block_table: Any = None,
        row_req: Any = None,
        *,
        step: Any = None,
        out: Any = None,
        lse_out: Any = None,
        workspace: Any = None,
    ) -> Any:
        check(
            q=q,
            cache=cache,
            indices=indices,
            k_scale=k_scale,
            q_scale=q_scale,
            index_len=index_len,
            block_table=block_table,
            row_req=row_req,
            step=step,
            out=out,
            lse_out=lse_out,
            workspace=workspace,
        )
        rows = q.shape[0]
        if out is None:
            out = q.new_empty((rows, spec.num_heads, spec.kv_rank), dtype=torch.bfloat16)
        if lse_out is None:
            lse_out = q.new_empty((rows, lse_width), dtype=torch.float32)
        if not rows:
            return out, lse_out
        if not cache.shape[0]:
            return out.zero_(), lse_out.fill_(-math.inf)
        cache = with_stride(cache)
        if workspace is None:
            workspace = q.new_empty(size, dtype=torch.uint8)
        units = (spec.page, 1)
        named = slots.turn(spec, indices, index_len, block_table, row_req, cache.shape[0], INDICES, units)
        index, count = compacted.compact(named)
        for first in range(0, rows, together):
            some = slice(first, first + together)
            given = Operands(q[some], cache, index[some], count[some], k_scale, q_scale)
            found, lse = attend(given, workspace)
            keyless = (given.count == 0)[:, None]
            out[some] = found.masked_fill_(keyless[..., None], 0)
            if lse_width:
                lse_out[some] = lse.masked_fill_(keyless, -math.inf)
        return out, lse_out

    return on_device(ctx.device, run)


def padded(q: Tensor, heads: int) -> Tensor:
    """Return packed queries of so many heads, those that are added 0."""
    if q.shape[1] < heads:
        q = torch.nn.functional.pad(q.view(torch.uint8), (0, 0, 0, heads - q.shape[1])).view(q.dtype)
    return q.contiguous()
