"""Cases of the sparse_mla family: latent store, attention over selected rows, merging of states."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from kimi_hal import formats
from kimi_hal.ops.sparse_mla import MergeSpec, SparseMLASpec, StoreLatentSpec
from kimi_hal.ops.spec import DCP, Limits
from kimi_hal_conformance.case import INTERP, QUICK, STANDARD, Case, Make, Operands, add
from kimi_hal_conformance.draws import (
    block_tables,
    ints,
    latent_cache,
    normal,
    owned_slots,
    stale_pages,
    strided,
)

SMALL = Limits(max_rows=64, max_reqs=16, max_context=4096)
SCALE = torch.tensor([0.03125])
HEADS = {"tp1": 96, "tp2": 48, "tp4": 24, "tp8": 12, "tp16": 6, "tp32": 3}


def scale_for(name: str) -> Tensor | None:
    """Return a dequantisation factor for a format that has one."""
    return SCALE.clone() if formats.latent(name).needs_scale else None


def store_operands(name: str, page: int, rows: int) -> Make:
    """Return latents for shuffled slots, some of them padding, with more rows than slots."""

    def make(g: torch.Generator) -> Operands:
        slots = torch.randperm(4 * page, generator=g)[:rows]
        slots[1::3] = -1
        operands = {
            "kv_c": strided(normal(g, rows + 2, 512, dtype=torch.bfloat16)),
            "k_pe": normal(g, rows + 2, 64, dtype=torch.bfloat16, spread=3.0),
            "slots": slots,
            "cache": stale_pages(4, page * formats.latent(name).row_bytes, stride_pad=32),
        }
        return operands if (scale := scale_for(name)) is None else operands | {"k_scale": scale}

    return make


def store_cases() -> Iterator[Case]:
    """Every latent format, page lengths 64 and a whole block, no rows and some."""
    for name in formats.names("latent"):
        for page, rows in ((64, 0), (64, 33), (16, 1)):
            yield Case(
                id=f"store_latent/{name}/page{page}/rows{rows}",
                operator="store_latent",
                spec=StoreLatentSpec(latent=name, page=page),
                limits=SMALL,
                make=store_operands(name, page, rows),
                since=INTERP,
            )


def attention_operands(spec: SparseMLASpec, rows: int, keys: int, context: int, spread: float = 1.0) -> Make:
    """Return queries over shuffled pages. Rows hold interior −1, duplicates, an index out of range, and nothing."""

    def make(g: torch.Generator) -> Operands:
        requests = max(1, min(rows, 3))
        lengths = [max(1, context - 7 * i) for i in range(requests)]
        pages = sum(-(-n // spec.page) for n in lengths) + 3
        columns = -(-context // spec.page) + 1
        table = block_tables(g, lengths, spec.page, pages, columns)
        live = owned_slots(table, lengths, spec.page)
        scale = scale_for(spec.latent)
        owner = torch.arange(rows, dtype=torch.int32) % requests
        positions = (
            torch.stack([_selection(g, lengths[int(r)], keys) for r in owner])
            if rows
            else ints([]).view(0, keys)
        )
        operands: dict[str, object] = {
            "q": strided(normal(g, rows, spec.num_heads, 576, dtype=torch.bfloat16, spread=spread)),
            "cache": latent_cache(g, spec.latent, spec.page, pages, live, scale),
        }
        if spec.index_space == "slot":
            page_of = table[
                owner.long()[:, None].expand(rows, keys), positions.clamp(0, context - 1).long() // spec.page
            ]
            slots = page_of.long() * spec.page + positions.long() % spec.page
            indices = torch.where(positions < 0, -1, slots).int()
        else:
            indices = positions
        operands["indices"] = _hostile(indices, pages * spec.page)
        if scale is not None:
            operands["k_scale"] = scale
        if spec.has_index_len:
            operands["index_len"] = ints([(keys * (i + 1)) // max(rows, 1) for i in range(rows)])
        if spec.index_space != "slot":
            operands |= {"block_table": table, "row_req": owner}
        return operands

    return make


def _selection(g: torch.Generator, length: int, keys: int) -> Tensor:
    """Return up to ``keys`` distinct positions of a request, −1 after them."""
    chosen = torch.randperm(length, generator=g)[:keys].int()
    return torch.cat([chosen, ints([-1] * (keys - chosen.numel()))])


def _hostile(indices: Tensor, beyond: int) -> Tensor:
    """Make row 1 empty, put −1 first, a duplicate and indices out of range elsewhere."""
    rows, keys = indices.shape
    if rows > 1:
        indices[1] = -1
    if rows > 2 and keys > 4:
        indices[2, 0] = -1
        indices[2, 3] = indices[2, 2]
        indices[2, 1] = 2**31 - 1
        indices[2, 4] = -(2**31)
    if rows > 3 and keys:
        indices[3, -1] = beyond
    return indices


def attention_cases() -> Iterator[Case]:
    """Head counts of every TP size, formats, index spaces, and shapes off every tile."""
    fp8 = "latent.fp8.e4m3fn.tensor"
    for name in formats.names("latent"):
        spec = SparseMLASpec(num_heads=12, latent=name, topk=128)
        yield attention_case(f"{name}/tp8", spec, rows=5, keys=128, context=300, since=INTERP)
    for label, heads in HEADS.items():
        spec = SparseMLASpec(num_heads=heads, latent=fp8)
        yield attention_case(
            f"{label}/top2048",
            spec,
            rows=2,
            keys=2048,
            context=2500,
            since=QUICK if heads == 12 else STANDARD,
        )
    for heads in (1, 5, 17, 33, 128):
        spec = SparseMLASpec(num_heads=heads, latent=fp8, topk=64)
        yield attention_case(
            f"heads{heads}",
            spec,
            rows=4,
            keys=63,
            context=90,
            since=INTERP if heads < 32 else QUICK,
            fault=15,
        )
    for space in ("position", "local"):
        spec = SparseMLASpec(num_heads=12, latent=fp8, topk=96, index_space=space, has_index_len=True)
        yield attention_case(f"{space}/index-len", spec, rows=6, keys=96, context=200, since=INTERP)
    for rows, keys, context in ((0, 64, 80), (1, 1, 1), (1, 65, 64), (7, 2, 3)):
        spec = SparseMLASpec(num_heads=12, latent=fp8, topk=65)
        label = f"rows{rows}/keys{keys}"
        yield attention_case(label, spec, rows=rows, keys=keys, context=context, since=INTERP)
    spec = SparseMLASpec(num_heads=12, latent=fp8, topk=128, out_dtype="float32", return_lse=False, page=16)
    yield attention_case("float32-out/no-lse/page16", spec, rows=4, keys=128, context=150)
    spec = SparseMLASpec(num_heads=12, latent=fp8, topk=128)
    yield attention_case("spread-logits", spec, rows=5, keys=128, context=300, spread=20.0, since=INTERP)
    spec = SparseMLASpec(
        num_heads=24, latent=fp8, topk=128, index_space="position", dcp=DCP(world=2, rank=1, interleave=4)
    )
    yield attention_case("position/dcp2-rank1-interleave4", spec, rows=4, keys=128, context=150)


def attention_case(
    label: str,
    spec: SparseMLASpec,
    *,
    rows: int,
    keys: int,
    context: int,
    spread: float = 1.0,
    since: str = QUICK,
    fault: int = 0,
) -> Case:
    """Return one attention case."""
    return Case(
        id=f"sparse_mla/{label}",
        operator="sparse_mla",
        spec=spec,
        limits=SMALL,
        make=attention_operands(spec, rows, keys, context, spread),
        since=since,
        fault=fault,
    )


def merge_operands(spec: MergeSpec, rows: int) -> Make:
    """Return parts of which some are empty by −inf, +inf or NaN, with NaN outputs; row 1 is empty in all."""

    def make(g: torch.Generator) -> Operands:
        dtype = torch.bfloat16 if spec.dtype == "bfloat16" else torch.float32
        outs = normal(g, spec.parts, rows, spec.num_heads, spec.dim, dtype=dtype)
        lses = normal(g, spec.parts, rows, spec.num_heads, spread=4.0)
        if rows > 1:
            lses[:, 1] = -math.inf
            outs[:, 1] = math.nan
        for part, empty in zip(range(spec.parts), (math.inf, math.nan, -math.inf), strict=False):
            if rows > 2 + part and spec.parts > 1:
                lses[part, 2 + part] = empty
                outs[part, 2 + part] = math.nan
        if rows > 5:
            lses[:, 5] -= 20_000.0
        return {"outs": outs, "lses": lses}

    return make


def merge_cases() -> Iterator[Case]:
    """Part counts, dtypes, head counts, and a head size off every tile."""
    # the first shape is one on whose sums the order of parts tells: relations are tried on the first cases
    shapes = ((3, 5, 130), (1, 12, 512), (2, 12, 512), (8, 96, 512), (8, 12, 512), (64, 2, 64))
    for parts, heads, dim in shapes:
        for dtype in ("bfloat16", "float32"):
            for rows in (0, 1, 7):
                spec = MergeSpec(parts=parts, num_heads=heads, dim=dim, dtype=dtype, return_lse=parts != 2)
                yield Case(
                    id=f"merge_attn_states/parts{parts}/heads{heads}/dim{dim}/{dtype}/rows{rows}",
                    operator="merge_attn_states",
                    spec=spec,
                    limits=SMALL,
                    make=merge_operands(spec, rows),
                    since=INTERP if parts < 8 else STANDARD if parts * heads > 100 else QUICK,
                    fault=2 if rows > 1 else 0,
                )


WHY = {
    "store_latent/": "The bytes of each format at shuffled slots, some of them padding, more rows than slots.",
    "sparse_mla/": "Attention over interior −1, duplicates, indices out of range, an empty row, stale NaN around.",
    "sparse_mla/tp": "The model's heads at a tensor-parallel size and its 2,048 keys.",
    "sparse_mla/heads": "Head counts that no list of a kernel has.",
    "sparse_mla/spread-logits": "Logits so far apart that few keys have all the mass: rounding of weights shows.",
    "merge_attn_states/": "Parts that are empty by −inf, +inf or NaN, with NaN outputs; one row is empty in all.",
}

add(store_cases(), WHY)
add(attention_cases(), WHY)
add(merge_cases(), WHY)
