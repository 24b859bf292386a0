"""``merge_attn_states`` by a CUDA kernel that asks for everything at once: of few rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kimi_hal.dispatch.contract import BuildContext
from kimi_hal.ops.sparse_mla import MergeSpec
from kimi_hal_nvidia import driver
from kimi_hal_nvidia.parameters import Parameters
from kimi_hal_nvidia.streams import device_index, on_device, raw_stream

#: ``struct Merging`` of ``merge_states.cu``: addresses, then numbers.
ADDRESSES, NUMBERS = 4, "9q2i"
KERNEL, THREADS = "merge_states", 128
#: Blocks of a row and head.
BLOCKS = 4
#: Rows of a launch: the most blocks that a grid has in its second direction.
ROWS = 65535


class Merge:
    """Merges for one plan."""

    def __init__(self, spec: MergeSpec, arch: str, index: int) -> None:
        self.parameters = Parameters(ADDRESSES, NUMBERS)
        kernel = driver.kernel(KERNEL, arch, KERNEL, threads=THREADS, shared=0, device=index)
        self.launch = driver.launcher(kernel, self.parameters.address)
        self.stream = raw_stream(index)
        self.blocks = BLOCKS * spec.num_heads
        self.fixed = (spec.parts, int(spec.return_lse))

    def __call__(self, outs: Any, lses: Any, out: Any, lse_out: Any) -> None:
        """Fill ``out`` and ``lse_out``, of 1 to ``ROWS`` rows. The operands are the operator's own."""
        with self.parameters.lock:
            self.parameters.point(outs.data_ptr(), lses.data_ptr(), out.data_ptr(), lse_out.data_ptr())
            self.parameters.tell(
                *(*outs.stride()[:3], *lses.stride(), *out.stride()[:2], lse_out.stride(0)), *self.fixed
            )
            self.launch(self.blocks, out.shape[0], self.stream())


def build_merge_attn_states(ctx: BuildContext) -> Callable[..., Any]:
    """Make the run function of ``merge_attn_states``."""
    spec, check = ctx.spec, ctx.check
    merge = Merge(spec, ctx.arch, device_index(ctx.device))
    heads, dim, lse_width = spec.num_heads, spec.dim, spec.num_heads if spec.return_lse else 0

    def run(outs: Any, lses: Any, *, out: Any = None, lse_out: Any = None) -> Any:
        check(outs=outs, lses=lses, out=out, lse_out=lse_out)
        rows = outs.shape[1]
        if out is None:
            out = outs.new_empty((rows, heads, dim), dtype=torch.bfloat16)
        if lse_out is None:
            lse_out = outs.new_empty((rows, lse_width), dtype=torch.float32)
        if 0 < rows <= ROWS:
            merge(outs, lses, out, lse_out)
        elif rows:
            for first in range(0, rows, ROWS):
                some = slice(first, first + ROWS)
                merge(outs[:, some], lses[:, some], out[some], lse_out[some])
        return out, lse_out

    return on_device(ctx.device, run)
