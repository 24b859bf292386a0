"""Scores by products of FP8 keys as they stand, for many rows of a request, also to select from: ``logits=fp8_sum``.

Hopper adds FP8 products with 13 fraction bits, which the contract does not admit, but multiplies them twice as fast as
the float16 ones of ``scores.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kimi_hal import formats
from kimi_hal.dispatch.contract import BuildContext
from kimi_hal_nvidia import driver
from kimi_hal_nvidia.indexer import search_by
from kimi_hal_nvidia.scores import PAGE, Scorer, run_by

STEM = "index_scores_fp8_sum"
#: Heads that a row is padded to, and types of scores: a kernel each.
HEADS, SCORES = (32, 64), ("float32", "bfloat16")
#: See ``Memory`` in ``sums.cuh``: warpgroups that multiply, columns of each, pages in flight, words that count pages.
GROUPS, WIDE, PAGES, ENTRIES = 4, 128, 12, 1024
#: Bytes of a key.
KEY = 128
#: Threads of a block: warpgroups, and one that copies.
THREADS = GROUPS * 128 + 128
#: Bytes of ``struct Memory``.
SHARED = GROUPS * WIDE * (KEY + 4) + PAGES * (PAGE * (KEY + 4) + 32) + ENTRIES * 4 + GROUPS * 32


def kernel_name(heads: int, score: str) -> str:
    """Return the kernel for this many heads and this type of scores."""
    return f"fp8_sum_{next(h for h in HEADS if h >= heads)}_{score}"


class SumScorer(Scorer):
    """Scores many rows of a request against its FP8 keys, for one plan."""

    def kernels(self, ctx: BuildContext, fmt: formats.IndexFormat, index: int) -> dict[str, driver.Kernel]:
        """Return the kernel for these heads and scores; every FP8 format has the same, and any number of rows."""
        name = kernel_name(ctx.spec.num_heads, ctx.spec.score)
        return {"many": driver.kernel(STEM, ctx.arch, name, threads=THREADS, shared=SHARED, device=index)}


def build_indexer_logits(ctx: BuildContext) -> Callable[..., Any]:
    """Make the run function of ``indexer_logits``."""
    return run_by(ctx, SumScorer(ctx))


def build_indexer_topk(ctx: BuildContext) -> Callable[..., Any]:
    """Make the run function of ``indexer_topk``."""
    return search_by(ctx, SumScorer(ctx))
