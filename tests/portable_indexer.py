"""Checks of the portable indexer kernels: bytes against the formats, scores against the formula."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from index_cases import MXFP4, POW2, Index, close, int32
from interpreted import device, on_device
from torch import Tensor

import kimi_hal as hal
from kimi_hal import formats
from kimi_hal.formats import minifloat as expected
from kimi_hal.ops.indexer import IndexQuerySpec, StoreIndexSpec
from kimi_hal.ops.spec import DCP, Limits
from kimi_hal.reference import indexer as reference
from kimi_hal.reference.topk_merge import topk_select
from kimi_hal.triton import indexer, minifloat, sizes

FEW = Limits(max_rows=64, max_reqs=64, max_context=1024)
TOGETHER = Limits(max_rows=64, max_reqs=16, max_context=1024, rows_per_req=4)
MANY = Limits(max_rows=4096, max_reqs=2, max_context=1024, uniform=False)
NAN = math.nan
DEVICE = device()


def planned(operator: str, spec: Any, limits: Limits = FEW) -> Callable[..., Any]:
    run = hal.plan(operator, spec, limits, device=DEVICE, implementation="nvidia.triton").run
    moved = on_device(run, DEVICE)
    if hasattr(run, "return_scores"):
        moved.return_scores = on_device(run.return_scores, DEVICE)  # type: ignore[attr-defined]
    return moved


def strided(x: Tensor, pad: int = 3) -> Tensor:
    wide = torch.full((*x.shape[:-1], x.shape[-1] + pad), NAN).to(x.dtype)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def hard_values(rows: int) -> Tensor:
    """Return ``[rows, 128]`` with zeros of both signs, subnormals, infinities, NaN and every size between."""
    x = torch.randn(rows, 128, generator=torch.Generator().manual_seed(rows))
    x *= torch.logspace(-38, 30, rows)[:, None]
    x[0] = 0.0
    x[1, ::2] = -0.0
    x[2, 7], x[3, 9], x[4, 100] = NAN, math.inf, -math.inf
    x[5] = torch.linspace(-448, 448, 128)
    return x


@triton.jit
def _decode(codes, out, N: tl.constexpr, ELEMENT: tl.constexpr, NATIVE: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, minifloat.decode_fp8(tl.load(codes + i), ELEMENT, NATIVE).to(tl.float32))


def check_every_fp8_code_decodes_alike_by_bits_and_by_type() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    for element in ("e4m3fn", "e4m3fnuz"):
        wanted = expected.decode(codes, expected.ELEMENTS[element])
        # A compiler converts its own target's types; the interpreter both.
        for native in (False, True) if DEVICE == "cpu" or element == "e4m3fn" else (False,):
            out = torch.empty(256, device=DEVICE)
            _decode[(1,)](codes.to(DEVICE), out, N=256, ELEMENT=element, NATIVE=native)
            assert torch.equal(out.cpu().nan_to_num(7e9), wanted.nan_to_num(7e9)), (element, native)


def check_queries_are_quantised_as_the_formats_say() -> None:
    for name in formats.names("index"):
        for hadamard, dtype in ((False, torch.float32), (True, torch.bfloat16)):
            spec = IndexQuerySpec(index=name, num_heads=3, hadamard=hadamard, weights_dtype="bfloat16")
            x = hard_values(18) if not hadamard else torch.randn(18, 128).to(dtype)
            q, weights = strided(x.view(6, 3, 128)), strided(torch.randn(6, 3))
            got = planned("quantize_index_query", spec)(q, weights)
            wanted = reference.quantize_index_query(spec, q, weights)
            assert torch.equal(got[0].view(torch.uint8), wanted[0].view(torch.uint8)), (name, hadamard)
            assert torch.equal(got[1], wanted[1]), name
            assert torch.equal(got[2], wanted[2].bfloat16()), name


def check_stored_keys_are_the_formats_bytes() -> None:
    for name in formats.names("index"):
        fmt = formats.index(name)
        pages = [torch.full((3, fmt.page_bytes + 32), 0xFF, dtype=torch.uint8) for _ in range(2)]
        slots = torch.randperm(192, generator=torch.Generator().manual_seed(1))[:40]
        slots[3], slots[5], slots[6] = -1, 192, -(1 << 40)
        keys = strided(hard_values(43), pad=8)
        run = planned("store_index_keys", StoreIndexSpec(index=name))
        assert run(keys, slots, pages[0][:, : fmt.page_bytes]) is None
        live = (slots >= 0) & (slots < 192)
        fmt.write(pages[1][:, : fmt.page_bytes], slots[live], keys[:40][live])
        assert torch.equal(*pages), name


def check_storing_nothing() -> None:
    run = planned("store_index_keys", StoreIndexSpec(index=POW2))
    cache = torch.full((1, 8448), 7, dtype=torch.uint8)
    run(torch.empty(4, 128), torch.empty(0, dtype=torch.int64), cache)
    assert (cache == 7).all()


def scored(index: Index, query: Any, row_req: Tensor, row_len: Tensor, limits: Limits = FEW) -> Tensor:
    run = planned("indexer_logits", index.spec(), limits)
    out: Tensor = run(*query, index.cache, index.table, row_req, row_len)
    return out


def check_scores_of_every_format() -> None:
    lengths = int32([130, 64, 1, 0, 200])
    for name in formats.names("index"):
        index = Index([200, 70], name, padding=32)
        query, request = index.query(5), int32([0, 1, 1, -1, 0])
        wanted = index.logits(query, request, lengths, torch.float64)
        close(scored(index, query, request, lengths), wanted, lengths)


def check_rows_have_the_same_bits_alone_together_and_by_place() -> None:
    for name, heads in ((POW2, 32), (MXFP4, 24)):
        index = Index([200, 90, 140], name, heads=heads)
        query = index.query(9)
        request, length = int32([0, 0, 0, 0, 1, 1, 2, 2, 0]), int32([197, 198, 199, 200, 89, 90, 0, 140, 65])
        found = {limits: scored(index, query, request, length, limits) for limits in (FEW, TOGETHER, MANY)}
        wanted = index.logits(query, request, length, torch.float64)
        keys = torch.arange(256) < length[:, None]
        for limits, got in found.items():
            close(got, wanted, length)
            for row in (0, 5, 8):
                some = slice(row, row + 1)
                alone = scored(index, [x[some] for x in query], request[some], length[some], limits)
                assert torch.equal(alone[0, :256][keys[row]], got[row, :256][keys[row]]), (name, limits, row)


def check_keys_are_shared_out_evenly_and_none_is_left() -> None:
    index = Index([700, 1, 130, 64], heads=1)
    query, request = index.query(6), int32([0, 1, 2, 3, 0, 2])
    length = int32([700, 1, 130, 0, 513, 129])
    wanted = index.logits(query, request, length, torch.float64)
    kept = indexer.PROCESSORS
    for indexer.PROCESSORS in (1, 3, 7):
        close(scored(index, query, request, length), wanted, length)
    indexer.PROCESSORS = kept


def check_what_is_no_key_is_not_read() -> None:
    """Lengths beyond the table, requests that do not exist, pages that do not exist; all else is 0xFF."""
    for limits in (FEW, TOGETHER, MANY):
        index = Index([150, 128], heads=2)
        index.table[0, 1] = -1
        index.table[1, 1:] = 1 << 30
        query = index.query(6)
        request, length = int32([0, 1, 2, -1, 0, 1]), int32([150, 1 << 30, 64, 64, 70, 64])
        got = scored(index, query, request, length, limits)
        wanted = index.logits(query, request, length, torch.float64)
        lengths = int32([150, 192, 0, 0, 70, 64])
        close(got, wanted, lengths)
        assert (got[0, 64:128] == -math.inf).all()
        assert (got[1, 64:192] == -math.inf).all()


def check_a_nan_key_scores_nan_and_no_other_does() -> None:
    for name in (POW2, MXFP4):
        index = Index([100], name, heads=3)
        keys = torch.randn(100, 128)
        keys[7, 5] = NAN
        index.put(0, keys)
        query = index.query(2)
        got = scored(index, query, int32([0, 0]), int32([100, 7]))
        assert got[0, :100].isnan().nonzero().flatten().tolist() == [7]
        assert not got[1, :7].isnan().any()


def check_bfloat16_scores_are_rounded_once_into_a_slice() -> None:
    index = Index([100], heads=2)
    query = index.query(2)
    exact = scored(index, query, int32([0, 0]), int32([100, 90]))
    wide = torch.full((2, 200), 7.0, dtype=torch.bfloat16)
    spec = dataclasses.replace(index.spec(), score="bfloat16", weights_dtype="bfloat16")
    narrow = (*query[:2], query[2].bfloat16())
    out = wide[:, 20:150]
    run = planned("indexer_logits", spec)
    assert run(*narrow, index.cache, index.table, int32([0, 0]), int32([100, 90]), out=out) is out
    again = scored(index, (*query[:2], query[2].bfloat16().float()), int32([0, 0]), int32([100, 90]))
    assert torch.equal(out[0, :100], again[0, :100].bfloat16())
    assert not torch.equal(exact, again)
    assert (wide[:, :20] == 7.0).all()
    assert (wide[:, 150:] == 7.0).all()
    assert (out[1, 90:] == 7.0).all()


def check_shards_hold_each_score_once() -> None:
    whole = Index([300], heads=2)
    query = whole.query(2)
    request, length = int32([0, 0]), int32([300, 123])
    all_keys = scored(whole, query, request, length)
    for rank in range(3):
        part = Index([300], heads=2, dcp=DCP(world=3, rank=rank, interleave=4))
        got = scored(part, query, request, length)
        for row, n in enumerate((300, 123)):
            position = part.positions(part.lengths[0])
            position = position[position < n]
            assert torch.equal(got[row, : len(position)], all_keys[row, position])


def searched(index: Index, query: Any, request: Tensor, length: Tensor, **fields: Any) -> None:
    """Select, and hold the selection to what ``topk_select`` makes of the scores that were computed."""
    spec = index.topk_spec(fields.pop("k", 20), return_selected=True, **fields)
    run = planned("indexer_topk", spec)
    operands = (*query, index.cache, index.table, request, length)
    every = torch.full((len(request), 1024), NAN, dtype=getattr(torch, spec.score))
    out, chosen, scores = run.return_scores(*operands, all_scores_out=every)  # type: ignore[attr-defined]
    plain = run(*operands)
    assert torch.equal(out, plain[0])
    assert torch.equal(chosen, plain[1])
    assert scores is every
    exists = (request >= 0) & (request < len(index.table))
    spec = dataclasses.replace(hal.specs.TopKSpec(), topk=spec.topk, scores_dtype=spec.score)
    bound = length.where(exists, 0).clamp(max=index.table.shape[1] * 64)
    wanted, best = topk_select(
        dataclasses.replace(spec, score=spec.scores_dtype, return_selected=True), every, bound
    )
    assert torch.equal(out, wanted)
    assert torch.equal(chosen.float(), best.float())


def check_selection_is_what_topk_select_makes_of_the_scores() -> None:
    index = Index([300, 70, 10], heads=2)
    request, length = int32([0, 1, 2, 7, 0]), int32([300, 70, 1000, 50, 0])
    searched(index, index.query(5), request, length)
    searched(index, index.query(5), request, length, score="bfloat16", ordered=True)
    index = Index([300, 70, 10], MXFP4, heads=2)
    searched(index, index.query(5), request, length, k=100)


def check_rows_are_scored_some_at_a_time() -> None:
    kept, sizes.SCORES = sizes.SCORES, 3 * 384 * 4
    index = Index([300, 200], heads=2)
    request, length = int32([0, 1] * 4), int32([300, 200, 299, 199, 0, 60, 100, 1])
    searched(index, index.query(8), request, length)
    sizes.SCORES = kept


def check_slots_stand_for_positions_and_those_without_a_page_drop_out() -> None:
    index = Index([300], heads=2)
    query, request, length = index.query(2), int32([0, 0]), int32([300, 150])
    local = planned("indexer_topk", index.topk_spec(200))
    slots = planned("indexer_topk", index.topk_spec(200, emit="slot"))
    operands = (*query, index.cache, index.table, request, length)
    positions, found = local(*operands)[0].long(), slots(*operands)[0]
    pages = index.table[0].long()
    wanted = torch.where(positions < 0, -1, pages[positions.clamp(min=0) // 64] * 64 + positions % 64)
    assert torch.equal(found.long(), wanted)
    index.table[0, 1] = -1
    found = slots(*query, index.cache, index.table, request, length)[0]
    wanted = index.topk(query, request, length, 200, emit="slot")[0]
    assert torch.equal(found.sort().values, wanted.sort().values)
    assert (found >= 0).sum(dim=1).tolist() == [200, 86]  # 64 of 150 keys have no page
    assert (found[1, 86:] == -1).all()


def check_no_rows_and_no_pages() -> None:
    index = Index([10], heads=2)
    nothing = [x[:0] for x in index.query(1)]
    none = int32([])
    assert scored(index, nothing, none, none).shape[0] == 0
    run = planned("indexer_topk", index.topk_spec(5))
    assert run(*nothing, index.cache, index.table, none, none)[0].shape == (0, 5)
    operands = (*index.query(2), index.cache, index.table[:, :0], int32([0, 0]), int32([3, 0]))
    assert (run(*operands)[0] == -1).all()
    planned("indexer_logits", index.spec())(*operands)
    assert planned("quantize_index_query", IndexQuerySpec(index=POW2, num_heads=2))(
        torch.empty(0, 2, 128), torch.empty(0, 2)
    )[0].shape == (0, 2, 128)
