"""Largest values on either side of the point at which a power-of-two scale doubles, a few steps of float32 away."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kimi_hal import formats
from kimi_hal.formats import scales
from kimi_hal.ops.indexer import IndexQuerySpec, StoreIndexSpec
from kimi_hal.ops.sparse_mla import StoreLatentSpec
from kimi_hal_conformance.case import Case, Make, Operands, add
from kimi_hal_conformance.cases.ties import case, queries, stored_keys
from kimi_hal_conformance.draws import normal, stale_pages

#: Steps of float32 beside ``largest · 2^e``, in both directions.
STEPS = (0, 1, 2, 5, -1, -3)
EXPONENTS = (0, 4, -7)


def rows(largest: float, size: int, width: int) -> Tensor:
    """Return rows of blocks whose largest value stands at ``largest · 2^e`` or some steps beside it.

    The rest of a block is far smaller, in both signs: under half or twice the scale it has other codes.
    """
    tops = torch.tensor([largest * 2.0**e for e in EXPONENTS])
    near = torch.stack(
        [(tops.view(torch.int32) + step).view(torch.float32) for step in STEPS], dim=1
    ).flatten()
    number = near.numel() * size
    filled = torch.linspace(-0.8, 0.8, size).repeat(near.numel(), 1) * near[:, None]
    filled[:, 0] = near
    whole = filled.flatten().repeat(-(-width // number))
    lines = -(-whole.numel() // width)
    return whole[torch.arange(lines * width) % whole.numel()].view(lines, width)


def index_rows(name: str) -> Tensor:
    """Return float32 keys or queries ``[n, 128]`` of an index format."""
    fmt = formats.index(name)
    if fmt.element == "e2m1":
        return rows(6.0, scales.MX_GROUP, 128)
    return rows(scales.FP8_TARGET[fmt.element], 128, 128)


def stored_records(name: str) -> Make:
    """Return latents for slots apart."""

    def make(g: torch.Generator) -> Operands:
        kv_c = rows(448.0, 128, 512)
        cache = stale_pages(1, 64 * formats.latent(name).row_bytes, stride_pad=32)
        slots = torch.arange(kv_c.shape[0]) * 3
        return {"kv_c": kv_c, "k_pe": normal(g, kv_c.shape[0], 64), "slots": slots, "cache": cache}

    return make


def cases() -> Iterator[Case]:
    """Every index format, and the latents whose scales are made of their rows by powers of two."""
    for name in formats.names("index"):
        query, store, keys = (
            IndexQuerySpec(index=name, num_heads=2),
            StoreIndexSpec(index=name),
            index_rows(name),
        )
        asked = queries(query, keys[: keys.shape[0] // 2 * 2])
        yield case(f"quantize_index_query/edges/scale-steps/{name}", query, asked)
        yield case(f"store_index_keys/edges/scale-steps/{name}", store, stored_keys(name, keys, 3))
    record = "latent.flashmla.656"
    yield case(
        f"store_latent/edges/scale-steps/{record}", StoreLatentSpec(latent=record), stored_records(record)
    )


WHY = dict.fromkeys(
    (
        "quantize_index_query/edges/scale-steps",
        "store_index_keys/edges/scale-steps",
        "store_latent/edges/scale-steps",
    ),
    "A largest value one or a few steps of float32 beside the point at which its scale doubles.",
)

add(cases(), WHY)
