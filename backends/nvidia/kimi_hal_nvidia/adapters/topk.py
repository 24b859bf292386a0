"""``topk_select`` by vLLM's and FlashInfer's selections, which are reached by name: their order is not the contract's.

vLLM's kernels take equal scores in any order. FlashInfer's prefer smaller positions when asked, as here. Both order
scores by their bits, so that a NaN may stand above every number and −0 below +0. A pass that mended this would read
every score again, which is as much work as a selection: it is not made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kimi_hal.dispatch.contract import BuildContext
from kimi_hal_nvidia.adapters import keys, libraries
from kimi_hal_nvidia.streams import on_device

#: What each of vLLM's operators is given, in this order.
ARGUMENTS = ("logits", "lengths", "output", "workspace", "k", "max_seq_len")
#: Rows that blocks of a cluster share out, and scores of a row from which few rows are faster without.
TOGETHER, LONG = 64, 1 << 19

Select = Callable[[Tensor, Tensor, Any, Any], Tensor]


def build_vllm(ctx: BuildContext) -> Callable[..., Any]:
    """Make the run function by vLLM's kernels: blocks together on few rows, else each row by itself."""
    libraries.load("vllm", "_C_stable_libtorch*.so")
    cooperative = libraries.operator("_C", "cooperative_topk", ARGUMENTS)
    persistent = libraries.operator("_C", "persistent_topk", ARGUMENTS)
    topk, state = ctx.spec.topk, ctx.persistent

    def select(scores: Tensor, length: Tensor, start: Any, out: Any) -> Tensor:
        rows, width = scores.shape
        if out is None or not out.is_contiguous():
            out = scores.new_empty((rows, topk), dtype=torch.int32)
        even = not (width % 4 or scores.data_ptr() % 16)  # its copies are of whole 16 bytes
        together = even and rows <= TOGETHER and not (rows < 8 and width > LONG)
        (cooperative if together else persistent)(scores, length, out, state, topk, width)
        return out  # type: ignore[no-any-return]

    return _built(ctx, select)


def build_flashinfer(ctx: BuildContext) -> Callable[..., Any]:
    """Make the run function by FlashInfer's ragged selection, which prefers smaller positions."""
    import flashinfer

    pick, topk = flashinfer.top_k_ragged_transform, ctx.spec.topk
    zeros = torch.zeros(max(1, ctx.limits.max_rows), dtype=torch.int32, device=ctx.device)

    def select(scores: Tensor, length: Tensor, start: Any, out: Any) -> Tensor:
        rows = scores.shape[0]
        offset = zeros[:rows] if rows <= zeros.shape[0] else torch.zeros_like(length)
        found: Tensor = pick(
            scores,
            offset,
            length,
            topk,
            tie_break=1,
            dsa_graph_safe=True,
            row_starts=None if start is None else start.contiguous(),
        )
        return found

    return _built(ctx, select)


def _built(ctx: BuildContext, select: Select) -> Callable[..., Any]:
    """Make a run function: lengths of this rank, room in the row, and the outputs."""
    spec, check = ctx.spec, ctx.check

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
        rows, width = scores.shape
        if scores_out is None:
            scores_out = scores.new_empty((rows, 0))
        if rows and width:
            length = keys.counts(row_len, spec.dcp, width)
            if row_start is not None:
                length = torch.minimum(length, (width - row_start).clamp(min=0))
            found = select(scores, length, row_start, out)
        else:
            found = scores.new_full((rows, spec.topk), -1, dtype=torch.int32)
        if out is None:
            return found, scores_out
        if found is not out:
            out.copy_(found)
        return out, scores_out

    return on_device(ctx.device, run)
