"""Checks of the portable latent kernels: bytes against the formats, attention against the formula, bits and bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from interpreted import device, on_device
from latent_cases import Latents, plain, queries
from torch import Tensor

import kimi_hal as hal
from kimi_hal import formats
from kimi_hal.dispatch.contract import BuildContext, Sizes
from kimi_hal.ops.sparse_mla import MergeSpec, SparseMLASpec, StoreLatentSpec
from kimi_hal.ops.spec import DCP, Limits
from kimi_hal.reference import sparse_mla as reference
from kimi_hal.triton import latent_plan, sparse_mla

DEVICE = device()
NAN, INF = math.nan, math.inf
FEW = Limits(max_rows=8, max_reqs=4)
ONE = Limits(max_rows=1, max_reqs=1)
MANY = Limits(max_rows=4096, max_reqs=64)
FN, FNUZ = "latent.fp8.e4m3fn.tensor", "latent.fp8.e4m3fnuz.tensor"
NVFP4, RECORD, WIDE = "latent.nvfp4.352", "latent.flashmla.656", "latent.bf16"
#: An architecture on which keys are left small, and one of which nothing is known.
ARCHITECTURES = ("sm_90", "")


def planned(operator: str, spec: Any, limits: Limits = FEW) -> Callable[..., Any]:
    run = hal.plan(operator, spec, limits, device=DEVICE, implementation="nvidia.triton").run
    return on_device(run, DEVICE)


def built(spec: SparseMLASpec, limits: Limits, arch: str) -> Callable[..., Any]:
    """Build attention for an architecture, wherever it runs."""
    context = BuildContext(
        operator="sparse_mla",
        spec=spec,
        limits=limits,
        device=DEVICE,
        arch=arch,
        sizes=Sizes(),
        group=None,
        persistent=None,
        check=lambda **operands: None,
        settings={},
    )
    return on_device(sparse_mla.build_sparse_mla(context), DEVICE)


def scale_of(name: str, value: float = 0.75) -> Tensor | None:
    return torch.tensor([value]) if formats.latent(name).needs_scale else None


def slots(*values: int) -> Tensor:
    return torch.tensor(values)


def row(*values: int) -> Tensor:
    return torch.tensor([values], dtype=torch.int32)


def hard_latents(rows: int) -> tuple[Tensor, Tensor]:
    """Return latents of every size, with zeros of both signs, subnormals, infinities and NaN."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 576, generator=generator) * torch.logspace(-40, 30, rows)[:, None]
    x[0], x[1] = 0.0, torch.linspace(-500, 500, 576)
    x[2, ::2], x[3, 7], x[4, 100], x[5, 520] = -0.0, NAN, INF, -INF
    x[6, 560], x[7] = NAN, torch.linspace(-0.01, 0.01, 576)
    return x[:, :512], x[:, 512:]


def check_store_writes_the_formats_bytes_for_hard_values() -> None:
    for name in formats.names("latent"):
        for dtype in (torch.float32, torch.bfloat16):
            kv_c, k_pe = (x.to(dtype) for x in hard_latents(24))
            where = torch.randperm(32)[:24]
            where[9], where[10], where[11] = -1, 32, -(2**40)
            cache = Latents(name, pages=2, page=16, padding=32, k_scale=scale_of(name)).cache
            expected = cache.clone()
            spec = StoreLatentSpec(latent=name, page=16)
            planned("store_latent", spec, MANY)(kv_c, k_pe, where, cache, scale_of(name))
            reference.store_latent(spec, kv_c, k_pe, where, expected, scale_of(name))
            assert torch.equal(cache, expected), (name, dtype)


def check_store_reads_the_strides_of_views_and_ignores_more_rows() -> None:
    generator = torch.Generator().manual_seed(3)
    fused = torch.randn(5, 1700, generator=generator).bfloat16()
    kv_c, k_pe = fused[:, 3:515], fused[:, 1001:1065]
    pool = torch.full((6,), -1, dtype=torch.int64)
    pool[::2] = slots(5, 0, 3)
    cache = torch.full((1, 8 * 576), 0x7F, dtype=torch.uint8)
    expected, spec = cache.clone(), StoreLatentSpec(latent=FN, page=8)
    planned("store_latent", spec)(kv_c, k_pe, pool[::2], cache, scale_of(FN))
    reference.store_latent(spec, kv_c[:3], k_pe[:3], slots(5, 0, 3), expected, scale_of(FN))
    assert torch.equal(cache, expected)


def every_code(name: str) -> Latents:
    """Return a cache whose rows hold every element code beside every scale code that is a number."""
    latents = Latents(name, pages=1, page=64, k_scale=scale_of(name))
    generator = torch.Generator().manual_seed(7)
    latents.cache.copy_(torch.randint(0, 256, latents.cache.shape, generator=generator, dtype=torch.uint8))
    rows = latents.cache.view(64, -1)
    if name == FN:
        rows[(rows & 0x7F) == 0x7F] = 0
    if name == FNUZ:
        rows[rows == 0x80] = 0
    if name == NVFP4:
        codes = rows[:, 256:]
        codes[(codes & 0x7F) == 0x7F] = 1
    if name == RECORD:
        codes = rows[:, :512]
        codes[(codes & 0x7F) == 0x7F] = 0
        scales = torch.tensor([0.75, 1.3, 3.0, 0.001] * 64).view(64, 4)
        rows[:, 512:528] = (scales * torch.arange(1.0, 65.0)[:, None]).view(torch.uint8)
    if name in (RECORD, WIDE):
        numbers = rows[:, 528:] if name == RECORD else rows
        bits = torch.randn(64, numbers.shape[1] // 2, generator=generator).bfloat16()
        numbers.copy_(bits.contiguous().view(torch.uint8))
    return latents


def check_one_key_is_its_own_value_exactly_in_every_format() -> None:
    """With one key its probability is 1, so the output is the key as it was decoded.

    A record's float32 scale goes with the probability, in three parts, whose sums a device's matrix unit cuts.
    """
    for name in formats.names("latent"):
        for arch in ARCHITECTURES:
            latents = every_code(name)
            spec = latents.spec(1, topk=1, out_dtype="float32")
            indices = torch.arange(6, dtype=torch.int32)[:, None]
            q = torch.zeros(6, 1, 576, dtype=torch.bfloat16)
            out, lse = built(spec, MANY, arch)(q, latents.cache, indices, latents.k_scale)
            expected = latents.keys(torch.arange(6))[:, None, :512].float()
            cut = 2**-22 if name == RECORD and DEVICE != "cpu" else 0.0
            error = float(((out - expected).abs() / expected.abs().clamp(min=2**-126)).max())
            assert error <= cut, (name, arch, error)
            assert torch.equal(lse, torch.zeros(6, 1))


def check_each_number_of_a_query_meets_its_own_of_the_key() -> None:
    """A query with one number picks one number of the key: the logit is their product."""
    for name in formats.names("latent"):
        latents = every_code(name)
        spec = latents.spec(64, topk=1, softmax_scale=1.0)
        key = latents.keys(slots(9))[0]
        for first in range(0, 576, 64):
            q = torch.zeros(1, 64, 576, dtype=torch.bfloat16)
            q[0, torch.arange(64), first + torch.arange(64)] = 1.0
            _, lse = built(spec, FEW, "sm_90")(q, latents.cache, row(9), latents.k_scale)
            torch.testing.assert_close(lse[0].double(), key[first : first + 64], rtol=1e-6, atol=0)


def check_queries_of_any_size_are_kept() -> None:
    """Raising a query cannot overflow it, nor lowering it lose it: logits scale with it."""
    latents = Latents()
    keys = latents.fill(torch.arange(40))
    for size in (2.0**-14, 1.0, 2.0**40, 2.0**100):
        scale = 0.05 / size
        q = (queries(1, 3).double() * size).bfloat16()
        spec = latents.spec(3, topk=40, softmax_scale=scale)
        want_out, want_lse = plain(q[0], keys, scale)
        for arch in ARCHITECTURES:
            out, lse = built(spec, FEW, arch)(q, latents.cache, row(*range(40)), latents.k_scale)
            torch.testing.assert_close(lse[0].double(), want_lse, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(out[0].double(), want_out, rtol=2**-8, atol=1e-5)


def check_any_number_of_heads() -> None:
    latents = Latents()
    keys = latents.fill(torch.arange(17))
    for heads in (1, 15, 16, 24, 33, 48, 96, 112, 128):
        q = queries(1, heads)
        out, lse = planned("sparse_mla", latents.spec(heads, topk=17))(
            q, latents.cache, row(*range(17)), latents.k_scale
        )
        want_out, want_lse = plain(q[0], keys)
        torch.testing.assert_close(out[0].double(), want_out, rtol=2**-7, atol=1e-2)
        torch.testing.assert_close(lse[0].double(), want_lse, rtol=1e-5, atol=1e-5)


def check_splits_give_what_one_part_gives() -> None:
    """32 parts, some of them without a key, and one: the same attention, within float32."""
    latents = Latents(pages=40)
    latents.fill(torch.arange(640))
    indices = torch.randperm(640, generator=torch.Generator().manual_seed(2))[None].int()
    indices[0, 64:200] = -1
    q, spec = queries(1, 12), latents.spec(12, topk=2048, out_dtype="float32")
    assert latent_plan.cut(spec, ONE, "").splits == 32
    split = planned("sparse_mla", spec, ONE)(q, latents.cache, indices, latents.k_scale)
    whole = planned("sparse_mla", spec, MANY)(q, latents.cache, indices, latents.k_scale)
    oracle = latents.attend(q, indices, torch.float64, topk=2048)
    for a, b, c in zip(split, whole, oracle, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(a.double(), c, rtol=1e-5, atol=1e-5)


def check_nan_and_infinity_in_one_part_reach_the_row() -> None:
    latents = Latents(WIDE, pages=12)
    latents.fill(torch.arange(192))
    rows = latents.cache.view(192, 1152).view(torch.bfloat16)
    spec = latents.spec(2, topk=192, softmax_scale=1.0)
    run = planned("sparse_mla", spec, ONE)
    q = torch.zeros(1, 2, 576, dtype=torch.bfloat16)
    q[0, 0, 3] = 1.0
    indices = row(*range(192))
    rows[100, 3] = INF
    out, lse = run(q, latents.cache, indices)
    assert lse[0, 0] == INF
    assert out[0, 0].isnan().all()
    rows[20, 3] = NAN
    out, lse = run(q, latents.cache, indices)
    assert lse.isnan().all()
    assert out.isnan().all()
    rows[20, 3], rows[100, 3] = 1.0, -INF
    out, lse = run(q, latents.cache, row(*range(100), *range(101, 192)))
    assert out.isfinite().all()
    assert lse.isfinite().all()


def check_a_nan_reaches_its_row_from_any_byte_and_no_other() -> None:
    bytes_of = {FN: (0, 511, 575), FNUZ: (1, 258, 512), NVFP4: (256, 319, 320, 351)}
    for name, places in bytes_of.items():
        for arch in ARCHITECTURES:
            for place in places:
                latents = Latents(name, pages=1, page=16)
                latents.fill(torch.arange(8))
                code = 0x80 if name == FNUZ else 0xFF
                latents.cache.view(16, -1)[5, place] = code
                spec = latents.spec(2, topk=4)
                indices = torch.tensor([[1, 5, 2, -1], [1, 4, 2, -1]], dtype=torch.int32)
                out, lse = built(spec, MANY, arch)(queries(2, 2), latents.cache, indices, latents.k_scale)
                assert out[0].isnan().all(), (name, place, arch)
                assert lse[0].isnan().all(), (name, place, arch)
                assert out[1].isfinite().all(), (name, place, arch)


def check_a_rows_bits_do_not_depend_on_its_batch() -> None:
    latents = Latents(pages=20)
    latents.fill(torch.arange(320))
    generator = torch.Generator().manual_seed(5)
    indices = torch.stack([torch.randperm(320, generator=generator)[:150] for _ in range(5)]).int()
    indices[2] = -1
    q = queries(5, 12)
    run = planned("sparse_mla", latents.spec(12, topk=256))
    out, lse = run(q, latents.cache, indices, latents.k_scale)
    order = torch.tensor([3, 0, 4])
    for chosen in (order, order[:1], order.flip(0)):
        part, part_lse = run(q[chosen], latents.cache, indices[chosen], latents.k_scale)
        assert torch.equal(part, out[chosen])
        assert torch.equal(part_lse, lse[chosen])


def check_a_given_workspace_changes_no_bit() -> None:
    latents = Latents(pages=20)
    latents.fill(torch.arange(320))
    indices = torch.arange(300, dtype=torch.int32).repeat(2, 1)
    spec = latents.spec(5, topk=300)
    plan = hal.plan("sparse_mla", spec, FEW, device=DEVICE, implementation="nvidia.triton")
    assert plan.workspace_bytes == 8 * 4 * 5 * 513 * 4
    run = on_device(plan.run, DEVICE)
    q = queries(2, 5)
    expected = run(q, latents.cache, indices, latents.k_scale)
    room = torch.full((plan.workspace_bytes + 256,), 0xFF, dtype=torch.uint8)
    room = room[-room.data_ptr() % 256 :][: plan.workspace_bytes]
    if DEVICE == "cpu":
        got = run(q, latents.cache, indices, latents.k_scale, workspace=room)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def check_pages_of_any_length_and_rows_beyond_two_gigabytes() -> None:
    fmt = formats.latent(FN)
    for page in (1, 100, 64):
        stride = (1 << 31) + 16 if page == 64 else page * fmt.row_bytes + 48
        pool = torch.empty(2 * stride, dtype=torch.uint8)
        cache = pool.as_strided((2, page * fmt.row_bytes), (stride, 1))
        slot = slots(2 * page - 1)
        fmt.write(cache, page, slot, torch.randn(1, 512), torch.randn(1, 64), torch.tensor([0.5]))
        spec = SparseMLASpec(num_heads=1, latent=FN, page=page, topk=4, out_dtype="float32")
        run = hal.plan("sparse_mla", spec, FEW, device=DEVICE, implementation="nvidia.triton").run
        run = on_device(run, DEVICE) if page != 64 or DEVICE == "cpu" else _beyond(run, cache)
        indices = row(-1, 2 * page, 2 * page - 1, 2**31 - 1)
        out, _ = run(queries(1, 1), cache, indices, torch.tensor([0.5]))
        expected = fmt.read(cache, page, slot, torch.tensor([0.5]))[:, None, :512]
        assert torch.equal(out, expected), page


def _beyond(run: Callable[..., Any], cache: Tensor) -> Callable[..., Any]:
    """Return ``run`` with the cache's second page alone copied to the device, at the same distance."""
    pool = torch.empty(2 * cache.stride(0), dtype=torch.uint8, device=DEVICE)
    there = pool.as_strided(cache.shape, cache.stride())
    there[1].copy_(cache[1])
    return lambda q, _, *others: on_device(lambda *o: run(o[0], there, *o[1:]), DEVICE)(q, *others)


def check_every_rank_attends_to_its_own_keys() -> None:
    """The parts of all ranks, merged, are the attention of one rank over all keys."""
    length, page, world = 90, 8, 3
    whole = Latents(pages=16, page=page)
    keys = whole.fill(torch.arange(length))
    positions = torch.randperm(length, generator=torch.Generator().manual_seed(4))[None].int()
    positions[0, 11] = 10_000  # beyond every table
    q, parts, lses = queries(1, 7), [], []
    for rank in range(world):
        dcp = DCP(world=world, rank=rank, interleave=4)
        own = [p for p in range(length) if p // 4 % world == rank]
        pages = -(-len(own) // page)
        table = torch.randperm(pages + 2, generator=torch.Generator().manual_seed(rank))[:pages].int()
        cache = torch.full((pages + 2, whole.cache.shape[1]), 0x7F, dtype=torch.uint8)
        for place, position in enumerate(own):
            slot = int(table[place // page]) * page + place % page
            source = whole.cache.view(-1, 576)[position]
            cache.view(-1, 576)[slot] = source
        spec = whole.spec(7, topk=length, index_space="position", dcp=dcp, out_dtype="float32")
        tables = torch.stack([torch.full_like(table, -1), table])
        request = torch.ones(1, dtype=torch.int32)
        out, lse = planned("sparse_mla", spec)(
            q, cache, positions, whole.k_scale, block_table=tables, row_req=request
        )
        parts.append(out)
        lses.append(lse)
    kept = torch.arange(length) != int((set(range(length)) - set(positions[0].tolist())).pop())
    want, want_lse = plain(q[0], keys[kept])
    merged, merged_lse = reference.merge_attn_states(
        MergeSpec(parts=world, num_heads=7, dtype="float32", return_lse=True),
        torch.stack(parts),
        torch.stack(lses),
    )
    torch.testing.assert_close(merged[0].double(), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(merged_lse[0].double(), want_lse, rtol=1e-5, atol=1e-5)


def check_a_row_of_a_request_that_is_not_there_has_no_key() -> None:
    latents = Latents()
    latents.fill(torch.arange(16))
    table = torch.zeros(1, 1, dtype=torch.int32)
    for request in (-1, 1, 2**31 - 1):
        out, lse = planned("sparse_mla", latents.spec(2, topk=4, index_space="local"))(
            queries(1, 2),
            latents.cache,
            row(0, 1, 2, 3),
            latents.k_scale,
            block_table=table,
            row_req=torch.tensor([request], dtype=torch.int32),
        )
        assert torch.equal(out, torch.zeros_like(out))
        assert (lse == -INF).all()


def check_a_row_without_a_key_is_zero_whatever_the_scale_is() -> None:
    latents, indices = Latents(), torch.full((2, 96), -1, dtype=torch.int32)
    latents.fill(torch.arange(4))
    for value in (NAN, INF, -INF):
        for limits in (FEW, MANY):  # several parts, and one
            for arch in ARCHITECTURES:
                run = built(latents.spec(3, topk=96), limits, arch)
                out, lse = run(queries(2, 3), latents.cache, indices, torch.tensor([value]))
                assert torch.equal(out, torch.zeros_like(out)), (value, arch)
                assert torch.equal(lse, torch.full_like(lse, -INF))


def check_index_len_of_any_size_is_clamped() -> None:
    latents = Latents()
    keys = latents.fill(torch.arange(10))
    q = queries(4, 2)
    lengths = torch.tensor([-5, 0, 3, 1000], dtype=torch.int32)
    spec = latents.spec(2, topk=10, has_index_len=True)
    indices = torch.arange(10, dtype=torch.int32).repeat(4, 1)
    out, lse = planned("sparse_mla", spec)(q, latents.cache, indices, latents.k_scale, index_len=lengths)
    assert torch.equal(out[:2], torch.zeros_like(out[:2]))
    assert (lse[:2] == -INF).all()
    for t, count in ((2, 3), (3, 10)):
        want, want_lse = plain(q[t], keys[:count])
        torch.testing.assert_close(out[t].double(), want, rtol=2**-7, atol=1e-2)
        torch.testing.assert_close(lse[t].double(), want_lse, rtol=1e-5, atol=1e-5)
