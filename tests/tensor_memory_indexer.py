"""Checks of Blackwell's index scores, interpreted: the scaled product against float64, scores against the formula."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from index_cases import MXFP4, POW2, Index, close, int32
from interpreted import device
from torch import Tensor

import kimi_hal as hal
from kimi_hal import formats
from kimi_hal.formats import scales
from kimi_hal.ops.spec import DCP, Limits
from kimi_hal_nvidia import tensor_memory

FORMATS = (
    "index.fp8.e4m3fn.f32.page64",
    POW2,
    "index.fp8.e4m3fn.ue8m0x4.page64",
    MXFP4,
)
FEW = Limits(max_rows=64, max_reqs=64, max_context=1024)
TOGETHER = Limits(max_rows=64, max_reqs=16, max_context=1024, rows_per_req=4)
MANY = Limits(max_rows=4096, max_reqs=2, max_context=1024, uniform=False)
DEVICE = device()


def planned(spec: Any, limits: Limits = FEW) -> Callable[..., Any]:
    return hal.plan("indexer_logits", spec, limits, device="cpu", implementation="nvidia.triton_tcgen05").run


def scored(index: Index, query: Any, row_req: Tensor, row_len: Tensor, limits: Limits = FEW) -> Tensor:
    out: Tensor = planned(index.spec(), limits)(*query, index.cache, index.table, row_req, row_len)
    return out


@triton.jit
def _scaled_product(a, a_scale, b, b_scale, out, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M)[:, None], tl.arange(0, N)[:, None]
    byte, group = tl.arange(0, 64)[None, :], tl.arange(0, 4)[None, :]
    product = tl.dot_scaled(
        tl.load(a + m * 64 + byte),
        tl.load(a_scale + m * 4 + group),
        "e2m1",
        tl.trans(tl.load(b + n * 64 + byte)),
        tl.load(b_scale + n * 4 + group),
        "e2m1",
    )
    tl.store(out + m * N + tl.arange(0, N)[None, :], product)


def check_the_interpreter_multiplies_scaled_blocks_as_float64_does() -> None:
    """All codes, and all scales that there are on one side; NaN is the last row's.

    Numbers that float32 cannot hold with their scale are left out: the interpreter makes them infinite.
    """
    generator = torch.Generator().manual_seed(5)
    a, b = (torch.randint(256, (rows, 64), generator=generator, dtype=torch.uint8) for rows in (128, 16))
    a_scale = torch.full((128, 4), 127, dtype=torch.uint8)
    a_scale[:64] = torch.arange(256, dtype=torch.uint8).view(64, 4)
    a_scale[63, 3], a_scale[127, 3] = 127, 255
    a[63, 16:48] &= 0xBB  # nothing from 2 on under scales 253 and 254
    b_scale = torch.randint(100, 116, (16, 4), generator=generator, dtype=torch.uint8)
    out = torch.empty(128, 16)
    _scaled_product[(1,)](a, a_scale, b, b_scale, out, M=128, N=16)
    left, right = (scales.mx_decode(*x, torch.float64) for x in ((a, a_scale), (b, b_scale)))
    wanted, size = left @ right.T, left.abs() @ right.abs().T
    assert wanted.isnan().sum() == wanted[-1].isnan().sum() == 16
    assert out[-1].isnan().all()
    error = (out.double() - wanted).abs()[:-1]
    assert (error <= 128 * 2.0**-24 * size[:-1] + 128 * 2.0**-149).all()


def check_scores_of_every_claimed_format_and_of_head_counts_off_every_tile() -> None:
    lengths = int32([130, 64, 1, 0, 200])
    for name in FORMATS:
        for heads in (1, 3, 24, 33, 128):
            index = Index([200, 70], name, heads=heads, padding=32)
            query, request = index.query(5), int32([0, 1, 1, -1, 0])
            wanted = index.logits(query, request, lengths, torch.float64)
            close(scored(index, query, request, lengths, MANY), wanted, lengths)


def check_rows_have_the_same_bits_alone_and_together() -> None:
    for name, heads in ((POW2, 32), (MXFP4, 24)):
        index = Index([200, 90, 140], name, heads=heads)
        query = index.query(9)
        request, length = int32([0, 0, 0, 0, 1, 1, 2, 2, 0]), int32([197, 198, 199, 200, 89, 90, 0, 140, 65])
        wanted = index.logits(query, request, length, torch.float64)
        keys = torch.arange(256) < length[:, None]
        for limits in (FEW, TOGETHER, MANY):
            got = scored(index, query, request, length, limits)
            close(got, wanted, length)
            for row in (0, 5, 8):
                some = slice(row, row + 1)
                alone = scored(index, [x[some] for x in query], request[some], length[some], limits)
                assert torch.equal(alone[0, :256][keys[row]], got[row, :256][keys[row]]), (name, limits, row)


def check_programs_share_out_the_keys_and_none_is_left() -> None:
    index = Index([700, 1, 130, 64], heads=2)
    query, request = index.query(6), int32([0, 1, 2, 3, 0, 2])
    length = int32([700, 1, 130, 0, 513, 129])
    wanted = index.logits(query, request, length, torch.float64)
    kept = tensor_memory.SPAN
    for tensor_memory.SPAN in (128, 256):
        close(scored(index, query, request, length, TOGETHER), wanted, length)
    tensor_memory.SPAN = kept


def check_what_is_no_key_is_not_read() -> None:
    """Lengths beyond the table, requests and pages that do not exist; all else is 0xFF."""
    for name in (POW2, MXFP4):
        for limits in (FEW, MANY):
            index = Index([150, 128], name, heads=2)
            index.table[0, 1] = -1
            index.table[1, 1:] = 1 << 30
            query = index.query(6)
            request, length = int32([0, 1, 2, -1, 0, 1]), int32([150, 1 << 30, 64, 64, 70, 64])
            got = scored(index, query, request, length, limits)
            lengths = int32([150, 192, 0, 0, 70, 64])
            close(got, index.logits(query, request, length, torch.float64), lengths)
            assert (got[0, 64:128] == -math.inf).all()
            assert (got[1, 64:192] == -math.inf).all()


def check_a_nan_key_scores_nan_and_no_other_does() -> None:
    for name in (POW2, MXFP4):
        index = Index([100], name, heads=3)
        keys = torch.randn(100, 128)
        keys[7, 5] = math.nan
        index.put(0, keys)
        got = scored(index, index.query(2), int32([0, 0]), int32([100, 7]))
        assert got[0, :100].isnan().nonzero().flatten().tolist() == [7]
        assert not got[1, :7].isnan().any()


def check_bfloat16_scores_are_rounded_once_into_a_slice() -> None:
    for name in (POW2, MXFP4):
        index = Index([100], name, heads=2)
        q, q_scale, weights = index.query(2)
        spec = dataclasses.replace(index.spec(), score="bfloat16", weights_dtype="bfloat16")
        wide = torch.full((2, 200), 7.0, dtype=torch.bfloat16)
        out, request, length = wide[:, 20:150], int32([0, 0]), int32([100, 90])
        operands = (q, q_scale, weights.bfloat16(), index.cache, index.table, request, length)
        assert planned(spec)(*operands, out=out) is out
        exact = scored(index, (q, q_scale, weights.bfloat16().float()), request, length)
        assert torch.equal(out[0, :100], exact[0, :100].bfloat16())
        assert (wide[:, :20] == 7.0).all()
        assert (wide[:, 150:] == 7.0).all()
        assert (out[1, 90:] == 7.0).all()


def check_shards_hold_each_score_once() -> None:
    whole = Index([300], MXFP4, heads=2)
    query, request, length = whole.query(2), int32([0, 0]), int32([300, 123])
    all_keys = scored(whole, query, request, length)
    for rank in range(3):
        part = Index([300], MXFP4, heads=2, dcp=DCP(world=3, rank=rank, interleave=4))
        got = scored(part, query, request, length)
        for row, n in enumerate((300, 123)):
            position = part.positions(part.lengths[0])
            position = position[position < n]
            assert torch.equal(got[row, : len(position)], all_keys[row, position])


def check_no_rows_and_no_pages() -> None:
    for name in (POW2, MXFP4):
        index = Index([10], name, heads=2)
        none = int32([])
        assert scored(index, [x[:0] for x in index.query(1)], none, none).shape[0] == 0
        operands = (*index.query(2), index.cache, index.table[:, :0], int32([0, 0]), int32([3, 0]))
        assert planned(index.spec())(*operands).shape == (2, 1024)


def check_every_format_that_is_claimed_was_tried() -> None:
    plain = {name for name in formats.names("index") if formats.index(name).tile_tokens == 1}
    assert plain - {"index.fp8.e4m3fnuz.f32.page64"} == {*FORMATS}
