"""Values that stand exactly half way between two codes once they are divided by their scale, in every format.

Each block begins with its format's largest value times a power of two, so that its scale is that power; behind it are
the half way points of the element below it, in both signs. Of every two of them one goes up to even, the other down.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kimi_hal import formats
from kimi_hal.formats import minifloat, scales
from kimi_hal.formats.minifloat import MiniFloat
from kimi_hal.ops.indexer import IndexQuerySpec, StoreIndexSpec
from kimi_hal.ops.sparse_mla import StoreLatentSpec
from kimi_hal.ops.spec import Limits
from kimi_hal_conformance.case import INTERP, Case, Make, Operands, add
from kimi_hal_conformance.draws import normal, stale_pages

LIMITS = Limits(max_rows=64, max_reqs=16, max_context=1024)
#: Powers of two by which the blocks of a format with scales of its own differ.
EXPONENTS = (0, 3, -5)
#: The factor of a cache that has one.
SCALE = 0.25
ROWS = 8


def points(kind: MiniFloat, largest: float) -> Tensor:
    """Return every point half way between two magnitudes up to ``largest``, in both signs."""
    codes = torch.arange(1 << (kind.width - 1), dtype=torch.uint8)
    values = minifloat.decode(codes, kind)
    values = values[values <= largest]
    found = (values[1:] + values[:-1]) / 2
    return torch.stack((found, -found), dim=1).flatten()


def blocks(kind: MiniFloat, largest: float, size: int, width: int) -> Tensor:
    """Return rows of blocks that hold all points, at every exponent, the largest value first in each."""
    found = points(kind, largest)
    needed = -(-found.numel() // (size - 1))
    rows = -(-needed * size // width)
    number = rows * width // size
    filled = found[torch.arange(number * (size - 1)) % found.numel()].view(number, size - 1)
    whole = torch.cat((torch.full((number, 1), largest), filled), dim=1).view(rows, width)
    return torch.cat([whole * 2.0**exponent for exponent in EXPONENTS])


def plain(values: Tensor, width: int) -> Tensor:
    """Return rows of values that have no scale of their own, as many as hold all of them."""
    rows = -(-values.numel() // width)
    return values[torch.arange(rows * width) % values.numel()].view(rows, width)


def halves() -> Tensor:
    """Return float32 numbers half way between two bfloat16 numbers, in both signs."""
    step = torch.arange(256)
    found = torch.ldexp(1.0 + 2.0**-8 + (step % 128) * 2.0**-7, step % 5 - 2)
    return torch.where(step < 128, found, -found)


def cycled(rows: Tensor, number: int) -> Tensor:
    """Return so many rows, from the first again where they are fewer."""
    return rows[torch.arange(number) % rows.shape[0]]


def index_rows(name: str) -> Tensor:
    """Return keys or queries ``[n, 128]`` of an index format."""
    fmt = formats.index(name)
    if fmt.element == "e2m1":
        return blocks(minifloat.E2M1, 6.0, scales.MX_GROUP, 128)
    return blocks(minifloat.ELEMENTS[fmt.element], scales.FP8_TARGET[fmt.element], 128, 128)


def latent_rows(name: str) -> tuple[Tensor, Tensor]:
    """Return latents ``[n, 512]`` and their key parts ``[n, 64]``."""
    if name == "latent.nvfp4.352":
        key_part = plain(points(minifloat.E4M3FN, 448.0), 64)
        return blocks(minifloat.E2M1, 6.0, 16, 512), key_part
    if name == "latent.flashmla.656":
        return blocks(minifloat.E4M3FN, 448.0, 128, 512), plain(halves(), 64)
    if name == "latent.bf16":
        return plain(halves(), 512), plain(halves(), 64)
    kind = minifloat.ELEMENTS[name.split(".")[2]]
    found = points(kind, kind.largest) * SCALE
    return plain(found, 512), plain(found, 64)


def stored_keys(name: str, keys: Tensor, apart: int) -> Make:
    """Return keys for slots so far apart."""

    def make(g: torch.Generator) -> Operands:
        cache = stale_pages(1, formats.index(name).page_bytes, stride_pad=32)
        return {"k": keys.clone(), "slots": torch.arange(keys.shape[0]) * apart, "cache": cache}

    return make


def queries(spec: IndexQuerySpec, rows: Tensor) -> Make:
    """Return queries, each head of which is a row."""

    def make(g: torch.Generator) -> Operands:
        q = rows.view(-1, spec.num_heads, 128).clone()
        return {"q": q, "weights": normal(g, q.shape[0], spec.num_heads)}

    return make


def stored_latents(name: str) -> Make:
    """Return latents for slots apart; in float32 where the format has parts in bfloat16."""
    wide = name in ("latent.bf16", "latent.flashmla.656")

    def make(g: torch.Generator) -> Operands:
        fmt, dtype = formats.latent(name), torch.float32 if wide else torch.bfloat16
        kv_c, k_pe = (cycled(part, ROWS).to(dtype) for part in latent_rows(name))
        given = {"kv_c": kv_c, "k_pe": k_pe, "slots": torch.arange(ROWS) * 7}
        given["cache"] = stale_pages(1, 64 * fmt.row_bytes, stride_pad=32)
        return given | ({"k_scale": torch.tensor([SCALE])} if fmt.needs_scale else {})

    return make


def cases() -> Iterator[Case]:
    """Every format of every writer."""
    for name in formats.names("index"):
        query, store = IndexQuerySpec(index=name, num_heads=4), StoreIndexSpec(index=name)
        rows = index_rows(name).bfloat16()
        asked = queries(query, cycled(rows, 2 * query.num_heads))
        yield case(f"quantize_index_query/edges/ties/{name}", query, asked)
        yield case(f"store_index_keys/edges/ties/{name}", store, stored_keys(name, rows, 7))
    for name in formats.names("latent"):
        yield case(f"store_latent/edges/ties/{name}", StoreLatentSpec(latent=name), stored_latents(name))


def case(name: str, spec: IndexQuerySpec | StoreIndexSpec | StoreLatentSpec, make: Make) -> Case:
    """Return a case of the operator in its name."""
    return Case(name, name.partition("/")[0], spec, LIMITS, make, since=INTERP, fault=20)


WHY = dict.fromkeys(
    (
        "quantize_index_query/edges/ties",
        "store_index_keys/edges/ties",
        "store_latent/edges/ties",
    ),
    "Exactly half way between two codes after the division by the scale: to even, up as often as down.",
)

add(cases(), WHY)
