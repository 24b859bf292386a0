"""The lightning indexer as traced programs: codes are multiplied, scales come after.

An FP8 or FP4 code is exact in bfloat16. XLA multiplies float32 matrices on a TPU as bfloat16 with float32 sums, unless
told otherwise: on such operands that loses nothing. Blocks with scales of their own are products of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from kimi_hal import formats
from kimi_hal.formats import index_bytes, minifloat
from kimi_hal.formats.index_keys import IndexFormat
from kimi_hal.ops.indexer import IndexerSpec, IndexerTopKSpec, IndexQuerySpec, StoreIndexSpec
from kimi_hal.parallel import ownership
from kimi_hal.reference.indexer import hadamard
from kimi_hal_tpu.xla import order, powers

#: Columns of a block table scored together: 4,096 keys of every row.
COLUMNS = 64
#: Kinds of scales that are e8m0 codes.
POWERS = ("e8m0", "ue8m0x4")

Given = Mapping[str, Tensor]


def quantize_index_query(spec: IndexQuerySpec, given: Given) -> tuple[Tensor, Tensor, Tensor]:
    """Return the quantised query, its block scales and the folded weights."""
    q = given["q"].float()
    encoded, scale = formats.index(spec.index).encode_query(hadamard(q) if spec.hadamard else q)
    folded = given["weights"].float() * spec.folded_scale
    if spec.dims()["S"]:
        return encoded, scale, folded
    return encoded, encoded[..., :0], folded * scale


def store_index_keys(spec: StoreIndexSpec, given: Given) -> tuple[Tensor]:
    """Return the cache with the keys of T tokens in their slots."""
    fmt, cache = formats.index(spec.index), given["cache"]
    pages, slots = cache.shape[0], given["slots"]
    elements, scale = fmt.pack(given["k"][: slots.shape[0]].float())
    there = (slots >= 0) & (slots < pages * fmt.page)
    where = order.last_writer(torch.where(there, slots, -1))
    page = torch.where(where >= 0, where // fmt.page, pages)  # XLA leaves out what is beyond the last page
    offset = where % fmt.page
    element_view, scale_view = index_bytes.regions(fmt, cache)
    run, place = offset // fmt.tile_tokens, offset % fmt.tile_tokens
    new_elements = put(element_view, (page, run, place), groups(elements, element_view.shape[4]))
    new_scales = put(scale_view, (page, run, place), groups(scale, fmt.scale_lanes).transpose(1, 2))
    return (torch.cat([new_elements.reshape(pages, -1), new_scales.reshape(pages, -1)], dim=1),)


def groups(x: Tensor, size: int) -> Tensor:
    """View the last dimension as groups."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def put(view: Tensor, where: tuple[Tensor, Tensor, Tensor], rows: Tensor) -> Tensor:
    """Return a region ``[pages, runs, chunks, tokens, bytes]`` with ``rows [n, chunks, bytes]`` at their tokens."""
    page, run, token = where
    tokens_first = view.permute(0, 1, 3, 2, 4)
    return tokens_first.index_put((page, run, token), rows).permute(0, 1, 3, 2, 4)


def indexer_logits(spec: IndexerSpec, given: Given) -> tuple[Tensor]:
    """Return the scores ``[T, page · columns]``; columns behind a row's keys hold anything."""
    scores, _ = scored(spec, given)
    return (scores.to(getattr(torch, spec.score)),)


def all_scores(spec: IndexerTopKSpec, given: Given) -> tuple[Tensor]:
    """Return the scores that ``indexer_topk`` selects from."""
    return indexer_logits(spec, given)


def indexer_topk(spec: IndexerTopKSpec, given: Given) -> tuple[Tensor, Tensor]:
    """Return the selected positions, or slots, and their scores."""
    scores, count = scored(spec, given)
    scores = order.rounded(scores, spec.score)
    first = torch.zeros_like(count)
    index = order.select(scores, first, count, spec.topk)
    best = order.chosen(scores, index, first)
    if spec.emit == "slot":
        index, best = as_slots(spec, given, index, best)
    return index, best if spec.return_selected else best[:, :0]


def scored(spec: IndexerSpec, given: Given) -> tuple[Tensor, Tensor]:
    """Return float32 scores, −inf where there is no page, and each row's number of keys."""
    fmt, table = formats.index(spec.index), given["block_table"]
    request = given["row_req"].long()
    there = (request >= 0) & (request < given["size_R"])
    line = table[request.clamp(0, table.shape[0] - 1)].long()
    length = ownership.local_length(given["row_len"].long(), ownership.of_keys(spec.dcp))
    count = torch.where(there, torch.minimum(length, given["size_columns"].long() * spec.page), 0)
    query = codes_of(fmt, given["q"].view(torch.uint8)), given["q_scale"]
    weights = given["weights"].float()
    pieces = [piece(fmt, given["cache"], part, query, weights) for part in line.split(COLUMNS, dim=1)]
    return torch.cat(pieces, dim=1), count


def codes_of(fmt: IndexFormat, data: Tensor) -> Tensor:
    """Return the values of element bytes in float32, without their scales."""
    if fmt.element == "e2m1":
        return minifloat.decode_nibbles(data)
    return minifloat.decode(data, minifloat.ELEMENTS[fmt.element])


def piece(
    fmt: IndexFormat, cache: Tensor, line: Tensor, query: tuple[Tensor, Tensor], weights: Tensor
) -> Tensor:
    """Score some columns of every row's pages: ``line [T, n]`` -> ``[T, n · page]``."""
    rows, columns = line.shape
    named = (line >= 0) & (line < cache.shape[0])
    pages = cache[line.clamp(0, cache.shape[0] - 1).reshape(-1)]
    elements, scale = index_bytes.split(fmt, pages)
    keys = codes_of(fmt, elements).reshape(rows, columns * fmt.page, fmt.head_dim)
    scale = scale.reshape(rows, columns * fmt.page, -1)
    dots = products(fmt, query, keys, scale)
    terms = torch.where(torch.isnan(dots), torch.nan, dots.clamp(min=0.0)) * weights[..., None]
    total = added(terms)
    if fmt.scale not in POWERS:
        total = total * index_bytes.scale_values(fmt, scale)[..., 0]
    missing = ~named[..., None].expand(rows, columns, fmt.page).reshape(rows, columns * fmt.page)
    return torch.where(missing, -torch.inf, total)


def products(fmt: IndexFormat, query: tuple[Tensor, Tensor], keys: Tensor, scale: Tensor) -> Tensor:
    """Return the dots ``[T, H, n]`` of queries and keys, under the e8m0 scales that they have; others come later.

    Args:
        fmt: of the keys.
        query: codes ``[T, H, 128]`` and, of FP4, e8m0 scales ``[T, H, 4]``.
        keys: codes ``[T, n, 128]``.
        scale: bytes ``[T, n, 4]``.
    """
    codes, query_scale = query
    if fmt.scale not in POWERS:
        return torch.matmul(codes, keys.transpose(1, 2))
    found = []
    blocks = 4 if fmt.scale == "e8m0" else 1  # the four bytes of ue8m0x4 are one scale
    for b, (q, k) in enumerate(zip(codes.chunk(blocks, 2), keys.chunk(blocks, 2), strict=True)):
        factors = [half[:, None] for half in powers.halves(scale[..., b])]
        if fmt.element == "e2m1":
            factors += [half[..., None] for half in powers.halves(query_scale[..., b])]
        # A half of the key's, a half of the query's, and again: no step is further from 1 than the operands.
        found.append(powers.scaled(torch.matmul(q, k.transpose(1, 2)), *factors[::2], *factors[1::2]))
    return functools.reduce(torch.add, found)


def added(terms: Tensor) -> Tensor:
    """Add the heads ``[T, H, n]`` as a fixed tree, so that a sum depends on its row alone."""
    while terms.shape[1] > 1:
        half = (terms.shape[1] + 1) // 2
        rest = terms.shape[1] - half
        low = terms[:, :rest] + terms[:, half:]
        terms = torch.cat([low, terms[:, rest:half]], dim=1) if half > rest else low
    return terms[:, 0]


def as_slots(spec: IndexerTopKSpec, given: Given, index: Tensor, best: Tensor) -> tuple[Tensor, Tensor]:
    """Turn positions into slots; those without a page drop out and the others close up."""
    table = given["block_table"]
    line = table[given["row_req"].long().clamp(0, table.shape[0] - 1)].long()
    page = line.gather(1, index.clamp(min=0) // spec.page)
    live = (index >= 0) & (page >= 0) & (page < given["cache"].shape[0])
    slots = torch.where(live, page * spec.page + index % spec.page, -1)
    column = torch.arange(index.shape[1], device=index.device)
    order_ = torch.where(live, column, column + index.shape[1]).argsort(dim=1)
    return slots.gather(1, order_), torch.where(live, best, -torch.inf).gather(1, order_)
