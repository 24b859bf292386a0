"""``merge_attn_states`` by the CUDA kernel beside the reference in float64: parts, rows, views, empty parts."""

from __future__ import annotations

import math

import pytest
import torch

import kimi_hal as hal
from kimi_hal.ops.sparse_mla import MergeSpec
from kimi_hal.ops.spec import Limits
from kimi_hal.reference import sparse_mla as reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

D = "cuda"


@pytest.mark.parametrize(
    ("parts", "rows", "heads"), [(1, 2, 3), (2, 1, 12), (8, 1, 96), (9, 3, 12), (64, 2, 5)]
)
def test_it_errs_by_no_more_than_its_output_s_rounding(parts: int, rows: int, heads: int) -> None:
    """Parts of views, one head without any part, and parts that are empty, whatever they hold."""
    spec = MergeSpec(parts=parts, num_heads=heads, return_lse=True)
    limits = Limits(max_rows=rows, max_reqs=1)
    run = hal.plan("merge_attn_states", spec, limits, device=D, implementation="nvidia.cuda").run
    outs = torch.randn(parts, rows, heads + 2, 576, device=D).bfloat16()[:, :, 1:-1, :512]
    lses = torch.randn(parts, rows + 1, heads, device=D)[:, :rows] * 4
    lses[:, 0, 0] = -math.inf
    outs[0, -1, -1], lses[0, -1, -1] = math.nan, math.nan
    outs[-1, -1, 0], lses[-1, -1, 0] = math.inf, math.inf
    out = torch.full((rows, heads, 512), math.nan, device=D, dtype=torch.bfloat16)
    lse = torch.full((rows, heads), math.nan, device=D)
    run(outs, lses, out=out, lse_out=lse)
    exact, exact_lse = reference.merge_attn_states(spec, outs, lses, dtype=torch.float64)
    assert (out.double() - exact).norm() <= 1.01 * (exact.bfloat16().double() - exact).norm()
    assert torch.equal(lse.isinf(), exact_lse.isinf())
    assert (lse - exact_lse).nan_to_num(0.0).abs().max() < 2e-6
    assert not out[0, 0].any()


def test_a_lone_part_and_row_may_have_any_step() -> None:
    """Steps of 2^33 numbers, which nothing takes."""
    spec = MergeSpec(parts=1, num_heads=3, return_lse=True)
    run = hal.plan(
        "merge_attn_states", spec, Limits(max_rows=1, max_reqs=1), device=D, implementation="nvidia.cuda"
    ).run
    outs, lses = torch.randn(3, 512, device=D).bfloat16(), torch.randn(3, device=D)
    far = 1 << 33
    out, lse = run(
        outs.as_strided((1, 1, 3, 512), (far, far, 512, 1)), lses.as_strided((1, 1, 3), (far, far, 1))
    )
    assert torch.equal(out[0], outs)
    assert (lse[0] - lses).abs().max() < 2e-6
