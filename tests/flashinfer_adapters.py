"""Checks of the adapters to FlashInfer's attention on the CPU, over functions with its signatures."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import flashinfer_fakes
import pytest
import torch
from contexts import context as context_of
from index_cases import int32
from torch import Tensor

from kimi_hal import formats
from kimi_hal.dispatch.contract import BuildContext
from kimi_hal.errors import ContractError
from kimi_hal.ops.sparse_mla import SparseMLASpec
from kimi_hal.ops.spec import DCP, Limits
from kimi_hal.reference import sparse_mla as reference_mla
from kimi_hal_nvidia.adapters import flashinfer, flashinfer_calls, flashinfer_sizes, xqa
from kimi_hal_nvidia.adapters.flashinfer_claims import ATTENTION

flashinfer_fakes.install()
FP8 = {"latent": "latent.fp8.e4m3fn.tensor", "q_dtype": "float8_e4m3fn"}
BF16 = {"latent": "latent.bf16"}
RECORD = {"latent": "latent.flashmla.656", "page": 64}
BUILDERS: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]] = {
    "flashinfer": (flashinfer.build_rows, flashinfer_sizes.rows, BF16),
    "flashinfer_fp8": (flashinfer.build_rows, flashinfer_sizes.rows, FP8),
    "flashinfer_records": (flashinfer.build_records, flashinfer_sizes.records, RECORD),
    "xqa": (xqa.build_pages, flashinfer_sizes.pages, BF16 | {"return_lse": False}),
    "xqa_fp8": (xqa.build_pages, flashinfer_sizes.pages, FP8 | {"return_lse": False}),
}
CLAIMS = {i.name: i for i in ATTENTION}
K_SCALE, Q_SCALE = 0.37, 1.9
ROWS, PAGES = 7, 6
#: Bytes that are all set; plans share them, as an engine's do.
HELD = torch.full((1 << 28,), 0xFF, dtype=torch.uint8)


def context(name: str, spec: SparseMLASpec, rows: int = ROWS) -> BuildContext:
    limits = Limits(max_rows=rows, max_reqs=rows)
    (capability,) = CLAIMS[name].capabilities
    arch = capability.arch[0]
    return context_of("sparse_mla", spec, limits, BUILDERS[name][1](spec, limits, arch), capability, arch)


def specified(name: str, **fields: Any) -> SparseMLASpec:
    held: dict[str, Any] = {"topk": 300, "page": 32, "softmax_scale": 0.03, "num_heads": 4}
    return SparseMLASpec(**(held | fields | BUILDERS[name][2]))


def cached(spec: SparseMLASpec, k_scale: Tensor | None, gap: int) -> Tensor:
    """Return a cache whose first page and whose gaps are NaN."""
    fmt = formats.latent(spec.latent)
    cache = torch.full((PAGES, spec.page * fmt.row_bytes + gap), 0xFF, dtype=torch.uint8)
    cache = cache[:, : spec.page * fmt.row_bytes]
    every = torch.arange(spec.page, PAGES * spec.page)
    fmt.write(cache, spec.page, every, torch.randn(len(every), 512), torch.randn(len(every), 64), k_scale)
    return cache


def operands(spec: SparseMLASpec, keys: int, gap: int = 0) -> tuple[Any, ...]:
    """Return operands: −1 anywhere, indices beyond everything, rows without a key, strided queries, lengths beyond."""
    fp8 = spec.q_dtype != "bfloat16"
    k_scale = torch.tensor([K_SCALE]) if fp8 else None
    cache = cached(spec, k_scale, gap)
    q = torch.randn(ROWS, spec.num_heads + 1, 576)[:, : spec.num_heads]
    q = torch.cat((q, q), 2)[..., :576].to(getattr(torch, spec.q_dtype))
    q[1] = math.nan  # a row without a key: nothing of it is looked at
    slots = spec.index_space == "slot"
    indices = torch.randint(spec.page if slots else 0, 3 * spec.page, (ROWS, keys), dtype=torch.int32)
    indices[0, ::2], indices[1], indices[2, -1] = -1, -1, 1 << 30
    indices[2, 0], indices[6, 1:] = -(1 << 31), -1
    table = None if slots else int32([[1, 2, 3], [4, -1, 1 << 30]])
    request = None if slots else int32([0, 1 << 30, 1, 0, 1, 0, 0])
    count = torch.randint(1, keys + 1, (ROWS,), dtype=torch.int32) if spec.has_index_len else None
    if count is not None:
        count[3], count[4] = 0, keys + 7
    return q, cache, indices, k_scale, torch.tensor([Q_SCALE]) if fp8 else None, count, table, request


def attended(name: str, gap: int = 0, keys: int = 150, **fields: Any) -> None:
    """Attend by the adapter and by the reference; what is selected by no row is NaN."""
    torch.manual_seed(keys)
    spec = specified(name, **fields)
    given = operands(spec, keys, gap)
    built = context(name, spec)
    run = BUILDERS[name][0](built)
    exact, exact_lse = referred(name, spec, given)
    wide = torch.full((ROWS, spec.num_heads + 1, 512), 7.0, dtype=torch.bfloat16)
    lse_wide = torch.full((ROWS, exact_lse.shape[1] + 2), 7.0)
    buffers: dict[str, Any] = {
        "out": wide[:, : spec.num_heads],
        "lse_out": lse_wide[:, : exact_lse.shape[1]],
        "workspace": aligned(built.sizes.workspace),
    }
    for more in ({}, buffers):
        out, lse = run(*given, **more)
        assert out is more.get("out", out)
        assert lse is more.get("lse_out", lse)
        assert out.dtype == torch.bfloat16
        assert torch.isfinite(out).all()
        assert (out - exact).abs().max() <= 1e-2 * exact.abs().max()
        assert (out[1] == 0).all()
        assert lse.shape == exact_lse.shape
        if spec.return_lse:
            assert (lse[1] == -math.inf).all()
            assert torch.equal(lse.isneginf(), exact_lse.isneginf())
            assert torch.allclose(lse.double(), exact_lse, atol=1e-4)
    assert (wide[:, spec.num_heads :] == 7).all()
    assert (lse_wide[:, exact_lse.shape[1] :] == 7).all()


def referred(name: str, spec: SparseMLASpec, given: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """Return the reference's answer; over records its queries are what the kernels round them to."""
    q, *rest = given
    if name == "flashinfer_records":
        q = torch.cat((flashinfer_fakes.blocks(q[..., :512].float()), q[..., 512:].float()), 2)
    return reference_mla.sparse_mla(spec, q, *rest, dtype=torch.float64)


def aligned(size: int) -> Tensor:
    """Return bytes that hold anything, from a multiple of 256 on."""
    first = -HELD.data_ptr() % 256
    return HELD[first : first + size]


def every(**fields: Any) -> None:
    for name in BUILDERS:
        attended(name, **fields)


def check_heads_are_padded_to_what_each_takes() -> None:
    for heads in (1, 64, 65, 128):
        every(num_heads=heads, keys=70)
    attended("flashinfer", num_heads=96)


def check_positions_of_a_shard() -> None:
    every(
        num_heads=5,
        index_space="position",
        dcp=DCP(world=2, rank=1, interleave=3),
        has_index_len=True,
        page=96,
    )


def check_local_positions_without_an_lse() -> None:
    every(num_heads=5, index_space="local", has_index_len=True, return_lse=False)


def check_one_index_and_as_many_as_the_spec_has() -> None:
    for keys in (2, 129, 300):
        every(keys=keys, num_heads=3)


def check_pages_of_any_length_where_they_are_claimed() -> None:
    for name in ("xqa", "xqa_fp8"):
        attended(name, page=24)
        attended(name, page=1, index_space="slot", keys=10)


def check_xqa_takes_pages_of_any_stride() -> None:
    for name in ("xqa", "xqa_fp8"):
        attended(name, gap=80)
        attended(name, gap=16, page=48)


def check_a_lone_page_may_have_any_stride() -> None:
    for name in BUILDERS:
        spec = specified(name)
        run = BUILDERS[name][0](context(name, spec))
        q, cache, indices, *rest = operands(spec, 40)
        first = cache[1:2]
        indices = torch.where(indices >= 0, indices % spec.page, -1)
        odd = first.as_strided(first.shape, (first.stride(0) + 1, 1))
        found = [run(q, page, indices, *rest) for page in (first, odd)]
        assert found[0][0].any()
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def check_pages_apart_are_refused_before_anything_is_launched() -> None:
    for name in ("flashinfer", "flashinfer_fp8", "flashinfer_records"):
        spec = specified(name)
        run = BUILDERS[name][0](context(name, spec))
        with pytest.raises(ContractError, match="cache"):
            run(*operands(spec, 20, gap=1152))


def check_records_of_many_rows_go_some_at_a_time() -> None:
    spec = specified("flashinfer_records", num_heads=2, topk=20)
    run = flashinfer.build_records(context("flashinfer_records", spec, 19 * ROWS))
    q, cache, indices, *_ = operands(spec, 20)
    few, few_lse = run(q, cache, indices)
    out, lse = run(q.repeat(19, 1, 1), cache, indices.repeat(19, 1))
    assert torch.equal(out, few.repeat(19, 1, 1))
    assert torch.equal(lse, few_lse.repeat(19, 1))


def check_parts_of_a_call_are_those_of_one() -> None:
    kept = flashinfer_calls.built
    for name in BUILDERS:
        torch.manual_seed(1)
        spec = specified(name)
        given = operands(spec, 40)
        whole = BUILDERS[name][0](context(name, spec))(*given)
        with mock.patch.object(flashinfer_calls, "built", lambda ctx, attend, together: kept(ctx, attend, 3)):
            parts = BUILDERS[name][0](context(name, spec))(*given)
        assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


def check_a_nan_in_a_selected_key_stays_in_its_row() -> None:
    for name in BUILDERS:
        spec = specified(name)
        given = operands(spec, 40)
        given[2][4, 7] = 5  # the first page is NaN
        out, lse = BUILDERS[name][0](context(name, spec))(*given)
        assert out[4].isnan().all()
        assert torch.isfinite(out[[0, 2, 3, 5, 6]]).all()
        if spec.return_lse:
            assert lse[4].isnan().all()
            assert torch.isfinite(lse[[0, 2, 3, 5, 6]]).all()


def check_a_scale_that_is_nan_reaches_no_row_without_a_key() -> None:
    for name in ("flashinfer_fp8", "xqa_fp8"):
        spec = specified(name)
        given = list(operands(spec, 40))
        given[3] = torch.tensor([math.nan])
        out, _ = BUILDERS[name][0](context(name, spec))(*given)
        assert (out[1] == 0).all()
        assert out[0].isnan().all()


def check_a_record_s_scale_may_be_any_number() -> None:
    torch.manual_seed(3)
    spec = specified("flashinfer_records")
    given = operands(spec, 60)
    records = given[1].view(PAGES * spec.page, 656)
    records[spec.page :, 512:528] = (torch.rand(len(records) - spec.page, 4) * 0.01).view(torch.uint8)
    out, lse = flashinfer.build_records(context("flashinfer_records", spec))(*given)
    exact, exact_lse = referred("flashinfer_records", spec, given)
    assert (out - exact).abs().max() <= 1e-2 * exact.abs().max()
    assert torch.allclose(lse.double(), exact_lse, atol=1e-4)


def check_a_row_that_no_logit_reaches_has_no_sum() -> None:
    spec = specified("flashinfer_records", softmax_scale=16.0)
    q, cache, indices, *rest = operands(spec, 20)
    first = cache.view(PAGES * spec.page, 656)[spec.page]
    first[:512], first[512:528] = 0xB8, torch.full((4,), 1e30).view(torch.uint8)  # −1 each
    q[2, :, :512], indices[2] = 1e3, -1
    indices[2, 3] = spec.page
    out, lse = flashinfer.build_records(context("flashinfer_records", spec))(q, cache, indices, *rest)
    assert (lse[2] == -math.inf).all()
    assert (out[2] == 0).all()


def check_no_rows_no_indices_and_no_pages_are_legal() -> None:
    for name in BUILDERS:
        spec = specified(name)
        run = BUILDERS[name][0](context(name, spec))
        q, cache, indices, k_scale, q_scale, *_ = operands(spec, 9)
        width = spec.num_heads if spec.return_lse else 0
        out, lse = run(q[:0], cache, indices[:0], k_scale, q_scale)
        assert (out.shape, lse.shape) == ((0, spec.num_heads, 512), (0, width))
        for none in ((cache, indices[:, :0]), (cache[:0], indices)):
            out, lse = run(q, *none, k_scale, q_scale)
            assert (out == 0).all()
            assert (lse == -math.inf).all()
