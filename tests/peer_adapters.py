"""Checks of the adapters on the CPU over operators that have the libraries' signatures (``peer_fakes.py``)."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import peer_fakes
import torch
from contexts import context as context_of
from index_cases import int32
from torch import Tensor

from kimi_hal import formats
from kimi_hal.dispatch.contract import BuildContext, Sizes
from kimi_hal.ops.indexer import IndexerSpec
from kimi_hal.ops.sparse_mla import SparseMLASpec
from kimi_hal.ops.spec import DCP, Limits, Spec
from kimi_hal.ops.topk_merge import TopKSpec
from kimi_hal.reference import indexer as reference_indexer
from kimi_hal.reference import sparse_mla as reference_mla
from kimi_hal.reference.topk_merge import topk_select
from kimi_hal_nvidia.adapters import deepgemm, flashmla, libraries, topk
from kimi_hal_nvidia.adapters.claims import ADAPTERS
from kimi_hal_nvidia.adapters.sizes import indexer_logits as indexer_sizes
from kimi_hal_nvidia.adapters.sizes import vllm_topk as topk_sizes

peer_fakes.install()
libraries.load = lambda package, pattern: None
FP8 = "index.fp8.e4m3fn.pow2.page64"
FIRST = {(i.operator, i.name): i.capabilities for i in ADAPTERS}


def context(operator: str, spec: Spec, limits: Limits, name: str, size: Any = None) -> BuildContext:
    sizes = size(spec, limits, "sm_90") if size else Sizes()
    return context_of(operator, spec, limits, sizes, FIRST[operator, name][-1])


def room(size: int) -> Tensor:
    """Return bytes that are all set, from a multiple of 256 on."""
    held = torch.full((size + 256,), 0xFF, dtype=torch.uint8)
    first = -held.data_ptr() % 256
    return held[first : first + size]


def index_operands(requests: int, each: int, columns: int) -> tuple[Tensor, ...]:
    rows, pages = requests * each, 40
    cache = torch.full((pages, 8448 + 64), 0xFF, dtype=torch.uint8)[:, :8448]
    cache[:, :8192] = torch.randn(pages, 8192).to(torch.float8_e4m3fn).view(torch.uint8)
    cache[:, 8192:] = torch.exp2(torch.randint(-6, -2, (pages, 64)).float()).view(torch.uint8)
    table = torch.randperm(pages, dtype=torch.int32)[: requests * columns].view(requests, columns)
    q = torch.randn(rows, 32, 128).to(torch.float8_e4m3fn)
    request = torch.arange(requests, dtype=torch.int32).flip(0).repeat_interleave(each)
    length = torch.randint(1, columns * 64 + 1, (rows,), dtype=torch.int32)
    return (
        q,
        torch.empty(rows, 32, 0, dtype=torch.uint8),
        torch.randn(rows, 32),
        cache,
        table,
        request,
        length,
    )


def scores(each: int, *, dcp: DCP | None = None, stepped: bool = False, width: int | None = None) -> None:
    """Score by the adapter and by the reference, and compare every key of every row."""
    torch.manual_seed(each)
    operands = index_operands(3, each, 5)
    operands[4][1, 1], operands[4][2, 4] = -1, 1 << 30
    operands[6][0], operands[6][-1] = 0, 5 * 64 * (dcp.world if dcp else 1) + 9
    if each > 1:
        operands[5][0] = 1 << 30  # not read: the row has no keys
    spec = IndexerSpec(index=FP8, dcp=dcp or DCP())
    limits = Limits(max_rows=3 * each, max_reqs=3, max_context=320, rows_per_req=each)
    built = context("indexer_logits", spec, limits, "deepgemm", indexer_sizes)
    run = deepgemm.build_indexer_logits(built)
    more: dict[str, Any] = {"workspace": room(built.sizes.workspace)}
    if stepped:
        more["step"] = room(built.sizes.step)
        deepgemm.prepare_indexer_logits(built)(operands[5], operands[6], operands[4], step=more["step"])
    if width:
        more["out"] = torch.full((3 * each, width + 5), 7.0)[:, :width]
    found = run(*operands, **more)
    assert found is more.get("out", found)
    exact = reference_indexer.indexer_logits(spec, *operands, dtype=torch.float64)
    for row, right in enumerate(exact):
        live = ~right.isneginf()[: found.shape[1]]
        assert torch.allclose(found[row, : len(live)][live].double(), right[: len(live)][live], atol=1e-3)
    row = int((operands[5] == 1).nonzero()[-1, 0])
    assert found[row, 64 : min(128, int((~exact[row].isneginf()).nonzero().max()))].isneginf().all()
    if width:
        assert (found[0] == 7).all()  # a row without keys


def check_paged_scores_of_one_row_a_request() -> None:
    scores(1)


def check_paged_scores_of_two_rows_a_request_share_their_keys() -> None:
    scores(2)


def check_a_step_buffer_replaces_the_schedule() -> None:
    scores(1, stepped=True)
    scores(2, stepped=True)


def check_scores_of_many_rows_gather_their_keys() -> None:
    scores(7)


def check_scores_of_a_shard() -> None:
    scores(1, dcp=DCP(world=2, rank=1, interleave=64))
    scores(5, dcp=DCP(world=2, rank=1, interleave=64))


def check_scores_go_into_a_narrower_and_strided_buffer() -> None:
    scores(1, width=200)
    scores(2, width=256)


def check_no_rows_and_no_pages_are_legal() -> None:
    spec, limits = IndexerSpec(index=FP8), Limits(max_rows=3, max_reqs=3, max_context=320)
    run = deepgemm.build_indexer_logits(context("indexer_logits", spec, limits, "deepgemm", indexer_sizes))
    operands = index_operands(3, 1, 5)
    empty = [t[:0] for t in operands[:3]]
    assert run(*empty, operands[3], operands[4], operands[5][:0], operands[6][:0]).shape == (0, 512)
    assert run(*operands[:3], operands[3][:0], *operands[4:]).isneginf().all()


def selected(build: Callable[[BuildContext], Callable[..., Any]], name: str, spec: TopKSpec) -> None:
    """Select from rows without equal scores, and compare each set with the reference's."""
    for rows, width in ((1, 900), (9, 3000), (70, 600), (2, 1)):
        limits = Limits(max_rows=rows, max_reqs=rows, max_context=width)
        run = build(context("topk_select", spec, limits, name, topk_sizes if name == "vllm" else None))
        x = torch.argsort(torch.rand(rows, width), dim=1).float() - width / 3
        length = torch.randint(-3, width + 9, (rows,), dtype=torch.int32)
        start = torch.randint(0, 3, (rows,), dtype=torch.int32) if spec.has_row_start else None
        right = topk_select(spec, x, length, start)[0]
        wide = torch.full((rows, spec.topk + 3), 77, dtype=torch.int32)
        for out in (None, wide[:, : spec.topk], torch.empty(rows, spec.topk, dtype=torch.int32)):
            found, picked = run(x, length, start, out=out)
            assert picked.shape == (rows, 0)
            assert out is None or found is out
            assert torch.equal(found.sort(dim=1).values, right.sort(dim=1).values)
            assert not ((found[:, 1:] >= 0) & (found[:, :-1] < 0)).any()
        assert (wide[:, spec.topk :] == 77).all()


def check_vllm_selects() -> None:
    selected(topk.build_vllm, "vllm", TopKSpec(topk=512))
    selected(topk.build_vllm, "vllm", TopKSpec(topk=512, dcp=DCP(world=2, rank=1, interleave=4)))


def check_flashinfer_selects() -> None:
    sys.modules["flashinfer"] = module = ModuleType("flashinfer")

    def top_k_ragged_transform(
        input: Tensor,
        offsets: Tensor,
        lengths: Tensor,
        k: int,
        deterministic: bool = False,
        tie_break: int = 0,
        dsa_graph_safe: bool = False,
        row_starts: Tensor | None = None,
    ) -> Tensor:
        assert tie_break == 1
        assert not offsets.any()
        assert offsets.shape == lengths.shape
        return topk_select(TopKSpec(topk=k, has_row_start=True), input, lengths, row_starts)[0]

    module.top_k_ragged_transform = top_k_ragged_transform  # type: ignore[attr-defined]
    selected(topk.build_flashinfer, "flashinfer", TopKSpec(topk=300))
    selected(topk.build_flashinfer, "flashinfer", TopKSpec(topk=300, has_row_start=True))


def attended(spec: SparseMLASpec, keys: int) -> None:
    """Attend by the adapter and by the reference; what is selected by no row is NaN."""
    rows, pages = 6, 7
    fmt = formats.latent(spec.latent)
    cache = torch.full((pages, spec.page * fmt.row_bytes + 80), 0xFF, dtype=torch.uint8)[:, :-80]
    every = torch.arange(spec.page, pages * spec.page)
    fmt.write(cache, spec.page, every, torch.randn(len(every), 512), torch.randn(len(every), 64), None)
    q = torch.randn(rows, spec.num_heads, 576).bfloat16()
    slots = spec.index_space == "slot"
    first = spec.page if slots else 0
    indices = torch.randint(first, 3 * spec.page, (rows, keys), dtype=torch.int32)
    indices[0, ::2], indices[1], indices[2, -1] = -1, -1, 1 << 30
    indices[2, 0] = -(1 << 31)
    table = None if slots else int32([[1, 2, 3], [4, -1, 1 << 30]])
    request = None if slots else int32([0, 1 << 30, 1, 0, 1, 0])
    count = torch.randint(1, keys + 1, (rows,), dtype=torch.int32) if spec.has_index_len else None
    if count is not None:
        count[3], count[4] = 0, keys + 7
    run = flashmla.build_sparse_mla(context("sparse_mla", spec, Limits(max_rows=6, max_reqs=6), "flashmla"))
    operands = (q, cache, indices, None, None, count, table, request)
    out, lse = run(*operands)
    exact, exact_lse = reference_mla.sparse_mla(spec, *operands, dtype=torch.float64)
    assert (out - exact).abs().max() < 2e-2
    assert lse.shape == exact_lse.shape
    assert (out[1] == 0).all()
    if spec.return_lse:
        assert (lse[1] == -math.inf).all()
        assert torch.allclose(lse.double(), exact_lse, atol=1e-4)
    given = torch.full((rows, spec.num_heads + 1, 512), 7.0, dtype=torch.bfloat16)[:, : spec.num_heads]
    again = run(*operands, out=given)
    assert again[0] is given
    assert torch.equal(given, out)


def _attended(**fields: Any) -> None:
    for latent in ("latent.flashmla.656", "latent.bf16"):
        attended(SparseMLASpec(latent=latent, topk=300, **fields), 150)


def check_flashmla_pads_heads_to_what_it_takes() -> None:
    for heads in (1, 12, 64, 96, 128):
        _attended(num_heads=heads, page=16)


def check_flashmla_by_positions_of_a_shard() -> None:
    dcp = DCP(world=2, rank=1, interleave=3)
    _attended(num_heads=5, page=32, index_space="position", dcp=dcp, has_index_len=True)


def check_flashmla_by_local_positions_without_an_lse() -> None:
    _attended(num_heads=5, index_space="local", has_index_len=True, return_lse=False)


def check_flashmla_of_vllm_takes_the_same() -> None:
    libraries.installed, kept = (lambda name: None), libraries.installed
    try:
        _attended(num_heads=12, page=16)
    finally:
        libraries.installed = kept


def check_a_lone_page_may_have_any_stride() -> None:
    for latent, row in (("latent.flashmla.656", 656), ("latent.bf16", 1152)):
        spec = SparseMLASpec(num_heads=3, latent=latent, topk=300, page=16)
        run = flashmla.build_sparse_mla(
            context("sparse_mla", spec, Limits(max_rows=6, max_reqs=6), "flashmla")
        )
        page = torch.zeros(1, 16 * row, dtype=torch.uint8)
        formats.latent(latent).write(
            page, 16, torch.arange(16), torch.randn(16, 512), torch.randn(16, 64), None
        )
        q, indices = torch.randn(6, 3, 576).bfloat16(), torch.randint(0, 16, (6, 50), dtype=torch.int32)
        found = [
            run(q, page.as_strided(page.shape, (stride, 1)), indices) for stride in (16 * row, 16 * row + 1)
        ]
        assert found[0][0].any()
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    operands = list(index_operands(3, 1, 5))
    spec, limits = IndexerSpec(index=FP8), Limits(max_rows=3, max_reqs=3, max_context=320)
    run = deepgemm.build_indexer_logits(context("indexer_logits", spec, limits, "deepgemm", indexer_sizes))
    operands[4] = operands[4] % 2  # page 1 is none
    first = operands[3][:1]
    operands[6][:] = 320
    scored = []
    for stride in (8448, 8449):
        operands[3] = first.as_strided(first.shape, (stride, 1))
        scored.append(run(*operands, out=torch.zeros(3, 320)))
    assert (scored[0] != -torch.inf).any()
    assert torch.equal(*scored)


def check_no_rows_and_no_indices_are_legal() -> None:
    spec = SparseMLASpec(num_heads=3, latent="latent.bf16", topk=300)
    run = flashmla.build_sparse_mla(context("sparse_mla", spec, Limits(max_rows=6, max_reqs=6), "flashmla"))
    cache = torch.zeros(2, 64 * 1152, dtype=torch.uint8)
    q = torch.zeros(2, 3, 576, dtype=torch.bfloat16)
    out, lse = run(q[:0], cache, torch.empty(0, 5, dtype=torch.int32))
    assert (out.shape, lse.shape) == ((0, 3, 512), (0, 3))
    out, lse = run(q, cache, torch.empty(2, 0, dtype=torch.int32))
    assert (out == 0).all()
    assert (lse == -math.inf).all()
