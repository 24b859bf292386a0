"""Index keys and queries whose blocks have e8m0 scales of their own, that of code 0 among them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kimi_hal import formats
from kimi_hal.ops.indexer import IndexerSpec
from kimi_hal.ops.spec import Limits
from kimi_hal_conformance.case import INTERP, QUICK, Case, Make, Operands, add
from kimi_hal_conformance.draws import integers, ints, normal, stale_pages

LIMITS = Limits(max_rows=16, max_reqs=4, max_context=256)
ROWS, KEYS = 2, 64
#: Codes of 2^−8 to 2^7: all of a key's blocks count.
ORDINARY = (119, 135)
#: Codes of 2^−127, a subnormal number, to 2^−125, and those of 2^100 to 2^102, which bring them back.
SMALLEST, LARGE = (0, 3), (227, 230)


def scored(spec: IndexerSpec, keys: tuple[int, int], queries: tuple[int, int], weight: float) -> Make:
    """Return one page of keys and two queries, each block under any scale of a range."""

    def make(g: torch.Generator) -> Operands:
        fmt = formats.index(spec.index)
        cache = stale_pages(2, fmt.page_bytes, stride_pad=32)
        fmt.write(cache, KEYS + torch.arange(KEYS), normal(g, KEYS, 128))
        each = 4 if fmt.scale == "e8m0" else 1  # ue8m0x4 has one scale a key, in four equal bytes
        rescale(cache[1], fmt, integers(g, *keys, KEYS, each, dtype=torch.uint8).expand(KEYS, 4))
        q, scale = fmt.encode_query(normal(g, ROWS, spec.num_heads, 128).bfloat16())
        if fmt.element == "e2m1":
            scale = integers(g, *queries, *scale.shape, dtype=torch.uint8)
        else:
            scale = torch.empty(ROWS, spec.num_heads, 0, dtype=torch.uint8)
        return {
            "q": q,
            "q_scale": scale,
            "weights": normal(g, ROWS, spec.num_heads).abs() * weight,
            "cache": cache,
            "block_table": ints([1]).view(1, 1),
            "row_req": ints([0, 0]),
            "row_len": ints([KEYS, KEYS - 1]),
        }

    return make


def with_nan(make: Make, spec: IndexerSpec) -> Make:
    """Return a scale of code 255, NaN, in one block, or all, of every eighth key, which has no other reason to be NaN.

    Its elements and the query's are positive: under an infinite scale its score would be infinite.
    """

    def wrapped(g: torch.Generator) -> Operands:
        operands, fmt = dict(make(g)), formats.index(spec.index)
        broken = torch.arange(0, KEYS, 8)
        fmt.write(operands["cache"], KEYS + broken, 1 + torch.rand(broken.numel(), 128, generator=g))
        operands["q"] = fmt.encode_query((1 + torch.rand(ROWS, spec.num_heads, 128, generator=g)).bfloat16())[
            0
        ]
        for token in broken.tolist():
            for block in (token // 8 % 4,) if fmt.scale == "e8m0" else range(4):
                operands["cache"][1, fmt.scale_offset(token, block)] = 255
        return operands

    return wrapped


def rescale(page: Tensor, fmt: formats.IndexFormat, codes: Tensor) -> None:
    """Write ``codes [64, 4]`` as the scale bytes of a page, wherever the format has them."""
    for token, own in enumerate(codes.tolist()):
        for block, code in enumerate(own):
            page[fmt.scale_offset(token, block)] = code


def cases() -> Iterator[Case]:
    """Every format with e8m0 scales: of any size, the smallest of keys, the smallest of queries."""
    for name in formats.names("index"):
        fmt = formats.index(name)
        spec = IndexerSpec(index=name, num_heads=3)
        if fmt.scale not in ("e8m0", "ue8m0x4"):
            continue
        yield case(f"own/{name}", spec, scored(spec, ORDINARY, ORDINARY, 1.0))
        yield case(f"nan/{name}", spec, with_nan(scored(spec, ORDINARY, ORDINARY, 1.0), spec))
        packed = fmt.element == "e2m1"
        yield case(f"key-0/{name}", spec, scored(spec, SMALLEST, LARGE, 2.0 ** (20 if packed else 100)))
        if packed:
            yield case(f"query-0/{name}", spec, scored(spec, LARGE, SMALLEST, 2.0**20))


def case(label: str, spec: IndexerSpec, make: Make) -> Case:
    """Return a case of ``indexer_logits``."""
    name = f"indexer_logits/edges/block-scales/{label}"
    since = INTERP if label.startswith(("own", "nan")) else QUICK
    return Case(name, "indexer_logits", spec, LIMITS, make, since=since, fault=20)


WHY = {
    "indexer_logits/edges/block-scales/own": "Blocks, or keys, under e8m0 scales that differ by 2^15.",
    "indexer_logits/edges/block-scales/nan": "Keys under e8m0 code 255, NaN and no infinity: NaN, all others numbers.",
    "indexer_logits/edges/block-scales/key-0": "Keys under e8m0 code 0, 2^−127, which large operands bring back.",
    "indexer_logits/edges/block-scales/query-0": "Queries under e8m0 code 0, 2^−127, which large keys bring back.",
}

add(cases(), WHY)
