"""``merge_attn_states`` by a CUDA kernel that asks for everything at once: of few rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kimi_hal.dispatch.contract import BuildContext
from kimi_hal.ops.sparse_mla import MergeSpec
from kimi_hal_nvidia import driver
from kimi_hal_nvidia.parameters import Parameters
from kimi_hal_nvidia.streams import device_index, on_device, raw_stream

STEM, ADDRESSES = "merge_states", 4
#: Rows of a launch: the most blocks that a grid has in its second direction.
ROWS = 65535
#: Numbers of a load, in which ``merge_few`` counts the steps of parts.
PIECE = 8


@dataclass(frozen=True)
class Form:
    """A kernel of ``merge_states.cu``.

    Args:
        name: of the kernel.
        numbers: of its structure, behind the addresses.
        threads: of a block.
        blocks: of a row and head.
    """

    name: str
    numbers: str
    threads: int
    blocks: int


ANY = Form("merge_states", "9q2i", threads=128, blocks=4)
#: Of at most eight parts, whose steps and offsets have 32 bits: in tensors of at most so many bytes.
FEW, FEW_PARTS, REACH = Form("merge_few", "9I2i4x", threads=512, blocks=1), 8, 1 << 33
#: What a step of 32 bits is below. A dimension of one may have any step, wherever that would lead.
STEP = 1 << 32


def within(tensor: Any) -> bool:
    """Return whether 32 bits say every step of a tensor, and where any of its numbers is."""
    return max(tensor.stride()) < STEP and int(tensor.untyped_storage().nbytes()) <= REACH


class Launch:
    """One of the kernels, for one plan."""

    def __init__(self, form: Form, spec: MergeSpec, arch: str, index: int) -> None:
        self.parameters = Parameters(ADDRESSES, form.numbers)
        kernel = driver.kernel(STEM, arch, form.name, threads=form.threads, shared=0, device=index)
        self.launch = driver.launcher(kernel, self.parameters.address)
        self.stream = raw_stream(index)
        self.blocks = form.blocks * spec.num_heads
        self.piece = PIECE if form is FEW else 1
        self.fixed = (spec.parts, int(spec.return_lse))

    def __call__(self, outs: Any, lses: Any, out: Any, lse_out: Any) -> None:
        """Fill ``out`` and ``lse_out``, of 1 to ``ROWS`` rows. The operands are the operator's own."""
        part, row, head, _ = outs.stride()
        with self.parameters.lock:
            self.parameters.point(outs.data_ptr(), lses.data_ptr(), out.data_ptr(), lse_out.data_ptr())
            self.parameters.tell(
                *(part // self.piece, row // self.piece, head // self.piece),
                *(*lses.stride(), *out.stride()[:2], lse_out.stride(0)),
                *self.fixed,
            )
            self.launch(self.blocks, out.shape[0], self.stream())


class Merge:
    """Merges for one plan: by the shorter kernel, where it can."""

    def __init__(self, spec: MergeSpec, arch: str, index: int) -> None:
        self.any = Launch(ANY, spec, arch, index)
        self.few = Launch(FEW, spec, arch, index) if spec.parts <= FEW_PARTS else None

    def __call__(self, outs: Any, lses: Any, out: Any, lse_out: Any) -> None:
        """Fill ``out`` and ``lse_out``, of 1 to ``ROWS`` rows. The operands are the operator's own."""
        few = self.few
        if few and within(outs) and within(lses) and within(out) and within(lse_out):
            few(outs, lses, out, lse_out)
        else:
            self.any(outs, lses, out, lse_out)


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
