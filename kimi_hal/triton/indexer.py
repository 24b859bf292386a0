"""Portable Triton kernels of the indexer family: quantise queries, store keys, score, and score and select."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from kimi_hal import formats
from kimi_hal.dispatch.contract import BuildContext
from kimi_hal.ops.indexer import IndexerSpec, logits_width
from kimi_hal.ops.operator import torch_dtype
from kimi_hal.ops.spec import Limits
from kimi_hal.triton import index_pages, index_quantisation, index_scores, shards, sizes
from kimi_hal.triton.topk_merge import Paged, Selector

#: Architectures whose compiler converts an FP8 type by instructions; elsewhere its bits are shifted.
CONVERTED = {
    "e4m3fn": ("sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "gfx950", "ppu_15"),
    "e4m3fnuz": ("gfx942",),
}
#: Keys and queries that one program quantises.
QUANTISED_ROWS = 16
#: Keys of a tile, and heads of all its rows together at most, by how many accumulators a program can hold.
KEYS, HEADS = 128, 128
#: The same where a matrix instruction takes 256 heads at once: on sm_90 443 TFLOP/s in prefill, 393 with 128.
WIDE = ("sm_90", "sm_100", "sm_103")
WIDE_KEYS, WIDE_HEADS = 64, 256
#: Tiles whose loads are under way, the oldest of them page numbers alone.
STAGES, WIDE_STAGES = 5, 3
#: Blocks of rows whose keys are shared out evenly; with more, every program has its place.
BALANCED_BLOCKS = 256
#: Local positions of one program where every program has its place.
SPAN = 4096
#: Programs for each multiprocessor, and multiprocessors where there is no device.
PROGRAMS, PROCESSORS = 2, 2


def build_quantize_index_query(ctx: BuildContext) -> Callable[..., Any]:
    """Make the run function of ``quantize_index_query``: a program for sixteen rows and heads."""
    spec, check = ctx.spec, ctx.check
    fmt, dims = formats.index(spec.index), spec.dims()
    heads, quantised, folded = spec.num_heads, torch_dtype(spec.query_dtype), torch_dtype(spec.weights_dtype)

    def run(
        q: Any, weights: Any, *, q_out: Any = None, q_scale_out: Any = None, weights_out: Any = None
    ) -> Any:
        check(q=q, weights=weights, q_out=q_out, q_scale_out=q_scale_out, weights_out=weights_out)
        rows = q.shape[0]
        if q_out is None:
            q_out = q.new_empty((rows, heads, dims["Q"]), dtype=quantised)
        if q_scale_out is None:
            q_scale_out = q.new_empty((rows, heads, dims["S"]), dtype=torch.uint8)
        if weights_out is None:
            weights_out = q.new_empty((rows, heads), dtype=folded)
        if rows:
            index_quantisation.quantize[(triton.cdiv(rows * heads, QUANTISED_ROWS),)](
                q,
                weights,
                q_out.view(torch.uint8),
                q_scale_out,
                weights_out,
                *q.stride()[:2],
                weights.stride(0),
                *q_out.stride()[:2],
                *q_scale_out.stride()[:2],
                weights_out.stride(0),
                rows * heads,
                heads,
                spec.folded_scale,
                ELEMENT=fmt.element,
                HADAMARD=spec.hadamard,
                D=spec.head_dim,
                STAGES=spec.head_dim.bit_length() - 1,
                ROWS=QUANTISED_ROWS,
            )
        return q_out, q_scale_out, weights_out

    return run


def build_store_index_keys(ctx: BuildContext) -> Callable[..., Any]:
    """Make the run function of ``store_index_keys``: a program for sixteen keys."""
    spec, check = ctx.spec, ctx.check
    fmt = formats.index(spec.index)
    layout = index_pages.constants(fmt)

    def run(k: Any, slots: Any, cache: Any) -> Any:
        check(k=k, slots=slots, cache=cache)
        tokens = slots.shape[0]
        if tokens:
            index_quantisation.store[(triton.cdiv(tokens, QUANTISED_ROWS),)](
                k,
                slots,
                cache,
                k.stride(0),
                slots.stride(0),
                cache.stride(0),
                tokens,
                cache.shape[0] * fmt.page,
                **layout,
                D=spec.head_dim,
                ROWS=QUANTISED_ROWS,
            )

    return run


@dataclass(frozen=True)
class Operands:
    """The seven operands of the scores."""

    q: Tensor
    q_scale: Tensor
    weights: Tensor
    cache: Tensor
    block_table: Tensor
    row_req: Tensor
    row_len: Tensor

    def rows(self, some: slice) -> Operands:
        """Return the operands of some rows."""
        return Operands(
            self.q[some],
            self.q_scale[some],
            self.weights[some],
            self.cache,
            self.block_table,
            self.row_req[some],
            self.row_len[some],
        )


def rows_together(spec: IndexerSpec, limits: Limits, arch: str) -> int:
    """Return how many rows are scored together, a power of two: as many as one request is likely to have.

    Rows of one request read each key once. Rows of different requests may stand in one block, and each then
    costs what a block costs.
    """
    heads = max(16, triton.next_power_of_2(spec.num_heads))
    known = limits.rows_per_req if limits.uniform else 1
    likely = max(known, -(-limits.max_rows // max(1, limits.max_reqs)))
    most = WIDE_HEADS if arch in WIDE else HEADS
    return int(max(1, min(most // heads, triton.next_power_of_2(likely))))


class Scorer:
    """Scores rows against the keys of their requests, for one plan."""

    def __init__(self, ctx: BuildContext) -> None:
        spec = ctx.spec
        fmt = formats.index(spec.index)
        self.page = fmt.page
        self.block = rows_together(spec, ctx.limits, ctx.arch)
        heads = max(16, triton.next_power_of_2(spec.num_heads))
        wide = self.block * heads > HEADS
        self.keys = WIDE_KEYS if wide else KEYS
        self.balanced = triton.cdiv(ctx.limits.max_rows, self.block) <= BALANCED_BLOCKS
        self.programs = PROGRAMS * processors(ctx.device)
        self.constants = {
            "H": spec.num_heads,
            "HP": heads,
            "BM": self.block,
            "BN": self.keys,
            "STAGES": WIDE_STAGES if wide else STAGES,
            "NATIVE": ctx.arch in CONVERTED.get(fmt.element, ()),
            **index_pages.constants(fmt),
            **shards.constants(spec.dcp),
        }

    def __call__(self, given: Operands, out: Tensor) -> None:
        """Write the scores of every row into ``out [T, L]``; there is at least one row."""
        rows = given.q.shape[0]
        blocks = triton.cdiv(rows, self.block)
        room = min(given.block_table.shape[1] * self.page, out.shape[1])
        operands = (
            given.q.view(torch.uint8),
            given.q_scale,
            given.weights,
            given.cache,
            given.block_table,
            given.row_req,
            given.row_len,
            out,
            *given.q.stride()[:2],
            *given.q_scale.stride()[:2],
            given.weights.stride(0),
            given.cache.stride(0),
            given.block_table.stride(0),
            given.row_req.stride(0),
            given.row_len.stride(0),
            out.stride(0),
            rows,
            given.block_table.shape[0],
            given.cache.shape[0],
            room,
        )
        if self.balanced:
            index_scores.scores_balanced[(self.programs,)](
                *operands,
                self.keys,
                self.programs,
                BLOCKS=triton.next_power_of_2(blocks),
                **self.constants,
                num_warps=4,
            )
        elif room:
            index_scores.scores_by_place[(blocks, triton.cdiv(room, SPAN))](
                *operands, SPAN, **self.constants, num_warps=4
            )


def processors(device: str) -> int:
    """Return the multiprocessors of a device."""
    if torch.device(device).type == "cpu":
        return PROCESSORS
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def build_indexer_logits(ctx: BuildContext) -> Callable[..., Any]:
    """Make the run function of ``indexer_logits``: keys shared out evenly where rows are few."""
    spec, limits, check = ctx.spec, ctx.limits, ctx.check
    score, dtype = Scorer(ctx), torch_dtype(spec.score)

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
        rows = q.shape[0]
        if out is None:
            width = logits_width(spec, limits, block_table.shape[1])
            out = q.new_empty((rows, width), dtype=dtype)
        if rows:
            score(Operands(q, q_scale, weights, cache, block_table, row_req, row_len), out)
        return out

    return run


class Searcher:
    """Scores rows into bounded memory and selects from them, for one plan."""

    def __init__(self, ctx: BuildContext) -> None:
        spec = ctx.spec
        self.spec, self.dtype = spec, torch_dtype(spec.score)
        self.score, self.select = Scorer(ctx), Selector(spec)
        self.width = logits_width(spec, ctx.limits, 0)

    def __call__(
        self, given: Operands, out: Tensor, scores_out: Tensor, workspace: Tensor | None, every: Tensor | None
    ) -> None:
        """Fill the outputs of every row; ``every`` receives all scores. There is at least one row."""
        rows, itemsize = given.q.shape[0], self.dtype.itemsize
        room = min(given.block_table.shape[1] * self.spec.page, self.width)
        width = max(self.spec.page, room)
        together = sizes.score_rows(width, itemsize, rows)
        border = sizes.score_bytes(width, itemsize, rows)
        needed = border + sizes.scratch(self.spec.topk, together)
        if workspace is None:
            workspace = given.q.new_empty((needed,), dtype=torch.uint8)
        scores = workspace[: together * width * itemsize].view(self.dtype).view(together, width)
        scratch = workspace[border:needed].view(torch.int32)
        for first in range(0, rows, together):
            some = slice(first, first + together)
            part = given.rows(some) if rows > together else given
            held = scores[: part.q.shape[0], :room]
            self.score(part, held)
            paged = Paged(part.block_table, part.row_req, part.cache.shape[0])
            self.select(held, part.row_len, None, out[some], scores_out[some], scratch, paged)
            if every is not None:
                kept = min(room, every.shape[1])
                every[some, :kept] = held[:, :kept]


def build_indexer_topk(ctx: BuildContext) -> Callable[..., Any]:
    """Make the run function of ``indexer_topk``: scores into workspace, then selection, some rows at a time."""
    spec, check = ctx.spec, ctx.check
    search, dtype, selected = Searcher(ctx), torch_dtype(spec.score), spec.dims()["selected"]

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
        scores_out: Any = None,
        workspace: Any = None,
    ) -> Any:
        return call(
            Operands(q, q_scale, weights, cache, block_table, row_req, row_len),
            step,
            out,
            scores_out,
            workspace,
        )

    def call(
        given: Operands, step: Any, out: Any, scores_out: Any, workspace: Any, every: Any = None
    ) -> tuple[Any, Any]:
        check(
            q=given.q,
            q_scale=given.q_scale,
            weights=given.weights,
            cache=given.cache,
            block_table=given.block_table,
            row_req=given.row_req,
            row_len=given.row_len,
            step=step,
            out=out,
            scores_out=scores_out,
            workspace=workspace,
        )
        rows = given.q.shape[0]
        if out is None:
            out = given.q.new_empty((rows, spec.topk), dtype=torch.int32)
        if scores_out is None:
            scores_out = given.q.new_empty((rows, selected), dtype=dtype)
        if rows:
            search(given, out, scores_out, workspace, every)
        return out, scores_out

    def return_scores(
        q: Any,
        q_scale: Any,
        weights: Any,
        cache: Any,
        block_table: Any,
        row_req: Any,
        row_len: Any,
        *,
        all_scores_out: Any,
        step: Any = None,
        out: Any = None,
        scores_out: Any = None,
        workspace: Any = None,
    ) -> Any:
        given = Operands(q, q_scale, weights, cache, block_table, row_req, row_len)
        return (*call(given, step, out, scores_out, workspace, all_scores_out), all_scores_out)

    run.return_scores = return_scores  # type: ignore[attr-defined]
    return run
