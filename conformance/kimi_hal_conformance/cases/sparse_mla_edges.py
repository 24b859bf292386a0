"""Edges of the sparse_mla family: what random operands never show."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from kimi_hal import formats
from kimi_hal.ops.sparse_mla import MergeSpec, SparseMLASpec, StoreLatentSpec
from kimi_hal.ops.spec import Limits
from kimi_hal_conformance.case import INTERP, Case, Make, Operands, add
from kimi_hal_conformance.draws import ints, latent_cache, normal, stale_pages

LIMITS = Limits(max_rows=16, max_reqs=4, max_context=1024)
FP8 = "latent.fp8.e4m3fn.tensor"
BF16 = torch.bfloat16


def very_negative(spec: SparseMLASpec) -> Make:
    """Return keys whose logits are all near −65,000, below every finite number that stands for a mask."""

    def make(g: torch.Generator) -> Operands:
        cache = stale_pages(1, 64 * formats.latent(FP8).row_bytes, stride_pad=64)
        shared = torch.full((8, 64), -224.0)
        formats.latent(FP8).write(cache, 64, torch.arange(8), normal(g, 8, 512), shared, torch.ones(1))
        q = normal(g, 2, spec.num_heads, 576, dtype=BF16)
        q[..., 512:] = 64.0
        indices = ints([0, 1, 2, -1, 5, 6, -1, 7]).view(2, 4)
        return {"q": q, "cache": cache, "indices": indices, "k_scale": torch.ones(1)}

    return make


def beyond_the_table(spec: SparseMLASpec) -> Make:
    """Return local positions behind a block table that is full to its last column."""

    def make(g: torch.Generator) -> Operands:
        scale = torch.tensor([0.03125])
        cache = latent_cache(g, FP8, spec.page, 4, torch.arange(4 * spec.page), scale)
        return {
            "q": normal(g, 2, spec.num_heads, 576, dtype=BF16),
            "cache": cache,
            "indices": ints([5, 2 * spec.page, 9, 7, -1, 10**6]).view(2, 3),
            "k_scale": scale,
            "block_table": ints([2, 1, 3, 0]).view(2, 2),
            "row_req": ints([0, 1]),
        }

    return make


def unread_requests(spec: SparseMLASpec) -> Make:
    """Return rows without a live index whose requests are out of range, beside rows that attend."""

    def make(g: torch.Generator) -> Operands:
        scale = torch.tensor([0.03125])
        return {
            "q": normal(g, 4, spec.num_heads, 576, dtype=BF16),
            "cache": latent_cache(g, FP8, spec.page, 4, torch.arange(4 * spec.page), scale),
            "indices": ints([-1, -1, -1, 5, -1, 9, -1, -1, -1, 70, 8, 3]).view(4, 3),
            "k_scale": scale,
            "block_table": ints([2, 1, 3, 0]).view(2, 2),
            "row_req": ints([2, 0, -(2**31), 1]),
        }

    return make


def scaled_queries(spec: SparseMLASpec) -> Make:
    """Return FP8 queries, whose scale is part of the logits' scale."""

    def make(g: torch.Generator) -> Operands:
        fmt, scale = formats.latent(spec.latent), torch.tensor([0.0625])
        cache = latent_cache(g, spec.latent, 64, 2, torch.arange(128), scale)
        rows = fmt.pack(
            normal(g, 3 * spec.num_heads, 512, spread=8.0), normal(g, 3 * spec.num_heads, 64), torch.ones(1)
        )
        return {
            "q": rows.view(3, spec.num_heads, 576).view(getattr(torch, spec.q_dtype)),
            "cache": cache,
            "indices": torch.stack([torch.randperm(128, generator=g)[:48] for _ in range(3)]).int(),
            "k_scale": scale,
            "q_scale": torch.tensor([0.4375]),
        }

    return make


def foreign_scales(spec: SparseMLASpec) -> Make:
    """Return records with float32 scales that are no powers of two, as another writer leaves them."""

    def make(g: torch.Generator) -> Operands:
        cache = latent_cache(g, spec.latent, 64, 1, torch.arange(64), None)
        scales = torch.rand(64, 4, generator=g) + 0.5
        cache[:, : 64 * 656].view(64, 656)[:, 512:528] = scales.view(torch.uint8)
        indices = torch.stack([torch.randperm(64, generator=g)[:32] for _ in range(2)]).int()
        return {"q": normal(g, 2, spec.num_heads, 576, dtype=BF16), "cache": cache, "indices": indices}

    return make


def poisoned_key(spec: SparseMLASpec) -> Make:
    """Return a row that selects a key that is NaN, and one that does not."""

    def make(g: torch.Generator) -> Operands:
        scale = torch.tensor([0.03125])
        cache = latent_cache(g, FP8, 64, 1, torch.arange(63), scale)
        return {
            "q": normal(g, 2, spec.num_heads, 576, dtype=BF16),
            "cache": cache,
            "indices": ints([3, 63, 4, 8, 5, 6]).view(2, 3),
            "k_scale": scale,
        }

    return make


def counted(spec: SparseMLASpec) -> Make:
    """Return rows of live indices of which none count, one, all, and more than there are."""
    lengths = (0, 1, 5, -1, 6, 2**31 - 1, -(2**31))

    def make(g: torch.Generator) -> Operands:
        scale, rows = torch.tensor([0.03125]), len(lengths)
        return {
            "q": normal(g, rows, spec.num_heads, 576, dtype=BF16),
            "cache": latent_cache(g, FP8, 64, 1, torch.arange(64), scale),
            "indices": torch.stack([torch.randperm(64, generator=g)[:5] for _ in lengths]).int(),
            "k_scale": scale,
            "index_len": ints(lengths),
        }

    return make


def four_keys(g: torch.Generator, spec: SparseMLASpec, shared: Tensor) -> Tensor:
    """Return a cache of one page that holds four keys, of which these ``[4, 64]`` are the shared parts."""
    cache = stale_pages(1, 64 * formats.latent(spec.latent).row_bytes, stride_pad=64)
    formats.latent(spec.latent).write(cache, 64, torch.arange(4), normal(g, 4, 512), shared, None)
    return cache


def one_sided(spec: SparseMLASpec, size: float, key: float) -> Make:
    """Return logits ``size · key`` of either sign, one key a row or one key twice, beside an ordinary row."""

    def make(g: torch.Generator) -> Operands:
        shared = torch.zeros(4, 64)
        shared[:, 0] = torch.tensor([1.0, -1.0, 0.5, -0.5]) * key
        cache = four_keys(g, spec, shared)
        q = torch.zeros(5, spec.num_heads, 576)
        q[:, :, 512] = size
        q[4] = normal(g, spec.num_heads, 576)
        q[4, :, 512] = 0.0
        indices = ints([1, -1, 1, 1, 0, -1, 3, -1, 2, 3]).view(5, 2)
        return {"q": q.to(BF16), "cache": cache, "indices": indices}

    return make


def infinite(spec: SparseMLASpec) -> Make:
    """Return a row with a logit of +inf among others, one with it alone, and one without."""

    def make(g: torch.Generator) -> Operands:
        shared = normal(g, 4, 64)
        shared[1, 0] = math.inf
        cache = four_keys(g, spec, shared)
        q = normal(g, 3, spec.num_heads, 576)
        q[:, :, 512] = 0.5
        indices = ints([0, 1, 2, 1, -1, -1, 3, -1, 2]).view(3, 3)
        return {"q": q.to(BF16), "cache": cache, "indices": indices}

    return make


def beside_infinity(spec: SparseMLASpec) -> Make:
    """Return rows of a logit of +inf and of a key that is NaN, in either order; one has the +inf alone."""

    def make(g: torch.Generator) -> Operands:
        shared = normal(g, 4, 64)
        shared[1, 0], shared[3, 0] = math.inf, math.nan
        cache = four_keys(g, spec, shared)
        q = normal(g, 4, spec.num_heads, 576)
        q[:, :, 512] = 0.5
        indices = ints([1, 3, 0, 3, 1, 2, 1, 0, 2, 2, 0, -1]).view(4, 3)
        return {"q": q.to(BF16), "cache": cache, "indices": indices}

    return make


def infinite_query(spec: SparseMLASpec) -> Make:
    """Return a query of +inf at one number, which keys have positive, negative or 0: 0 · inf is NaN."""

    def make(g: torch.Generator) -> Operands:
        shared = normal(g, 4, 64)
        shared[:, 0] = torch.tensor([1.0, 0.0, -1.0, 2.0])
        cache = four_keys(g, spec, shared)
        q = normal(g, 6, spec.num_heads, 576)
        q[:5, :, 512] = math.inf
        indices = ints([0, 1, 1, 0, 0, 3, 2, -1, 2, 0, 1, 2]).view(6, 2)
        return {"q": q.to(BF16), "cache": cache, "indices": indices}

    return make


def without_a_key(spec: SparseMLASpec, k_scale: float) -> Make:
    """Return rows that select nothing, or nothing in the cache, whose scale is no number."""

    def make(g: torch.Generator) -> Operands:
        return {
            "q": normal(g, 3, spec.num_heads, 576, dtype=BF16),
            "cache": latent_cache(g, spec.latent, 64, 1, torch.arange(64), torch.tensor([0.03125])),
            "indices": ints([-1, -1, -1, 64, 10**6, -1, -1, 64, -1]).view(3, 3),
            "k_scale": torch.tensor([k_scale]),
        }

    return make


def attention_cases() -> Iterator[Case]:
    """Logits, indices, scales and keys at their edges."""
    small = SparseMLASpec(num_heads=4, latent=FP8, topk=64)
    local = SparseMLASpec(num_heads=4, latent=FP8, topk=64, index_space="local")
    flashmla = SparseMLASpec(num_heads=4, latent="latent.flashmla.656", topk=64)
    yield case("very-negative-logits", small, very_negative(small), fault=1)
    yield case("beyond-the-block-table", local, beyond_the_table(local), fault=4)
    yield case("requests-unread", local, unread_requests(local), fault=3)
    yield case("scales-of-another-writer", flashmla, foreign_scales(flashmla), fault=20)
    yield case("selected-nan", small, poisoned_key(small), fault=4)
    some = SparseMLASpec(num_heads=4, latent=FP8, topk=64, has_index_len=True)
    yield case("none-counted", some, counted(some), fault=7)
    plain = SparseMLASpec(num_heads=4, latent="latent.bf16", topk=64)
    yield case("beyond-1e30", plain, one_sided(plain, 1e17, 1e17), fault=1)
    for dialect in ("e4m3fn", "e4m3fnuz"):
        spec = SparseMLASpec(
            num_heads=4, latent=f"latent.fp8.{dialect}.tensor", topk=64, q_dtype=f"float8_{dialect}"
        )
        yield case(f"q-{dialect}", spec, scaled_queries(spec), fault=22)


def no_number_cases() -> Iterator[Case]:
    """Infinities and NaN: in a key, in a query, in the cache's scale."""
    plain = SparseMLASpec(num_heads=4, latent="latent.bf16", topk=64)
    yield case("plus-inf-logit", plain, infinite(plain), fault=19)
    yield case("nan-beside-plus-inf", plain, beside_infinity(plain), fault=19)
    for spec in (plain, SparseMLASpec(num_heads=4, latent="latent.nvfp4.352", topk=64)):
        yield case(f"infinite-query/{spec.latent}", spec, infinite_query(spec), fault=19)
    scaled = SparseMLASpec(num_heads=4, latent=FP8, topk=64)
    for label, scale in (("nan", math.nan), ("inf", math.inf)):
        yield case(f"no-key/k-scale-{label}", scaled, without_a_key(scaled, scale), fault=7)


def case(label: str, spec: SparseMLASpec, make: Make, fault: int) -> Case:
    """Return one attention case."""
    return Case(f"sparse_mla/edges/{label}", "sparse_mla", spec, LIMITS, make, since=INTERP, fault=fault)


def underflowed(spec: MergeSpec) -> Make:
    """Return a part whose weight underflows to 0 and whose NaN is nevertheless its output, and a far one."""

    def make(g: torch.Generator) -> Operands:
        outs, lses = normal(g, 2, 3, spec.num_heads, spec.dim), normal(g, 2, 3, spec.num_heads)
        lses[1, 0] = -500.0
        outs[1, 0, 0, 0] = math.nan
        lses[:, 1] -= 20_000.0
        lses[:, 2] = torch.tensor([-20_000.0, -math.inf])[:, None]
        return {"outs": outs.to(getattr(torch, spec.dtype)), "lses": lses}

    return make


def merge_cases() -> Iterator[Case]:
    """LSEs that a clamp or a test for weight would take for empty."""
    for dtype in ("bfloat16", "float32"):
        spec = MergeSpec(parts=2, num_heads=3, dim=64, dtype=dtype, return_lse=True)
        label = f"merge_attn_states/edges/far-lse/{dtype}"
        yield Case(label, "merge_attn_states", spec, LIMITS, underflowed(spec), since=INTERP, fault=2)


def odd_values(spec: StoreLatentSpec) -> Make:
    """Return latents with zeros, a tiny block, values beyond the largest, halves and both zeros; float32."""

    def make(g: torch.Generator) -> Operands:
        kv_c, k_pe = normal(g, 6, 512), normal(g, 6, 64)
        kv_c[0] = 0.0
        kv_c[1, :128] = 0.0
        kv_c[2, :16] = 1e-6
        kv_c[3, ::7] = 1e4
        kv_c[4] = torch.arange(512).remainder(33).float() / 16 + 1.0625  # some half way between two codes
        k_pe[0], k_pe[1, :8], k_pe[3, ::5] = 0.0, -1e-9, -1e4
        k_pe[4] = 1.0 + 2.0**-8 + torch.arange(64) * 2.0**-7  # half way between two bfloat16 numbers
        operands = {
            "kv_c": kv_c,
            "k_pe": k_pe,
            "slots": torch.tensor([5, 17, 0, 31, 8, 30]),
            "cache": stale_pages(2, spec.page * formats.latent(spec.latent).row_bytes, stride_pad=32),
        }
        needs = formats.latent(spec.latent).needs_scale
        return operands | {"k_scale": torch.ones(1)} if needs else operands

    return make


def store_cases() -> Iterator[Case]:
    """Values at the edges of every latent format."""
    for name in formats.names("latent"):
        spec = StoreLatentSpec(latent=name, page=16)
        label = f"store_latent/edges/{name}"
        yield Case(label, "store_latent", spec, LIMITS, odd_values(spec), since=INTERP, fault=20)


WHY = {
    "sparse_mla/edges/none-counted": "Live indices of which 0 count, one, all, and more: a length of 0 is none.",
    "sparse_mla/edges/beyond-1e30": "Finite logits of 10^33 and −10^33: none is taken for a mask.",
    "sparse_mla/edges/plus-inf-logit": "A logit of +inf: an LSE of +inf and an output of NaN, in its own row alone.",
    "sparse_mla/edges/nan-beside-plus-inf": "A NaN among the keys of a row with a logit of +inf: its LSE is NaN.",
    "sparse_mla/edges/infinite-query/": "A query of +inf: logits of either sign, and a key of 0, whose logit is NaN.",
    "sparse_mla/edges/no-key/": "Rows without a key are 0 and −inf whatever the cache's scale is.",
    "sparse_mla/edges/very-negative-logits": "Logits of −65,000: below every finite number that stands for a mask.",
    "sparse_mla/edges/beyond-the-block-table": "Positions behind a block table that is full to its last column.",
    "sparse_mla/edges/requests-unread": "Requests out of range at rows without a live index: not read, 0 and −inf.",
    "sparse_mla/edges/scales-of-another-writer": "Float32 scales that are no powers of two.",
    "sparse_mla/edges/selected-nan": "A selected key that is NaN is its own row's alone.",
    "sparse_mla/edges/q-": "FP8 queries in each dialect, whose scale is part of the logits' scale.",
    "merge_attn_states/edges/far-lse": "LSEs that a clamp takes for empty, and a NaN whose weight underflows.",
    "store_latent/edges/": "Zeros, tiny blocks, values beyond the largest, halves and both zeros, in each format.",
}

add(attention_cases(), WHY)
add(no_number_cases(), WHY)
add(merge_cases(), WHY)
add(store_cases(), WHY)
