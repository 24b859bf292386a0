"""``sparse_mla`` by the CUDA kernel beside the reference in float64: formats, heads, spaces, shards."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import kimi_hal as hal
from kimi_hal import formats
from kimi_hal.ops.sparse_mla import SparseMLASpec, StoreLatentSpec
from kimi_hal.ops.spec import DCP, Limits
from kimi_hal.reference import sparse_mla as reference
from kimi_hal_nvidia.attention_plan import cut
from kimi_hal_nvidia.sparse_mla import Attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

D = "cuda"
FP8, NVFP4 = "latent.fp8.e4m3fn.tensor", "latent.nvfp4.352"
PAGES = 64


def cache_of(latent: str, page: int) -> tuple[Tensor, Tensor | None]:
    """Return a cache of random latents of different sizes, and its scale."""
    fmt, tokens = formats.latent(latent), PAGES * page
    cache = torch.zeros(PAGES, page * fmt.row_bytes, dtype=torch.uint8, device=D)
    kv_c = torch.randn(tokens, 512, device=D) * 3 * torch.rand(tokens, 1, device=D)
    k_pe = torch.randn(tokens, 64, device=D)
    scale = torch.tensor([0.013], device=D) if fmt.needs_scale else None
    slots = torch.arange(tokens, device=D)
    reference.store_latent(
        StoreLatentSpec(latent=latent, page=page), kv_c.bfloat16(), k_pe.bfloat16(), slots, cache, scale
    )
    return cache, scale


def compare(spec: SparseMLASpec, q: Tensor, cache: Tensor, indices: Tensor, **rest: Any) -> None:
    """Call into poisoned buffers; the error is that of rounding the output, and little of the LSE's."""
    rows = len(q)
    plan = hal.plan(
        "sparse_mla", spec, Limits(max_rows=rows, max_reqs=rows), device=D, implementation="nvidia.cuda"
    )
    out = torch.full((rows, spec.num_heads, 512), math.nan, device=D, dtype=torch.bfloat16)
    lse = torch.full((rows, spec.num_heads), math.nan, device=D)
    plan.run(q, cache, indices, out=out, lse_out=lse, **rest)
    exact, exact_lse = reference.sparse_mla(spec, q, cache, indices, dtype=torch.float64, **rest)
    unit = (exact.bfloat16().double() - exact).norm()
    assert (out.double() - exact).norm() <= 1.05 * unit
    assert torch.equal(lse.isinf(), exact_lse.isinf())
    assert (lse - exact_lse).nan_to_num(0.0).abs().max() < 1e-4


@pytest.mark.parametrize("latent", [FP8, NVFP4])
@pytest.mark.parametrize(
    ("heads", "rows", "width", "topk", "space", "page", "world", "q_dtype"),
    [
        (12, 3, 2048, 2048, "slot", 64, 1, "bfloat16"),
        (1, 1, 1, 5, "slot", 64, 1, "bfloat16"),
        (16, 2, 63, 63, "slot", 64, 1, "bfloat16"),
        (17, 2, 65, 100, "position", 16, 1, "bfloat16"),
        (96, 5, 300, 512, "position", 64, 2, "bfloat16"),
        (12, 40, 700, 2048, "local", 48, 2, "bfloat16"),
        (128, 2, 2048, 2048, "slot", 64, 1, "float8_e4m3fn"),
        (12, 200, 256, 256, "slot", 64, 1, "bfloat16"),
        (12, 2, 2000, 2048, "position", 64, 1, "bfloat16"),
        (96, 1, 2048, 2048, "slot", 64, 1, "float8_e4m3fn"),
        (12, 3, 500, 512, "slot", 64, 1, "bfloat16"),
        (12, 20, 1999, 2048, "slot", 64, 1, "bfloat16"),
        (12, 140, 2048, 2048, "slot", 64, 1, "bfloat16"),
    ],
)
def test_it_errs_by_no_more_than_its_output_s_rounding(
    latent: str, heads: int, rows: int, width: int, topk: int, space: str, page: int, world: int, q_dtype: str
) -> None:
    cache, scale = cache_of(latent, page)
    spec = SparseMLASpec(
        num_heads=heads,
        latent=latent,
        page=page,
        topk=topk,
        index_space=space,
        has_index_len=heads == 12,
        q_dtype=q_dtype,
        dcp=DCP(world=world, rank=world - 1, interleave=3) if world > 1 else DCP(),
    )
    q = torch.randn(rows, heads, 576, device=D) * torch.logspace(-2, 1, heads, device=D)[None, :, None]
    rest: dict[str, Any] = {"k_scale": scale}
    if q_dtype != "bfloat16":
        rest["q_scale"] = torch.tensor([0.5], device=D)
    if space != "slot":
        rest["block_table"] = torch.randint(-1, PAGES + 2, (3, 64), device=D, dtype=torch.int32)
        rest["row_req"] = torch.randint(-1, 4, (rows,), device=D, dtype=torch.int32)
    if spec.has_index_len:
        rest["index_len"] = torch.randint(0, width + 3, (rows,), device=D, dtype=torch.int32)
    beyond = PAGES * page * world + 9
    indices = torch.randint(-3, beyond, (rows, width), device=D, dtype=torch.int32)
    compare(spec, q.to(getattr(torch, q_dtype)), cache, indices, **rest)


#: Keys of a row, parts that they are cut into, rows.
FEW = [
    (2048, 16, 7),
    (1500, 16, 2),
    (1000, 8, 15),
    (300, 4, 31),
    (512, 4, 31),
    (200, 2, 40),
    (128, 1, 133),
    (64, 1, 300),
]


@pytest.mark.parametrize("latent", [FP8, NVFP4])
@pytest.mark.parametrize(("topk", "parts", "rows"), FEW)
def test_a_row_of_few_has_its_bits_by_itself_and_beside_any_number_of_others(
    latent: str, topk: int, parts: int, rows: int
) -> None:
    """However many clusters share its latents; of an uncut row, more rows than there are multiprocessors."""
    cache, scale = cache_of(latent, 64)
    spec = SparseMLASpec(num_heads=12, latent=latent, topk=topk)
    limits = Limits(max_rows=rows, max_reqs=rows)
    way = cut(spec, limits, {"form": 5, "parts": parts})
    attend = Attention(spec, limits, way, "sm_90", torch.cuda.current_device())
    q = torch.randn(rows, 12, 576, device=D).bfloat16()
    indices = torch.randint(-3, PAGES * 64, (rows, topk), device=D, dtype=torch.int32)
    out = torch.full((rows, 12, 512), math.nan, device=D, dtype=torch.bfloat16)
    lse = torch.full((rows, 12), math.nan, device=D)
    attend(q, cache, indices, scale, None, None, None, None, out, lse)
    exact, _ = reference.sparse_mla(spec, q, cache, indices, scale, dtype=torch.float64)
    assert (out.double() - exact).norm() <= 1.05 * (exact.bfloat16().double() - exact).norm()
    for n in (1, 2, 3, rows - 1):
        some, some_lse = torch.full_like(out[:n], math.nan), torch.full_like(lse[:n], math.nan)
        attend(q[-n:], cache, indices[-n:], scale, None, None, None, None, some, some_lse)
        assert torch.equal(some, out[-n:])
        assert torch.equal(some_lse, lse[-n:])


def test_queries_may_begin_at_an_odd_number() -> None:
    cache, scale = cache_of(FP8, 64)
    q = torch.randn(2 * 12 * 576 + 1, device=D).bfloat16()[1:].view(2, 12, 576)
    indices = torch.randint(-3, PAGES * 64, (2, 2048), device=D, dtype=torch.int32)
    compare(SparseMLASpec(num_heads=12, latent=FP8), q, cache, indices, k_scale=scale)


def test_nan_in_a_selected_key_reaches_its_row_alone_and_a_row_without_keys_is_empty() -> None:
    cache, scale = cache_of(FP8, 64)
    cache.view(PAGES, 64, 576)[1, 3, 7] = 0x7F
    spec = SparseMLASpec(num_heads=12, latent=FP8, topk=128)
    indices = torch.randint(200, 4000, (3, 128), device=D, dtype=torch.int32)
    indices[1], indices[2, 5] = -1, 67
    plan = hal.plan(
        "sparse_mla", spec, Limits(max_rows=3, max_reqs=3), device=D, implementation="nvidia.cuda"
    )
    out, lse = plan.run(torch.randn(3, 12, 576, device=D).bfloat16(), cache, indices, scale)
    assert torch.cat((out[0].flatten(), lse[0])).isfinite().all()
    assert not out[1].any()
    assert (lse[1] == -math.inf).all()
    assert torch.cat((out[2].flatten(), lse[2])).isnan().all()
