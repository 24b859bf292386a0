"""``indexer_logits`` on Blackwell's matrix unit: each program has some rows and a share of their keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton

from kimi_hal import formats
from kimi_hal.dispatch import signatures
from kimi_hal.dispatch.contract import BuildContext
from kimi_hal.ops.indexer import IndexerSpec, logits_width
from kimi_hal.ops.operator import get, torch_dtype
from kimi_hal.ops.spec import Limits
from kimi_hal.triton import shards
from kimi_hal.triton.indexer import Operands
from kimi_hal_nvidia import tensor_memory_scores

#: Heads of all rows of a program together, at most: with these sums two programs fit on a multiprocessor, in registers
#: as in tensor memory, and one multiplies while the other adds up its heads.
COLUMNS = 128
#: Tiles of keys whose loads are under way, the oldest of them page numbers alone.
STAGES = 5
#: Local positions of one program.
SPAN = 4096
#: Launch options. The bound on registers lets the compiler read sums half a tile at a time, so that none is spilled.
OPTIONS = {"num_warps": 4, "maxnreg": 255}


def padded(heads: int) -> int:
    """Return the columns that a row's heads take."""
    return max(16, 1 << (heads - 1).bit_length())


def rows_together(heads: int, limits: Limits) -> int:
    """Return how many rows a program scores, a power of two: as many as one request is likely to have."""
    known = limits.rows_per_req if limits.uniform else 1
    likely = max(known, -(-limits.max_rows // max(1, limits.max_reqs)))
    return max(1, min(COLUMNS // padded(heads), 1 << (likely - 1).bit_length()))


def constants(spec: IndexerSpec, rows: int) -> dict[str, Any]:
    """Return the kernel's constants for ``rows`` rows a program."""
    fmt = formats.index(spec.index)
    return {
        "H": spec.num_heads,
        "HP": padded(spec.num_heads),
        "BM": rows,
        "BN": tensor_memory_scores.KEYS,
        "STAGES": STAGES,
        "ELEMENT": fmt.element,
        "SCALE": fmt.scale,
        "PAGE": fmt.page,
        "BYTES": fmt.element_bytes,
        **shards.constants(spec.dcp),
    }


class Scorer:
    """Scores rows against the keys of their requests, for one plan."""

    def __init__(self, spec: IndexerSpec, limits: Limits) -> None:
        self.page = spec.page
        self.block = rows_together(spec.num_heads, limits)
        self.constants = constants(spec, self.block)

    def __call__(self, given: Operands, out: Any) -> None:
        """Write the scores of every row into ``out [T, L]``; there is at least one row."""
        rows = given.q.shape[0]
        room = min(given.block_table.shape[1] * self.page, out.shape[1])
        if room:
            tensor_memory_scores.scores[(triton.cdiv(rows, self.block), triton.cdiv(room, SPAN))](
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
                SPAN,
                **self.constants,
                **OPTIONS,
            )


def build_indexer_logits(ctx: BuildContext) -> Callable[..., Any]:
    """Make the run function of ``indexer_logits``."""
    op, spec, limits = get(ctx.operator), ctx.spec, ctx.limits
    score, dtype = Scorer(spec, limits), torch_dtype(spec.score)

    def call(given: dict[str, Any]) -> Any:
        ctx.check(**given)
        q, table, out = given["q"], given["block_table"], given["out"]
        if out is None:
            out = q.new_empty((q.shape[0], logits_width(spec, limits, table.shape[1])), dtype=dtype)
        if q.shape[0]:
            score(Operands(**{name: given[name] for name in op.args}), out)
        return out

    return signatures.function(op, op.name, call)
