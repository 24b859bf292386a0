"""Other libraries' kernels through their adapters, beside the reference; each where its library is installed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import kimi_hal as hal
from kimi_hal import formats
from kimi_hal.dispatch.matching import distribution
from kimi_hal.ops.indexer import IndexerSpec
from kimi_hal.ops.sparse_mla import SparseMLASpec
from kimi_hal.ops.spec import DCP, Limits
from kimi_hal.ops.topk_merge import TopKSpec
from kimi_hal.reference import indexer as reference_indexer
from kimi_hal.reference import sparse_mla as reference_mla

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

D = "cuda"
FP8 = "index.fp8.e4m3fn.pow2.page64"


def has(*distributions: str) -> bool:
    return any(distribution(name) is not None for name in distributions)


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def index_cache(pages: int) -> Tensor:
    cache = torch.empty(pages, 8448, dtype=torch.uint8, device=D)
    keys = torch.randn(pages, 8192, device=D).to(torch.float8_e4m3fn)
    cache[:, :8192] = keys.view(torch.uint8)
    scales = torch.exp2(torch.randint(-6, -2, (pages, 64), device=D).float())
    cache[:, 8192:] = scales.view(torch.uint8)
    return cache


deepgemm = pytest.mark.skipif(not has("deep-gemm", "vllm"), reason="DeepGEMM is not installed")
vllm = pytest.mark.skipif(not has("vllm"), reason="vLLM is not installed")
flashinfer = pytest.mark.skipif(not has("flashinfer-python"), reason="FlashInfer is not installed")
flashmla = pytest.mark.skipif(not has("sgl-flash-mla", "vllm"), reason="FlashMLA is not installed")


@deepgemm
@pytest.mark.parametrize(
    ("requests", "each", "stepped"), [(3, 1, False), (3, 1, True), (3, 2, True), (2, 40, False)]
)
def test_deepgemm_s_scores_are_the_reference_s_up_to_its_short_sums(
    requests: int, each: int, stepped: bool
) -> None:
    torch.manual_seed(each)
    rows, columns, context = requests * each, 12, 700
    limits = Limits(max_rows=rows, max_reqs=requests, max_context=context, rows_per_req=each)
    spec = IndexerSpec(index=FP8, num_heads=32)
    cache = index_cache(64)
    table = torch.randperm(64, device=D, dtype=torch.int32)[: requests * columns].view(requests, columns)
    table[1, 2] = -1
    request = torch.arange(requests, device=D, dtype=torch.int32).repeat_interleave(each)
    length = torch.randint(300, context + 1, (rows,), device=D, dtype=torch.int32)
    length[-1] = 0
    q = torch.randn(rows, 32, 128, device=D).to(torch.float8_e4m3fn)
    weights, scale = torch.randn(rows, 32, device=D), torch.empty(rows, 32, 0, dtype=torch.uint8, device=D)
    plan = hal.plan("indexer_logits", spec, limits, device=D, implementation="nvidia.deepgemm")
    step = plan.new_step() if stepped else None
    if step is not None:
        plan.prepare(request, length, table, step=step)
    operands: tuple[Any, ...] = (q, scale, weights, cache, table, request, length)
    found = plan.run(*operands, step=step)
    exact = reference_indexer.indexer_logits(spec, *operands, dtype=torch.float64)
    for row, count in enumerate(length.tolist()):
        mine, right = found[row, :count], exact[row, :count]
        assert torch.equal(mine.isinf(), right.isinf())
        if count:
            live = right.isfinite()
            assert relative(mine[live], right[live]) < 5e-3


@pytest.mark.parametrize(
    ("rows", "width"), [(1, 8192), (64, 8192), (3, 1 << 20), (200, 4000), (9, 100), (9, 3001), (70, 5002)]
)
@pytest.mark.parametrize(
    "name", [pytest.param("vllm", marks=vllm), pytest.param("flashinfer", marks=flashinfer)]
)
def test_a_peer_selects_what_the_contract_selects_where_no_scores_are_equal(
    rows: int, width: int, name: str
) -> None:
    torch.manual_seed(rows)
    limits = Limits(max_rows=rows, max_reqs=rows, max_context=width)
    plan = hal.plan("topk_select", TopKSpec(), limits, device=D, implementation=f"nvidia.{name}")
    order = torch.argsort(torch.rand(rows, width, device=D), dim=1)
    x = (order.float() - width / 3) / 7
    length = torch.randint(1, width + 1, (rows,), device=D, dtype=torch.int32)
    length[0] = width + 5
    if rows > 8:
        length[3], length[5] = -4, 0
    found = plan.run(x, length)[0]
    right = hal.plan("topk_select", TopKSpec(), limits, device=D, implementation="nvidia.triton").run(
        x, length
    )[0]
    assert torch.equal(found.sort(dim=1).values, right.sort(dim=1).values)
    assert not ((found[:, 1:] >= 0) & (found[:, :-1] < 0)).any()


@flashmla
@pytest.mark.parametrize("heads", [12, 64, 96])
@pytest.mark.parametrize("latent", ["latent.flashmla.656", "latent.bf16"])
@pytest.mark.parametrize("space", ["slot", "position"])
def test_flashmla_s_attention_is_the_reference_s_up_to_what_it_rounds(
    heads: int, latent: str, space: str
) -> None:
    torch.manual_seed(heads)
    rows, pages, topk = 5, 40, 200
    dcp = DCP(world=2, rank=1, interleave=2) if space == "position" else DCP()
    spec = SparseMLASpec(
        return_lse=latent != "latent.bf16",
        num_heads=heads,
        latent=latent,
        topk=topk,
        index_space=space,
        has_index_len=True,
        dcp=dcp,
    )
    fmt = formats.latent(latent)
    cache = torch.zeros(pages, 64 * fmt.row_bytes, dtype=torch.uint8, device=D)
    every = torch.arange(pages * 64, device=D)
    fmt.write(
        cache, 64, every, torch.randn(len(every), 512, device=D), torch.randn(len(every), 64, device=D), None
    )
    fmt.write(
        cache, 64, every[:1], torch.full((1, 512), math.nan, device=D), torch.randn(1, 64, device=D), None
    )
    q = torch.randn(rows, heads, 576, device=D).bfloat16()
    indices = torch.randint(1, pages * 64 - 64, (rows, topk), device=D, dtype=torch.int32)
    indices[0, ::3], indices[1, :] = -1, -1
    count = torch.randint(1, topk, (rows,), device=D, dtype=torch.int32)
    table = torch.arange(1, pages, device=D, dtype=torch.int32).view(3, 13) if space == "position" else None
    request = torch.tensor([0, 1, 2, 1, 0], device=D, dtype=torch.int32) if space == "position" else None
    plan = hal.plan(
        "sparse_mla", spec, Limits(max_rows=8, max_reqs=8), device=D, implementation="nvidia.flashmla"
    )
    out, lse = plan.run(q, cache, indices, None, None, count, table, request)
    exact, exact_lse = reference_mla.sparse_mla(
        spec, q, cache, indices, None, None, count, table, request, dtype=torch.float64
    )
    assert (out[1] == 0).all()
    if not spec.return_lse:
        assert lse.shape == (rows, 0)
        exact_lse = lse
    assert (lse[1] == -math.inf).all()
    live = [0, 2, 3, 4]
    assert relative(out[live], exact[live]) < 2 * relative(exact[live].bfloat16(), exact[live])
    assert torch.allclose(lse[live].double(), exact_lse[live].double(), rtol=0, atol=1e-3)
