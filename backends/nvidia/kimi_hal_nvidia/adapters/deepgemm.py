"""``indexer_logits`` by DeepGEMM's FP8 products: paged for few rows a request, over gathered keys for many.

Hopper adds FP8 products with fewer bits than float32, so its scores are off by one to two thousandths: the numerics
class ``logits=fp8_sum``. What DeepGEMM leaves to its caller is done here: a length for each row of this rank, a line of
the block table for each row, the score of a key that has no page.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kimi_hal.dispatch.contract import BuildContext
from kimi_hal.ops.indexer import logits_width
from kimi_hal_nvidia.adapters import keys, libraries
from kimi_hal_nvidia.adapters.sizes import ELEMENTS, SCALES, TOGETHER, prefill
from kimi_hal_nvidia.streams import on_device

PAGE = 64
#: What each operator of the library is given, in this order.
PAGED = (
    *("q", "q_sf", "kv_cache", "weights", "context_lens", "block_table", "schedule_meta"),
    "max_context_len",
)
SCHEDULE = ("context_lens", "block_kv", "num_sms")
GATHERED = (
    *("q", "q_sf", "kv", "kv_sf", "weights", "cu_seq_len_k_start", "cu_seq_len_k_end"),
    "max_seqlen_k",
)


def library(name: str, arguments: tuple[str, ...]) -> Callable[..., Any]:
    """Return one of DeepGEMM's operators."""
    libraries.deepgemm()
    return libraries.operator("deep_gemm", name, arguments)


class Paged:
    """Scores rows against pages, one or two rows of a request together."""

    def __init__(self, ctx: BuildContext) -> None:
        self.spec, self.limits = ctx.spec, ctx.limits
        self.score = library("fp8_fp4_paged_mqa_logits", PAGED)
        self.schedule = library("get_paged_mqa_logits_metadata", SCHEDULE)
        self.processors = int(torch.ops.deep_gemm.get_num_sms())

    def together(self, rows: int) -> int:
        """Return how many rows of a request are scored at once."""
        each = self.limits.rows_per_req if self.limits.uniform else 1
        return each if each <= TOGETHER and not rows % each else 1

    def plan(self, row_len: Tensor, room: int) -> tuple[Tensor, Tensor]:
        """Return the keys of each row and who computes which of them."""
        rows = row_len.shape[0]
        lengths = keys.counts(row_len, self.spec.dcp, room).view(-1, self.together(rows))
        return lengths, self.schedule(lengths, PAGE, self.processors)

    def prepared(self, step: Tensor | None, row_len: Tensor, room: int) -> tuple[Tensor, Tensor]:
        """Return what ``prepare`` left in a step buffer, or compute it now."""
        if step is None:
            return self.plan(row_len, room)
        rows = row_len.shape[0]
        numbers = step.view(torch.int32)
        schedule = numbers[: 2 * (self.processors + 1)].view(-1, 2)
        lengths = numbers[schedule.numel() : schedule.numel() + rows].view(-1, self.together(rows))
        return lengths.clamp(max=room), schedule

    def __call__(
        self,
        q: Tensor,
        weights: Tensor,
        cache: Tensor,
        block_table: Tensor,
        row_req: Tensor,
        row_len: Tensor,
        step: Tensor | None,
        workspace: Tensor | None,
        room: int,
    ) -> tuple[Tensor, Tensor]:
        """Return scores ``[T, whole pages]`` and which pages are missing, by row."""
        rows, heads = q.shape[:2]
        each, width = self.together(rows), -(-room // PAGE) * PAGE
        lengths, schedule = self.prepared(step, row_len, room)
        table = keys.lines(block_table, row_req, row_len, each)
        absent = keys.missing(table[:, : width // PAGE], cache.shape[0])
        scores = self.score(
            q.view(rows // each, each, heads, 128),
            None,
            cache.as_strided((cache.shape[0], PAGE, 1, 132), (cache.stride(0), 132, 132, 1)),
            weights,
            lengths,
            table,
            schedule,
            width,
        )
        return scores, absent.repeat_interleave(each, 0) if each > 1 else absent


class Gathered:
    """Scores many rows of few requests: their keys are gathered once, then read by all rows."""

    def __init__(self, ctx: BuildContext) -> None:
        self.spec = ctx.spec
        self.score = library("fp8_fp4_mqa_logits", GATHERED)

    def __call__(
        self,
        q: Tensor,
        weights: Tensor,
        cache: Tensor,
        block_table: Tensor,
        row_req: Tensor,
        row_len: Tensor,
        step: Tensor | None,
        workspace: Tensor | None,
        room: int,
    ) -> tuple[Tensor, Tensor]:
        """Return scores ``[T, whole pages]`` and which pages are missing, by row."""
        pages = -(-room // PAGE)
        table = block_table[:, :pages]
        elements, scales = gather(cache, table, workspace)
        line = row_req.where(row_len > 0, 0).clamp(0, table.shape[0] - 1)
        start = line * (pages * PAGE)
        end = start + keys.counts(row_len, self.spec.dcp, room)
        scores = self.score(q, None, elements, scales, weights, start, end, pages * PAGE)
        return scores, keys.missing(table, cache.shape[0]).index_select(0, line)


def gather(cache: Tensor, table: Tensor, workspace: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the keys that a block table names, ``[keys, 128]``, and their scales; a missing page is any page."""
    pages = table.clamp(0, cache.shape[0] - 1).reshape(-1)
    count = pages.shape[0]
    if workspace is None or workspace.shape[0] < count * (
        ELEMENTS + SCALES
    ):  # a wider table than planned for
        workspace = cache.new_empty((count * (ELEMENTS + SCALES),))
    elements = workspace[: count * ELEMENTS].view(count, ELEMENTS)
    scales = workspace[count * ELEMENTS : count * (ELEMENTS + SCALES)].view(count, SCALES)
    torch.index_select(cache[:, :ELEMENTS], 0, pages, out=elements)
    torch.index_select(cache[:, ELEMENTS : ELEMENTS + SCALES], 0, pages, out=scales)
    numbers = elements.view(torch.float8_e4m3fn).view(count * PAGE, 128)
    return numbers, scales.view(torch.float32).view(count * PAGE)


def finish(scores: Tensor, absent: Tensor, out: Tensor, room: int) -> None:
    """Write scores where they belong; a key without a page scores −inf."""
    if not room % PAGE:
        shape = (scores.shape[0], room // PAGE, PAGE)
        pages = out[:, :room].as_strided(shape, (out.stride(0), PAGE, 1), out.storage_offset())
        found = scores.as_strided(shape, (scores.stride(0), PAGE, 1))
        torch.ops.aten.masked_fill.Scalar_out(found, absent[:, :, None], -torch.inf, out=pages)
        return
    absent = absent.repeat_interleave(PAGE, 1)[:, :room]
    out[:, :room] = scores[:, :room].masked_fill(absent, -torch.inf)


def build_indexer_logits(ctx: BuildContext) -> Callable[..., Any]:
    """Make the run function of ``indexer_logits``."""
    spec, limits, check = ctx.spec, ctx.limits, ctx.check
    score: Paged | Gathered = Gathered(ctx) if prefill(limits) else Paged(ctx)

    def run(
        q: Any,
        q_scale: Any,
        weights: Any,
        cache: Any,
        block_table: Any,
        row_req: Any,
        row_len: Any,
        *,
        step: Any = None,
        out: Any = None,
        workspace: Any = None,
    ) -> Any:
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
        if out is None:
            width = logits_width(spec, limits, block_table.shape[1])
            out = q.new_empty((q.shape[0], width), dtype=torch.float32)
        room = min(out.shape[1], block_table.shape[1] * PAGE)
        if q.shape[0] and room and block_table.shape[0] and cache.shape[0]:
            scores, absent = score(q, weights, cache, block_table, row_req, row_len, step, workspace, room)
            finish(scores, absent, out, room)
        elif q.shape[0]:
            out.fill_(-torch.inf)  # no key has a page
        return out

    return on_device(ctx.device, run)


def prepare_indexer_logits(ctx: BuildContext) -> Callable[..., None]:
    """Make the function that fills a step buffer: who computes which keys, which all layers share."""
    if prefill(ctx.limits):
        return lambda *operands, **more: None
    paged = Paged(ctx)

    def fill(
        row_req: Any,
        row_len: Any,
        block_table: Any,
        *,
        step: Any,
        cu_seqlens: Any = None,
        cu_seqlens_host: Any = None,
        max_context: Any = None,
    ) -> None:
        if row_len.shape[0]:
            lengths, schedule = paged.plan(row_len, block_table.shape[1] * PAGE)
            numbers = step.view(torch.int32)
            numbers[: schedule.numel()] = schedule.view(-1)
            numbers[schedule.numel() : schedule.numel() + lengths.numel()] = lengths.view(-1)

    return fill
