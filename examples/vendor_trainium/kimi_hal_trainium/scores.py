"""``indexer_logits`` a tile of keys at a time. Nothing is read on the host: shapes alone decide what runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from kimi_hal.dispatch.contract import BuildContext
from kimi_hal.ops.indexer import logits_width
from kimi_hal.parallel import ownership
from torch import Tensor

from kimi_hal_trainium.codes import decoding_table
from kimi_hal_trainium.tiles import spans, tile_of


def build(ctx: BuildContext) -> Callable[..., Tensor]:
    """Return the function that scores rows against index keys for one Spec."""
    spec, limits, check = ctx.spec, ctx.limits, ctx.check
    tile, table = tile_of(ctx.settings), decoding_table(ctx.persistent)
    score = getattr(torch, spec.score)

    def run(
        q: Tensor,
        q_scale: Tensor,
        weights: Tensor,
        cache: Tensor,
        block_table: Tensor,
        row_req: Tensor,
        row_len: Tensor,
        *,
        step: Tensor | None = None,
        out: Tensor | None = None,
        workspace: Tensor | None = None,
    ) -> Tensor:
        check(
            q=q,
            q_scale=q_scale,
            weights=weights,
            cache=cache,
            block_table=block_table,
            row_req=row_req,
            row_len=row_len,
            step=step,
            out=out,
            workspace=workspace,
        )
        rows, columns = q.shape[0], block_table.shape[1]
        if out is None:
            out = q.new_empty((rows, logits_width(spec, limits, columns)), dtype=score)
        if workspace is None:
            workspace = q.new_empty(ctx.sizes.workspace, dtype=torch.uint8)
        if not rows or not block_table.shape[0]:
            return out
        count = key_counts(spec, row_len, columns) if step is None else step.view(torch.int32)[:rows]
        room = workspace[: tile * spec.head_dim * 4].view(torch.float32).view(tile, spec.head_dim)
        for row in range(rows):
            pages = block_table[row_req[row].clamp(0, block_table.shape[0] - 1)]
            query = table[q[row].view(torch.uint8).long()]
            weight = weights[row].float()
            for span in spans(min(columns * spec.page, out.shape[1]), tile):
                keys, lost = gather(spec, cache, pages, span, table, room)
                line = torch.relu(query @ keys.T).mul(weight[:, None]).sum(dim=0)
                line.masked_fill_(lost, -torch.inf)
                inside = torch.arange(span.start, span.stop, device=q.device) < count[row]
                out[row, span] = torch.where(inside, line.to(score), out[row, span])
        return out

    return run


def prepare(ctx: BuildContext) -> Callable[..., None]:
    """Return the function that fills ``step``: once a step for all layers, on the device, at one address."""
    spec = ctx.spec

    def fill(
        row_req: Tensor,
        row_len: Tensor,
        block_table: Tensor,
        *,
        step: Tensor,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_host: Any = None,
        max_context: int | None = None,
    ) -> None:
        counts = key_counts(spec, row_len, block_table.shape[1])
        step.view(torch.int32)[: counts.shape[0]] = counts

    return fill


def key_counts(spec: Any, row_len: Tensor, columns: int) -> Tensor:
    """Return how many keys each row has on this rank, int32, clamped to what the block table can name."""
    local = ownership.local_length(row_len.long(), ownership.of_keys(spec.dcp))
    return local.clamp(max=columns * spec.page).int()


def gather(
    spec: Any, cache: Tensor, pages: Tensor, span: slice, table: Tensor, room: Tensor
) -> tuple[Tensor, Tensor]:
    """Decode the keys of some positions into ``room``; tell which of them have no page.

    A page holds 64 keys of 128 bytes, then their 64 scales in float32 (``docs/formats.md``). What lies beyond a
    row's length is read like a key, from some page of this cache, and then not used.
    """
    position = torch.arange(span.start, span.stop, device=cache.device)
    page = pages[position // spec.page].long()
    lost = (page < 0) | (page >= cache.shape[0])
    page, slot = page.clamp(0, max(0, cache.shape[0] - 1)), position % spec.page
    count = room[: position.shape[0]]
    if not cache.shape[0]:
        return count.zero_(), lost
    ends = spec.page * spec.head_dim
    codes = cache[:, :ends].view(-1, spec.page, spec.head_dim)[page, slot]
    scales = cache[:, ends : ends + 4 * spec.page].view(-1, spec.page, 4)[page, slot]
    torch.mul(table[codes.long()], scales.view(torch.float32), out=count)
    return count, lost
