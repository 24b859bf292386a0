"""``quantize_index_query`` by a CUDA kernel: half a warp for each query of a row and head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kimi_hal import formats
from kimi_hal.dispatch.contract import BuildContext
from kimi_hal.ops.indexer import IndexQuerySpec
from kimi_hal.ops.operator import torch_dtype
from kimi_hal_nvidia import driver
from kimi_hal_nvidia.layouts import Layout
from kimi_hal_nvidia.parameters import Parameters
from kimi_hal_nvidia.streams import device_index, on_device, raw_stream

#: ``struct Quantizing`` of ``quantize_query.cu``: addresses, then numbers.
ADDRESSES, NUMBERS = 5, "8q6if4x"
STEM, THREADS = "quantize_query", 128
#: Kernels by the element of the keys.
KERNELS = {"e4m3fn": "quantize_fp8", "e2m1": "quantize_fp4"}
#: Queries of a block.
EACH = THREADS // 16


class Quantizer:
    """Quantises queries, for one plan."""

    def __init__(self, spec: IndexQuerySpec, arch: str, index: int) -> None:
        name = KERNELS[formats.index(spec.index).element]
        kernel = driver.kernel(STEM, arch, name, threads=THREADS, shared=0, device=index)
        self.spec, self.heads = spec, spec.num_heads
        self.parameters, self.layout = Parameters(ADDRESSES, NUMBERS), Layout()
        self.launch = driver.launcher(kernel, self.parameters.address)
        self.stream, self.grid = raw_stream(index), 0
        self.facts: tuple[Any, ...] = ()

    def again(self, *tensors: Any) -> bool:
        """Do what was done last, if these, operands and outputs, are laid out like those; else nothing. Tell which."""
        with self.parameters.lock:
            if not self.layout.same(*tensors):
                return False
            self.start(*[tensor.data_ptr() for tensor in tensors])
        return True

    def start(self, *addresses: int) -> None:
        """Launch with the numbers that are there, over operands and outputs at these addresses."""
        self.parameters.point(*addresses)
        self.launch(self.grid, 1, self.stream())

    def __call__(self, q: Any, weights: Any, q_out: Any, scale_out: Any, weights_out: Any) -> None:
        """Fill the outputs; there is at least one row. The operands are the operator's own."""
        tensors = (q, weights, q_out, scale_out, weights_out)
        facts = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors)
        with self.parameters.lock:
            if facts != self.facts:
                self.facts = ()  # of nothing, should it fail
                self.layout.forget()
                self.learn(*tensors)
                self.facts = facts
            else:
                self.layout.learn(*tensors)
            self.start(*[tensor.data_ptr() for tensor in tensors])

    def learn(self, q: Any, weights: Any, q_out: Any, scale_out: Any, weights_out: Any) -> None:
        """Write down the numbers of these shapes."""
        rows, spec = q.shape[0], self.spec
        self.grid = -(-rows * self.heads // EACH)
        types = [int(tensor.dtype == torch.float32) for tensor in (q, weights, weights_out)]
        self.parameters.tell(
            *q.stride()[:2],
            weights.stride(0),
            *q_out.stride()[:2],
            *scale_out.stride()[:2],
            weights_out.stride(0),
            rows,
            self.heads,
            *types,
            int(spec.hadamard),
            spec.folded_scale,
        )


def build_quantize_index_query(ctx: BuildContext) -> Callable[..., Any]:
    """Make the run function of ``quantize_index_query``."""
    spec, check = ctx.spec, ctx.check
    quantize, dims = Quantizer(spec, ctx.arch, device_index(ctx.device)), spec.dims()
    quantised, folded = torch_dtype(spec.query_dtype), torch_dtype(spec.weights_dtype)

    def run(
        q: Any, weights: Any, *, q_out: Any = None, q_scale_out: Any = None, weights_out: Any = None
    ) -> Any:
        if quantize.again(q, weights, q_out, q_scale_out, weights_out):
            return q_out, q_scale_out, weights_out
        check(q=q, weights=weights, q_out=q_out, q_scale_out=q_scale_out, weights_out=weights_out)
        rows = q.shape[0]
        if q_out is None:
            q_out = q.new_empty((rows, spec.num_heads, dims["Q"]), dtype=quantised)
        if q_scale_out is None:
            q_scale_out = q.new_empty((rows, spec.num_heads, dims["S"]), dtype=torch.uint8)
        if weights_out is None:
            weights_out = q.new_empty((rows, spec.num_heads), dtype=folded)
        if rows:
            quantize(q, weights, q_out, q_scale_out, weights_out)
        return q_out, q_scale_out, weights_out

    return on_device(ctx.device, run)
