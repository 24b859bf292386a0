"""Bytes of caches at their edges: what is written where, and what every code means when it is read."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from kimi_hal import formats
from kimi_hal.ops.indexer import IndexerSpec, IndexQuerySpec, StoreIndexSpec
from kimi_hal.ops.sparse_mla import SparseMLASpec, StoreLatentSpec
from kimi_hal.ops.spec import Limits
from kimi_hal_conformance.case import INTERP, Case, Make, Operands, add
from kimi_hal_conformance.cases.sparse_mla import scale_for
from kimi_hal_conformance.draws import column, hard_values, ints, normal, stale_pages

LIMITS = Limits(max_rows=64, max_reqs=16, max_context=1024)
DIVIDED = "latent.fp8.e4m3fn.tensor"
NON_FINITE = (math.nan, -math.nan, math.inf, -math.inf)
#: Slots of a cache of 128: padding of every kind, the first slot, one behind the last, one far behind it.
SLOTS = (3, -1, 0, -2, 127, 128, 1 << 40, -(1 << 62), 64)


def with_marks(values: Tensor) -> Tensor:
    """Return rows of which four hold one NaN or infinity each."""
    for row, value in enumerate(NON_FINITE):
        values[row, 7 + row] = value
    return values


def keys_stored(name: str, keys: Tensor, slots: tuple[int, ...] = SLOTS) -> Operands:
    """Return keys for the slots of two pages; the slots are a column of a wider table."""
    fmt = formats.index(name)
    cache = stale_pages(2, fmt.page_bytes, stride_pad=32)
    return {"k": keys, "slots": column(slots, torch.int64), "cache": cache}


def index_stores() -> Iterator[Case]:
    """Every format: values, slots, float32 keys."""
    slots = tuple(range(0, 120, 10))

    def finite(name: str) -> Make:
        return lambda g: keys_stored(name, hard_values(g, 12, 128), slots)

    def marked(name: str) -> Make:
        return lambda g: keys_stored(name, with_marks(normal(g, 12, 128)).bfloat16(), slots)

    def padded(name: str) -> Make:
        return lambda g: keys_stored(name, normal(g, len(SLOTS), 128).bfloat16())

    for name in formats.names("index"):
        for label, make, fault in (("values", finite, 20), ("non-finite", marked, 22), ("slots", padded, 3)):
            case = f"store_index_keys/edges/{label}/{name}"
            spec = StoreIndexSpec(index=name)
            yield Case(case, "store_index_keys", spec, LIMITS, make(name), since=INTERP, fault=fault)


def latents_stored(name: str, values: Tensor, slots: tuple[int, ...] = SLOTS) -> Operands:
    """Return latents for the slots of two pages; the slots are a column of a wider table."""
    cache = stale_pages(2, 64 * formats.latent(name).row_bytes, stride_pad=32)
    given = {"kv_c": values[:, :512], "k_pe": values[:, 512:]}
    scale = scale_for(name)
    return (
        given
        | {"slots": column(slots, torch.int64), "cache": cache}
        | ({} if scale is None else {"k_scale": scale})
    )


def latent_stores() -> Iterator[Case]:
    """Every format: slots, NaN and infinities."""
    slots = tuple(range(0, 120, 10))

    def marked(name: str) -> Make:
        return lambda g: latents_stored(name, with_marks(normal(g, 12, 576)).bfloat16(), slots)

    def padded(name: str) -> Make:
        return lambda g: latents_stored(name, normal(g, len(SLOTS), 576).bfloat16())

    for name in formats.names("latent"):
        for label, make, fault in (("non-finite", marked, 22), ("slots", padded, 3)):
            case = f"store_latent/edges/{label}/{name}"
            spec = StoreLatentSpec(latent=name)
            yield Case(case, "store_latent", spec, LIMITS, make(name), since=INTERP, fault=fault)


def hard_queries(spec: IndexQuerySpec) -> Make:
    """Return one hard value a head, of every magnitude that bfloat16 and float32 have."""

    def make(g: torch.Generator) -> Operands:
        q = hard_values(g, 2 * spec.num_heads, 128).view(2, spec.num_heads, 128)
        return {"q": q, "weights": normal(g, 2, spec.num_heads, dtype=torch.bfloat16)}

    return make


def queries() -> Iterator[Case]:
    """Every format, turned and not."""
    for name in formats.names("index"):
        for turned in (False, True):
            spec = IndexQuerySpec(index=name, num_heads=12, hadamard=turned)
            case = f"quantize_index_query/edges/values/{name}{'/hadamard' * turned}"
            make = hard_queries(spec)
            if not turned:  # a turned query differs by the order of its sums, and so may its last code
                yield Case(case, "quantize_index_query", spec, LIMITS, make, since=INTERP, fault=20)
        plain = IndexQuerySpec(index=name, num_heads=4)
        case, make = f"quantize_index_query/edges/non-finite/{name}", marked_queries(plain)
        yield Case(case, "quantize_index_query", plain, LIMITS, make, since=INTERP, fault=22)


def marked_queries(spec: IndexQuerySpec) -> Make:
    """Return rows of which four heads hold one NaN or infinity each."""

    def make(g: torch.Generator) -> Operands:
        q = with_marks(normal(g, 2 * spec.num_heads, 128)).view(2, spec.num_heads, 128)
        return {"q": q.bfloat16(), "weights": normal(g, 2, spec.num_heads)}

    return make


def quotients(g: torch.Generator) -> Operands:
    """Return latents that a division by their scale puts half way between two codes, and their neighbours.

    The product with the scale's reciprocal lies on another side for every third of them.
    """
    scale = torch.tensor(0.0620625)
    half = (torch.arange(8) + 8.5) / 8 * 2.0 ** torch.arange(-2, 6)[:, None]
    halves = half.flatten() * scale
    below, above = halves.nextafter(torch.tensor(0.0)), halves.nextafter(torch.tensor(100.0))
    values = torch.stack([below, halves, above]).repeat(1, 9)
    slots = torch.arange(3) * 7
    cache = stale_pages(1, 64 * formats.latent(DIVIDED).row_bytes, stride_pad=32)
    return {
        "kv_c": values[:, :512],
        "k_pe": values[:, 512:],
        "slots": slots,
        "cache": cache,
        "k_scale": scale[None],
    }


def divided() -> Iterator[Case]:
    """A latent with one scale, which is no power of two."""
    case, spec = f"store_latent/edges/quotients/{DIVIDED}", StoreLatentSpec(latent=DIVIDED)
    yield Case(case, "store_latent", spec, LIMITS, quotients, since=INTERP, fault=20)


# --- every code, read -----------------------------------------------------------------------------------


def every_index_code(spec: IndexerSpec) -> Make:
    """Return keys that hold every element code, under ordinary scales and under those of the format's ends.

    A query element of 1 stands alone in each head, so that a score is one decoded element.
    """

    def make(g: torch.Generator) -> Operands:
        fmt = formats.index(spec.index)
        cache = stale_pages(2, fmt.page_bytes)
        fmt.write(cache, torch.arange(128), normal(g, 128, 128))
        _set_codes(cache, fmt.element == "e2m1", fmt.page * fmt.element_bytes)
        q = torch.zeros(2, spec.num_heads, 128)
        q[0].fill_diagonal_(1.0)
        q[1, :, 64 : 64 + spec.num_heads].fill_diagonal_(1.0)
        codes, scale = fmt.encode_query(q.bfloat16())
        empty = torch.empty(2, spec.num_heads, 0, dtype=torch.uint8)
        return {
            "q": codes,
            "q_scale": scale if fmt.element == "e2m1" else empty,
            "weights": normal(g, 2, spec.num_heads).abs() + 0.5,
            "cache": cache,
            "block_table": ints([1, 0]).view(1, 2),
            "row_req": ints([0, 0]),
            "row_len": ints([128, 127]),
        }

    return make


def _set_codes(cache: Tensor, packed: bool, border: int) -> None:
    """Put every finite element code into a page; NaN codes stay away, a score has no place for them."""
    code = torch.arange(256, dtype=torch.uint8).repeat(border // 256)
    if not packed:
        nan = (code & 0x7F) == 0x7F
        code = torch.where(nan | (code == 0x80), 0x38, code)
    cache[0, :border] = code


def every_latent_code(spec: SparseMLASpec) -> Make:
    """Return latents that hold every finite element code, of which each row selects one key."""

    def make(g: torch.Generator) -> Operands:
        fmt, scale = formats.latent(spec.latent), scale_for(spec.latent)
        cache = stale_pages(1, 64 * fmt.row_bytes)
        fmt.write(cache, 64, torch.arange(64), normal(g, 64, 512), normal(g, 64, 64), scale)
        rows = cache.view(64, fmt.row_bytes)
        code = torch.arange(256, dtype=torch.uint8)
        if spec.latent != "latent.nvfp4.352":
            code = torch.where(((code & 0x7F) == 0x7F) | (code == 0x80), 0x38, code)
        rows[:4, :256] = code
        given = {
            "q": normal(g, 4, spec.num_heads, 576, dtype=torch.bfloat16, spread=0.01),
            "cache": cache,
            "indices": ints([0, 1, 2, 3]).view(4, 1),
        }
        return given if scale is None else given | {"k_scale": scale}

    return make


def readers() -> Iterator[Case]:
    """Every format that has codes."""
    for name in formats.names("index"):
        indexer = IndexerSpec(index=name, num_heads=8)
        case, make = f"indexer_logits/edges/every-code/{name}", every_index_code(indexer)
        yield Case(case, "indexer_logits", indexer, LIMITS, make, since=INTERP, fault=22)
    for name in formats.names("latent"):
        if name != "latent.bf16":
            attention = SparseMLASpec(num_heads=2, latent=name, topk=4)
            case, make = f"sparse_mla/edges/every-code/{name}", every_latent_code(attention)
            yield Case(case, "sparse_mla", attention, LIMITS, make, since=INTERP, fault=22)


WHY = {
    "store_index_keys/edges/values": "Zeros, subnormals, the largest numbers, halves, tiny blocks.",
    "store_index_keys/edges/non-finite": "One NaN or infinity in a key: one code, or its block's scale.",
    "store_index_keys/edges/slots": "Slots of −1, −2 and behind the cache write nothing; slot 0 is ordinary.",
    "store_latent/edges/non-finite": "One NaN or infinity in a latent: one code, or its block's scale.",
    "store_latent/edges/slots": "Slots of −1, −2 and behind the cache write nothing; slot 0 is ordinary.",
    "store_latent/edges/quotients": "Quotients half way between two codes: a reciprocal puts them elsewhere.",
    "quantize_index_query/edges/non-finite": "One NaN or infinity in a head: its own code, and its own head's scale.",
    "quantize_index_query/edges/values": "Zeros, subnormals, the largest numbers, halves, tiny blocks.",
    "indexer_logits/edges/every-code": "Every finite element code of the format, read one by one.",
    "sparse_mla/edges/every-code": "Every finite element code of the format, each key read alone.",
}

add(index_stores(), WHY)
add(latent_stores(), WHY)
add(queries(), WHY)
add(divided(), WHY)
add(readers(), WHY)
