"""``quantize_index_query`` by the CUDA kernel, byte for byte beside the reference."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import kimi_hal as hal
from kimi_hal.ops.indexer import IndexQuerySpec
from kimi_hal.ops.spec import Limits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

D, ROWS = "cuda", 7
FORMATS = (
    "index.fp8.e4m3fn.f32.page64",
    "index.fp8.e4m3fn.pow2.page64",
    "index.fp8.e4m3fn.ue8m0x4.page64",
    "index.mxfp4.page64",
)
LIMITS = Limits(max_rows=ROWS, max_reqs=ROWS)


def same(spec: IndexQuerySpec, q: Tensor, weights: Tensor) -> None:
    """Quantise into slices of wider buffers and compare every byte with the reference on the CPU."""
    ours = hal.plan("quantize_index_query", spec, LIMITS, device=D, implementation="nvidia.cuda")
    reference = hal.plan("quantize_index_query", spec, LIMITS, device="cpu", implementation="reference.torch")
    wanted = reference.run(q.cpu(), weights.cpu())
    wide = [
        torch.full((*w.shape[:-1], w.shape[-1] + 3), 5, dtype=torch.float32, device=D).to(w.dtype)
        for w in wanted
    ]
    given = [w[..., : wanted[i].shape[-1]] for i, w in enumerate(wide)]
    ours.run(q, weights, q_out=given[0], q_scale_out=given[1], weights_out=given[2])
    for got, want, room in zip(given, wanted, wide, strict=True):
        got = got.cpu()
        if want.dtype in (torch.float32, torch.bfloat16):
            assert torch.equal(got.nan_to_num(9e9), want.nan_to_num(9e9))
        else:
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
        assert (room[..., want.shape[-1] :].float() == 5).all()


def special(q: Tensor) -> Tensor:
    q[0], q[1, :, 3], q[2, :, 5], q[5, :, 40:70] = 0, math.nan, -math.inf, -0.0
    q[3] *= 1e-30
    q[4] *= 1e30
    q[6] = torch.randint(-12, 13, q[6].shape, device=D) / 4  # between two codes
    return q


@pytest.mark.parametrize("index", FORMATS)
@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("kind", ["plain", "special"])
def test_every_byte_is_that_of_the_reference(
    index: str, hadamard: bool, dtype: torch.dtype, odd: bool, kind: str
) -> None:
    for heads, folded, weights in ((32, "float32", torch.bfloat16), (5, "bfloat16", torch.float32)):
        spec = IndexQuerySpec(
            index=index,
            num_heads=heads,
            weights_dtype=folded,
            hadamard=hadamard,
            weight_scale=None if heads == 32 else 0.37,
        )
        q = torch.randn(ROWS, heads, 131, device=D)
        q *= torch.exp2(torch.randint(-20, 20, (ROWS, heads, 1), device=D).float())
        q = (special(q) if kind == "special" else q).to(dtype)
        q = q[..., 1:129] if odd else q[..., :128].contiguous()
        same(spec, q, torch.randn(ROWS, heads, device=D).to(weights))
