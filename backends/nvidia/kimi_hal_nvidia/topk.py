"""``topk_select`` by a CUDA kernel: one launch, no workspace; long rows are cut over the blocks of a cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kimi_hal.dispatch.contract import BuildContext
from kimi_hal.ops.indexer import IndexerTopKSpec
from kimi_hal.ops.operator import torch_dtype
from kimi_hal.ops.topk_merge import TopKSpec
from kimi_hal.parallel import ownership
from kimi_hal_nvidia import driver
from kimi_hal_nvidia.h200 import PROCESSORS
from kimi_hal_nvidia.layouts import Layout
from kimi_hal_nvidia.parameters import Parameters
from kimi_hal_nvidia.streams import device_index, on_device, raw_stream

#: ``struct Selection`` of ``selection.cuh``: addresses, then numbers.
ADDRESSES, NUMBERS = 7, "7q 12i"
#: Source, threads and bytes of shared memory of a block, by form.
FORMS = {
    "short": ("topk_short", 512, 60064),
    "middle": ("topk_whole", 512, 92832),
    "whole": ("topk_whole", 1024, 160416),
    "team": ("topk_team", 512, 123504),
    "large_team": ("topk_team", 1024, 156272),
    "wide": ("topk_wide", 512, 176752),
    "many": ("topk_many", 512, 103072),
}
#: Forms in which a row belongs to a cluster of blocks.
CLUSTERS = ("team", "large_team", "wide")
#: Columns that a block holds in registers, where rows begin at whole 16 bytes; elsewhere a vector less.
SHORT, MIDDLE, WHOLE = 8192, 16384, 32768
#: Blocks of a cluster at most, and columns that a block has at least where there are several.
CLUSTER, COLUMNS = 16, 16384
#: Blocks at most where clusters are large, which few places on the chip suit, and of teams, which could be fewer.
MANY_LARGE, TEAMS = 64, 80


def team_of(rows: int, columns: int) -> tuple[str, int] | None:
    """Return a form and blocks of a row whose registers hold it, or None: the fewest, and as many as stand beside."""
    for what, each, most in (("team", SHORT, TEAMS), ("large_team", 2 * SHORT, PROCESSORS)):
        blocks = 2
        while blocks <= CLUSTER and rows * blocks <= (MANY_LARGE if blocks == CLUSTER else most):
            if columns <= blocks * each:
                return what, blocks
            blocks *= 2
    return None


def way_of(rows: int, width: int, columns: int) -> tuple[str, int]:
    """Return a form and the blocks of a row.

    Args:
        rows: how many there are.
        width: columns of a row.
        columns: the same with those beside it that are read with it.
    """
    if columns <= SHORT:
        return "short", 1
    if columns <= MIDDLE:
        return "middle", 1
    if team := team_of(rows, columns):
        return team
    if columns <= WHOLE:
        return "whole", 1
    return ("wide", blocks_of(rows, width)) if rows <= PROCESSORS else ("many", 1)


def form(spec: TopKSpec | IndexerTopKSpec, scores: str) -> str:
    """Return what a kernel's name says of its scores."""
    return "rounded" if scores == "float32" and spec.score == "bfloat16" else scores


def blocks_of(rows: int, width: int) -> int:
    """Return the blocks of a row: a power of two, as many as stand beside each other, with columns for each."""
    blocks = 1
    while 2 * blocks <= CLUSTER and rows * 2 * blocks <= PROCESSORS and width >= 2 * blocks * COLUMNS:
        blocks *= 2
    return blocks


class Selector:
    """Selects from rows of scores, for one plan."""

    def __init__(self, ctx: BuildContext) -> None:
        spec = ctx.spec
        indexer = isinstance(spec, IndexerTopKSpec)
        scores = spec.score if indexer else spec.scores_dtype
        name, index = form(spec, scores), device_index(ctx.device)
        self.parameters = Parameters(ADDRESSES, NUMBERS)
        self.launch = {}
        for what, (stem, threads, shared) in FORMS.items():
            kernel = driver.kernel(
                stem, ctx.arch, f"{what}_{name}", threads=threads, shared=shared, device=index
            )
            self.launch[what] = driver.launcher(
                kernel, self.parameters.address, cluster=what in CLUSTERS, overlap=indexer
            )
        self.stream, self.topk = raw_stream(index), spec.topk
        keys = ownership.of_keys(spec.dcp)
        self.shard = (keys.world, keys.rank, keys.interleave)
        self.page = spec.page if indexer else 1
        slots = indexer and spec.emit == "slot"
        self.emission = (int(spec.return_selected), int(slots), int(spec.score == "bfloat16"))
        self.facts: tuple[Any, ...] = ()
        self.what, self.blocks, self.grid = "", 1, 0
        self.layout = Layout()

    def again(self, scores: Any, row_len: Any, out: Any, scores_out: Any, *start: Any) -> bool:
        """Do what was done last, if these are laid out like those of then; else nothing. Tell which."""
        with self.parameters.lock:
            if not self.layout.same(scores, row_len, out, scores_out, *start):
                return False
            at = scores.data_ptr()
            if at % 16 != self.facts[0]:
                return False
            first = start[0].data_ptr() if start else 0
            self.start(at, row_len.data_ptr(), first, out.data_ptr(), scores_out.data_ptr(), 0, 0)
        return True

    def start(self, *addresses: int) -> None:
        """Launch with the numbers that are there, over operands and outputs at these addresses."""
        self.parameters.point(*addresses)
        self.launch[self.what](self.grid, 1, self.stream(), self.blocks)

    def __call__(
        self,
        scores: Tensor,
        row_len: Tensor,
        row_start: Tensor | None,
        out: Tensor,
        scores_out: Tensor,
        table: Tensor | None = None,
        row_req: Tensor | None = None,
        pages: int = 0,
    ) -> None:
        """Fill ``out`` and ``scores_out``; there is at least one row.

        Args:
            scores: ``[T, L]``.
            row_len: ``[T]`` int32, global bounds.
            row_start: ``[T]`` int32 or None.
            out: ``[T, k]`` int32.
            scores_out: ``[T, k]`` or ``[T, 0]``.
            table: ``[R, columns]`` int32, of the indexer.
            row_req: ``[T]`` int32, of the indexer.
            pages: of the cache.
        """
        at = scores.data_ptr()
        facts = (
            at % 16,
            scores.shape,
            scores.stride(),
            row_len.stride(),
            out.stride(),
            scores_out.stride(),
            row_start is not None and row_start.stride(),
            table is not None and (table.shape, table.stride()),
            row_req is not None and row_req.stride(),
            pages,
        )
        with self.parameters.lock:
            if facts != self.facts:
                self.facts = ()  # of nothing, should it fail
                self.layout.forget()
                self.learn(scores, row_len, row_start, out, scores_out, table, row_req, pages)
                self.facts = facts
            elif table is None:
                self.layout.learn(
                    scores, row_len, out, scores_out, *(() if row_start is None else (row_start,))
                )
            self.start(
                at,
                row_len.data_ptr(),
                0 if row_start is None else row_start.data_ptr(),
                out.data_ptr(),
                scores_out.data_ptr(),
                0 if table is None else table.data_ptr(),
                0 if row_req is None else row_req.data_ptr(),
            )

    def learn(
        self,
        scores: Tensor,
        row_len: Tensor,
        row_start: Tensor | None,
        out: Tensor,
        scores_out: Tensor,
        table: Tensor | None,
        row_req: Tensor | None,
        pages: int,
    ) -> None:
        """Choose a kernel for these shapes, and write down its numbers."""
        rows, width = scores.shape
        even = row_start is None and not (scores.data_ptr() | scores.stride(0) * scores.itemsize) % 16
        columns = width if even else width + 8
        self.what, self.blocks = way_of(rows, width, columns)
        self.grid = rows * self.blocks
        self.parameters.tell(
            scores.stride(0) if width else 0,  # a row of nothing has no address, and none beside another's
            out.stride(0),
            scores_out.stride(0),
            0 if table is None else table.stride(0),
            row_len.stride(0),
            0 if row_start is None else row_start.stride(0),
            0 if row_req is None else row_req.stride(0),
            width,
            self.topk,
            self.blocks,
            *self.shard,
            0 if table is None else table.shape[0],
            pages,
            self.page,
            *self.emission,
        )


def build_topk_select(ctx: BuildContext) -> Callable[..., Any]:
    """Make the run function of ``topk_select``."""
    spec, check = ctx.spec, ctx.check
    select, score = Selector(ctx), torch_dtype(spec.score)
    selected, windows = spec.topk if spec.return_selected else 0, spec.has_row_start

    def run(
        scores: Any,
        row_len: Any,
        row_start: Any = None,
        *,
        out: Any = None,
        scores_out: Any = None,
        workspace: Any = None,
    ) -> Any:
        start = (row_start,) if windows else ()
        unusual = workspace is not None or (row_start is not None) != windows
        if not unusual and select.again(scores, row_len, out, scores_out, *start):
            return out, scores_out
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
            select(scores, row_len, row_start, out, scores_out)
        return out, scores_out

    return on_device(ctx.device, run)
