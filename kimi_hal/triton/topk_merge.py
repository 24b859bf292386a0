"""Portable Triton kernels of the topk_merge family: ``topk_select`` and ``topk_merge``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from kimi_hal.dispatch.contract import BuildContext
from kimi_hal.ops.indexer import IndexerTopKSpec
from kimi_hal.ops.operator import torch_dtype
from kimi_hal.ops.topk_merge import TopKSpec
from kimi_hal.triton import selection, shards, sizes
from kimi_hal.triton.protocols import Merger, Operands, Results

#: Columns of a row that one program selects from at once, at most: what its registers hold.
SHORT = 32768
#: Columns that a program collects candidates from together.
COLLECTED = 16384
#: Columns that a program looks at together where a row is selected by digits, or for maxima.
BLOCK = 4096
#: Groups whose maxima one program finds where programs are many, and where they are few.
GROUPS, FEW_GROUPS = 128, 32
#: Bits of a threshold that the maxima need not tell: 2^-15 of its size.
COARSE = 8
#: Programs that fill a device.
FULL = 512


@dataclass(frozen=True)
class Paged:
    """What turns local positions into slots: the pages of each row's request.

    Args:
        block_table: ``[R, columns]`` int32.
        row_req: ``[T]`` int32.
        pages: of the cache.
    """

    block_table: Tensor
    row_req: Tensor
    pages: int


def halvings(size: int) -> int:
    """Return how often a power of two can be halved; 0 for 0."""
    return max(0, size.bit_length() - 1)


class Selector:
    """Selects from rows of scores, for one Spec."""

    def __init__(self, spec: TopKSpec | IndexerTopKSpec) -> None:
        self.topk = spec.topk
        self.candidates = sizes.candidates(spec.topk)
        self.words = sizes.scratch_words(spec.topk)
        rounded = spec.score == "bfloat16"
        self.window = {
            "HAS_START": isinstance(spec, TopKSpec) and spec.has_row_start,
            "HAS_REQUEST": isinstance(spec, IndexerTopKSpec),
            **shards.constants(spec.dcp),
        }
        self.order = {"ROUND": rounded, "LOW": 16 if rounded else 0}
        self.emission = {
            "SELECTED": spec.return_selected,
            "PAGE": spec.page if isinstance(spec, IndexerTopKSpec) else 1,
            "SLOTS": isinstance(spec, IndexerTopKSpec) and spec.emit == "slot",
        }

    def __call__(
        self,
        scores: Tensor,
        row_len: Tensor,
        row_start: Tensor | None,
        out: Tensor,
        scores_out: Tensor,
        scratch: Tensor,
        paged: Paged | None = None,
    ) -> None:
        """Fill ``out`` and ``scores_out``, at most ``SELECT_ROWS`` rows a launch.

        Args:
            scores: ``[T, L]``.
            row_len: ``[T]`` int32, global bounds.
            row_start: ``[T]`` int32 or None.
            out: ``[T, k]`` int32.
            scores_out: ``[T, k]`` or ``[T, 0]``.
            scratch: int32 words, ``scratch_words`` for each row of a launch.
            paged: the requests of the rows, for the indexer.
        """
        for first in range(0, scores.shape[0], sizes.SELECT_ROWS):
            some = slice(first, first + sizes.SELECT_ROWS)
            self.launch(
                scores[some],
                row_len[some],
                None if row_start is None else row_start[some],
                out[some],
                scores_out[some],
                scratch,
                paged and Paged(paged.block_table, paged.row_req[some], paged.pages),
            )

    def launch(
        self,
        scores: Tensor,
        row_len: Tensor,
        row_start: Tensor | None,
        out: Tensor,
        scores_out: Tensor,
        scratch: Tensor,
        paged: Paged | None,
    ) -> None:
        """Select from rows that scratch suffices for."""
        rows, width = scores.shape
        table, row_req, requests, pages = (None, None, 0, 0)
        if paged is not None:
            table, row_req, requests, pages = (
                paged.block_table,
                paged.row_req,
                paged.block_table.shape[0],
                paged.pages,
            )
        start_stride = 0 if row_start is None else row_start.stride(0)
        req_stride = 0 if row_req is None else row_req.stride(0)
        strides = (scores.stride(0), row_len.stride(0), start_stride)
        outs = (out.stride(0), scores_out.stride(0))
        paging = (0 if table is None else table.stride(0), req_stride, requests, pages)
        if width <= SHORT:
            block = max(64, triton.next_power_of_2(width))
            selection.select_short[(rows,)](
                scores,
                row_len,
                row_start,
                out,
                scores_out,
                table,
                row_req,
                *strides,
                *outs,
                *paging,
                width,
                self.topk,
                BLOCK=block,
                HALVINGS=halvings(block // 32),
                **self.order,
                **self.window,
                **self.emission,
                num_warps=4 if block <= 2048 else 8 if block <= 8192 else 16,
            )
            return
        span = COLLECTED * -(-width // (COLLECTED * sizes.CHUNKS))
        if self.candidates:
            self.thin(scores, row_len, row_start, row_req, scratch, (*strides, req_stride), requests, span)
        selection.select_long[(rows,)](
            scores,
            row_len,
            row_start,
            out,
            scores_out,
            scratch,
            table,
            row_req,
            *strides,
            *outs,
            self.words,
            *paging,
            width,
            span,
            self.topk,
            CAP=self.candidates,
            CAP_HALVINGS=halvings(self.candidates // 32),
            CHUNKS=sizes.CHUNKS,
            CHUNK_HALVINGS=halvings(sizes.CHUNKS),
            BLOCK=BLOCK,
            HALVINGS=halvings(BLOCK // 32),
            **self.order,
            **self.window,
            **self.emission,
            num_warps=8,
        )

    def thin(
        self,
        scores: Tensor,
        row_len: Tensor,
        row_start: Tensor | None,
        row_req: Tensor | None,
        scratch: Tensor,
        strides: tuple[int, ...],
        requests: int,
        span: int,
    ) -> None:
        """Collect the candidates of long rows in scratch."""
        rows, width = scores.shape
        operands = (scores, row_len, row_start, row_req, scratch, *strides, self.words, requests, width)
        every = self.candidates // 2
        groups = GROUPS if rows * every >= FULL * GROUPS else FEW_GROUPS
        steps = min(BLOCK // groups, triton.next_power_of_2(-(-width // every)))
        selection.group_maxima[(every // groups, rows)](
            *operands, G=every, GROUPS=groups, STEPS=steps, **self.window, num_warps=4
        )
        selection.group_threshold[(rows,)](
            scratch,
            self.words,
            self.topk,
            G=every,
            CAP=self.candidates,
            CHUNKS=sizes.CHUNKS,
            **self.order,
            COARSE=max(COARSE, self.order["LOW"]),
            num_warps=4,
        )
        selection.collect[(-(-width // span), rows)](
            *operands,
            span,
            CAP=self.candidates,
            CHUNKS=sizes.CHUNKS,
            BLOCK=COLLECTED,
            HALVINGS=halvings(COLLECTED // 32),
            SINGLE=span == COLLECTED,
            ROUND=self.order["ROUND"],
            **self.window,
            num_warps=8,
        )


def build_topk_select(ctx: BuildContext) -> Callable[..., Any]:
    """Make the run function of ``topk_select``: a program a row, or four launches where rows are long."""
    spec, check = ctx.spec, ctx.check
    select, score = Selector(spec), torch_dtype(spec.score)
    selected = spec.topk if spec.return_selected else 0

    def run(
        scores: Any,
        row_len: Any,
        row_start: Any = None,
        *,
        out: Any = None,
        scores_out: Any = None,
        workspace: Any = None,
    ) -> Any:
        check(
            scores=scores,
            row_len=row_len,
            row_start=row_start,
            out=out,
            scores_out=scores_out,
            workspace=workspace,
        )
        rows = scores.shape[0]
        if out is None:
            out = scores.new_empty((rows, spec.topk), dtype=torch.int32)
        if scores_out is None:
            scores_out = scores.new_empty((rows, selected), dtype=score)
        if rows:
            needed = sizes.scratch(spec.topk, rows)
            if workspace is None:
                workspace = scores.new_empty((needed,), dtype=torch.uint8)
            select(scores, row_len, row_start, out, scores_out, workspace[:needed].view(torch.int32))
        return out, scores_out

    return run


def build_topk_merge(ctx: BuildContext) -> Callable[..., Any]:
    """Make the run function of ``topk_merge``: kernels between the messages of the group."""
    spec, check = ctx.spec, ctx.check
    merge, shown = Merger(spec, ctx.group), spec.dims()["global"]

    def run(
        scores: Any,
        indices: Any,
        row_len: Any,
        *,
        local_out: Any = None,
        len_out: Any = None,
        global_out: Any = None,
        workspace: Any = None,
    ) -> Any:
        check(
            scores=scores,
            indices=indices,
            row_len=row_len,
            local_out=local_out,
            len_out=len_out,
            global_out=global_out,
            workspace=workspace,
        )
        rows = indices.shape[0]
        if local_out is None:
            local_out = indices.new_empty((rows, spec.topk))
        if len_out is None:
            len_out = indices.new_empty((rows,))
        if global_out is None:
            global_out = indices.new_empty((rows, shown))
        if rows:
            merge(Operands(scores, indices, row_len), Results(local_out, len_out, global_out))
        return local_out, len_out, global_out

    return run
