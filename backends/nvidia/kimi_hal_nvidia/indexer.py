"""``indexer_topk`` by CUDA kernels: scores into workspace, then selection, some rows at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kimi_hal.dispatch.contract import BuildContext
from kimi_hal.ops.check import WORKSPACE_ALIGN
from kimi_hal.ops.indexer import logits_width
from kimi_hal.ops.operator import torch_dtype
from kimi_hal.triton import sizes
from kimi_hal_nvidia.layouts import Layout
from kimi_hal_nvidia.scores import ALIGN, CACHE, Operands, Scorer
from kimi_hal_nvidia.streams import on_device
from kimi_hal_nvidia.topk import Selector


class Searcher:
    """Scores rows into bounded memory and selects from them, for one plan.

    Args:
        ctx: of the plan.
        score: the kernels that score.
    """

    def __init__(self, ctx: BuildContext, score: Scorer) -> None:
        self.page, self.dtype = ctx.spec.page, torch_dtype(ctx.spec.score)
        self.score, self.select = score, Selector(ctx)
        self.width = logits_width(ctx.spec, ctx.limits, 0)
        self.layout, self.lock = Layout(), threading.Lock()

    def again(self, given: Operands, out: Any, scores_out: Any, workspace: Any) -> bool:
        """Do what was done last, if all of these are laid out like those of then; else nothing. Tell which."""
        with self.lock:
            if not self.layout.same(*given, out, scores_out, workspace):
                return False
            addresses, at = [tensor.data_ptr() for tensor in given], workspace.data_ptr()
            if at % WORKSPACE_ALIGN or addresses[CACHE] % ALIGN:
                return False
            self.start(*addresses, out.data_ptr(), scores_out.data_ptr(), at)
        return True

    def start(self, *addresses: int) -> None:
        """Launch with the numbers that are there, over operands, outputs and workspace at these addresses."""
        *given, out, scores_out, workspace = addresses
        *_, table, row_req, row_len = given
        self.score.start(*given, workspace)
        self.select.start(workspace, row_len, 0, out, scores_out, table, row_req)

    def __call__(
        self, given: Operands, out: Tensor, scores_out: Tensor, workspace: Tensor | None, every: Tensor | None
    ) -> None:
        """Fill the outputs of every row; ``every`` receives all scores. There is at least one row."""
        with self.lock:
            scored, selected = self.score.facts, self.select.facts
            try:
                at_once = self.search(given, out, scores_out, workspace, every)
            finally:
                same = scored is self.score.facts and selected is self.select.facts
                if not same:
                    self.layout.forget()
            if same and at_once and workspace is not None:
                self.layout.learn(*given, out, scores_out, workspace)

    def search(
        self, given: Operands, out: Tensor, scores_out: Tensor, workspace: Tensor | None, every: Tensor | None
    ) -> bool:
        """Do so, and return whether scores of all rows were there at once, and nowhere else."""
        rows, itemsize = given.q.shape[0], self.dtype.itemsize
        room = min(given.block_table.shape[1] * self.page, self.width)
        width = max(self.page, -(-room // self.page) * self.page)
        together = sizes.score_rows(width, itemsize, rows)
        needed = sizes.score_bytes(width, itemsize, rows)
        if workspace is None:
            workspace = given.q.new_empty((needed,), dtype=torch.uint8)
        scores = workspace[: together * width * itemsize].view(self.dtype).view(together, width)
        for first in range(0, rows, together):
            some = slice(first, first + together)
            part = given.rows(some) if rows > together else given
            held = scores[: part.q.shape[0], :room]
            self.score(part, held)
            self.select(
                held,
                part.row_len,
                None,
                out[some],
                scores_out[some],
                part.block_table,
                part.row_req,
                part.cache.shape[0],
            )
            if every is not None:
                kept = min(room, every.shape[1])
                every[some, :kept] = held[:, :kept]
        return rows <= together and every is None


def build_indexer_topk(ctx: BuildContext) -> Callable[..., Any]:
    """Make the run function of ``indexer_topk``."""
    return search_by(ctx, Scorer(ctx))


def search_by(ctx: BuildContext, score: Scorer) -> Callable[..., Any]:
    """Make the run function of ``indexer_topk`` that scores by these kernels."""
    spec, check = ctx.spec, ctx.check
    search, dtype, selected = Searcher(ctx, score), torch_dtype(spec.score), spec.dims()["selected"]

    def call(
        given: Operands, step: Any, out: Any, scores_out: Any, workspace: Any, every: Any = None
    ) -> tuple[Any, Any]:
        unusual = step is not None or every is not None
        if not unusual and search.again(given, out, scores_out, workspace):
            return out, scores_out
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
        given = Operands(q, q_scale, weights, cache, block_table, row_req, row_len)
        return call(given, step, out, scores_out, workspace)

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

    there = on_device(ctx.device, run)
    there.return_scores = on_device(ctx.device, return_scores)  # type: ignore[attr-defined]
    return there
