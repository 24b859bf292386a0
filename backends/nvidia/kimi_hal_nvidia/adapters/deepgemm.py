"""``indexer_logits`` by DeepGEMM's FP8 products: paged for few rows a request, over gathered keys for many.

Hopper adds FP8 products with fewer bits than float32, so its scores are off by one to two thousandths: the numerics
class ``logits=fp8_sum``. What DeepGEMM leaves to its caller is done here: a length for each row of this rank, a line of
the block table for each row, the score of a key that has no page.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kimi_hal.dispatch.contract import BuildContext
from kimi_hal.ops.indexer import logits_width
from kimi_hal_nvidia.adapters import keys, libraries, placed
from kimi_hal_nvidia.adapters.pages import with_stride
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


@dataclass(frozen=True)
class Scored:
    """What the library wrote, and where each row's keys stand.

    Args:
        scores: ``[T, >= keys]``; columns behind a row's keys hold anything.
        counts: ``[T]`` int32, keys of each row.
        table: ``[lines, columns]`` int32 pages.
        line: ``[T]`` int32 line of each row; None: rows stand in order, ``each`` to a line.
        each: rows of a line.
    """

    scores: Tensor
    counts: Tensor
    table: Tensor
    line: Tensor | None = None
    each: int = 1


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

    def plan(self, row_len: Tensor, room: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the keys of each row, those of the longest row of each request, and who computes which of them.

        The library reads as many keys for a request as its last row has.
        """
        each = self.together(row_len.shape[0])
        counts = keys.counts(row_len, self.spec.dcp, room)
        longest = counts.view(-1, each)
        if each > 1:
            longest = longest.amax(1, keepdim=True).expand(-1, each).contiguous()
        return counts, longest, self.schedule(longest, PAGE, self.processors)

    def fill(self, step: Tensor, row_len: Tensor, room: int) -> None:
        """Write a plan into a step buffer."""
        at, numbers = 0, step.view(torch.int32)
        for part in reversed(self.plan(row_len, room)):
            numbers[at : at + part.numel()] = part.view(-1)
            at += part.numel()

    def prepared(self, step: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return what ``fill`` wrote."""
        size = 2 * (self.processors + 1)
        schedule, longest, counts = step.view(torch.int32)[: size + 2 * rows].split((size, rows, rows))
        return counts, longest.view(-1, self.together(rows)), schedule.view(-1, 2)

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
    ) -> Scored:
        """Score every row."""
        rows, heads = q.shape[:2]
        each, width = self.together(rows), -(-room // PAGE) * PAGE
        if step is None or width < block_table.shape[1] * PAGE:  # lengths of a plan are those of whole tables
            counts, longest, schedule = self.plan(row_len, room)
        else:
            counts, longest, schedule = self.prepared(step, rows)
        table = keys.lines(block_table, row_req, row_len, each)
        scores = self.score(
            q.view(rows // each, each, heads, 128),
            None,
            cache.as_strided((cache.shape[0], PAGE, 1, 132), (cache.stride(0), 132, 132, 1)),
            weights,
            longest,
            table,
            schedule,
            width,
        )
        return Scored(scores, counts, table, each=each)


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
    ) -> Scored:
        """Score every row."""
        pages = -(-room // PAGE)
        table = block_table[:, :pages]
        elements, scales = gather(cache, table, workspace)
        line = row_req.where(row_len > 0, 0).clamp(0, table.shape[0] - 1)
        counts = keys.counts(row_len, self.spec.dcp, room)
        start = line * (pages * PAGE)
        scores = self.score(q, None, elements, scales, weights, start, start + counts, pages * PAGE)
        return Scored(scores, counts, table, line)


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
            cache = with_stride(cache)
            found = score(q, weights, cache, block_table, row_req, row_len, step, workspace, room)
            placed.place(
                found.scores, found.counts, found.table, found.line, found.each, cache.shape[0], out, room
            )
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
            paged.fill(step, row_len, block_table.shape[1] * PAGE)

    return fill
