"""The lightning indexer in plain torch: the meaning of ``ops/indexer.py``, in float32 or float64.

A dot product of FP8 or FP4 numbers is summed in float64, where such sums are exact, and rounded once; heads
are added in a fixed order. So a score depends on nothing but its row and its key: not on the batch, on how
rows are cut into pieces, or on which rank holds the key.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_hal import formats
from kimi_hal.ops.indexer import IndexerSpec, IndexerTopKSpec, IndexQuerySpec, StoreIndexSpec
from kimi_hal.parallel import ownership
from kimi_hal.reference import selection

#: Keys decoded at once: 4 MB of float64.
KEYS = 1 << 12

#: Scores kept at once, at most, but no less than one row: 128 MB in float32.
SCORES = 1 << 25


def quantize_index_query(
    spec: IndexQuerySpec, q: Tensor, weights: Tensor, *, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise q and fold its scale into the weights, which are computed in ``dtype``."""
    turned = hadamard(q.to(dtype)) if spec.hadamard else q
    encoded, scale = formats.index(spec.index).encode_query(turned.float())
    folded = weights.to(dtype) * spec.folded_scale
    if spec.dims()["S"]:
        return encoded, scale, folded
    return encoded, encoded.new_empty((*weights.shape, 0), dtype=torch.uint8), folded * scale.to(dtype)


def hadamard(x: Tensor) -> Tensor:
    """Turn the last dimension, a power of two, by the orthonormal Hadamard matrix in Sylvester's order."""
    size = x.shape[-1]
    half = 1
    while half < size:
        pairs = x.reshape(*x.shape[:-1], size // (2 * half), 2, half)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((low + high, low - high), dim=-2).reshape(x.shape)
        half *= 2
    return x * float(size**-0.5)


def store_index_keys(
    spec: StoreIndexSpec, k: Tensor, slots: Tensor, cache: Tensor, *, dtype: torch.dtype = torch.float32
) -> None:
    """Write the keys of T tokens into their slots; encoding has one reference, so ``dtype`` has no effect."""
    fmt = formats.index(spec.index)
    live = (slots >= 0) & (slots < cache.shape[0] * fmt.page)
    fmt.write(cache, slots[live], k[: slots.shape[0]][live].float())


def indexer_logits(
    spec: IndexerSpec,
    q: Tensor,
    q_scale: Tensor,
    weights: Tensor,
    cache: Tensor,
    block_table: Tensor,
    row_req: Tensor,
    row_len: Tensor,
    *,
    dtype: torch.dtype = torch.float32,
    out: Tensor | None = None,
) -> Tensor:
    """Score every row against its keys.

    ``out [T, L]`` is written, each score rounded once; columns behind a row's keys keep their bytes. Without
    it the result is in ``dtype``, as wide as the block table, −inf behind a row's keys.
    """
    if out is None:
        out = q.new_full((q.shape[0], block_table.shape[1] * spec.page), -torch.inf, dtype=dtype)
    for part in parts(spec, block_table, row_req, row_len, out.shape[1]):
        scores = part_scores(spec, part, q, q_scale, weights, cache, dtype)
        write(part, selection.as_score(scores, out.dtype) if out.dtype == torch.bfloat16 else scores, out)
    return out


def indexer_topk(
    spec: IndexerTopKSpec,
    q: Tensor,
    q_scale: Tensor,
    weights: Tensor,
    cache: Tensor,
    block_table: Tensor,
    row_req: Tensor,
    row_len: Tensor,
    *,
    dtype: torch.dtype = torch.float32,
    all_scores_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Score and select, a few rows at a time; selection is over the scores rounded to ``Spec.score``.

    Scores of float64 are rounded to float32 first: bfloat16 is the float32 sum rounded. ``all_scores_out
    [T, width]`` receives them all; its columns behind a row's keys keep their bytes.
    """
    index = torch.full((q.shape[0], spec.topk), -1, dtype=torch.int64, device=q.device)
    chosen = torch.full_like(index, -torch.inf, dtype=dtype)
    for part in parts(spec, block_table, row_req, row_len):
        scores = part_scores(spec, part, q, q_scale, weights, cache, dtype)
        scores = selection.as_score(scores, getattr(torch, spec.score))
        if all_scores_out is not None:
            write(part, scores, all_scores_out)
        picked = selection.select_positions(scores, index.new_tensor(part.counts), spec.topk)
        best = selection.scores_at(scores, picked)
        if spec.emit == "slot":
            picked, best = as_slots(spec, part, picked, best, cache)
        index[part.rows], chosen[part.rows] = picked, best.to(dtype)
    return index.int(), chosen if spec.return_selected else chosen[:, :0]


@dataclass(frozen=True)
class Part:
    """Rows of one request that are scored together, each with its number of keys, and the request's pages."""

    rows: list[int]
    counts: list[int]
    pages: Tensor


def parts(
    spec: IndexerSpec, block_table: Tensor, row_req: Tensor, row_len: Tensor, width: int | None = None
) -> Iterator[Part]:
    """Yield the rows that have keys, by request; a length beyond the table or ``width`` is clamped."""
    room = block_table.shape[1] * spec.page
    keys = ownership.local_length(row_len.long(), ownership.of_keys(spec.dcp))
    counts = keys.clamp(max=room if width is None else min(room, width)).tolist()
    requests: dict[int, list[int]] = {}
    for row, request in enumerate(row_req.tolist()):
        if counts[row] > 0 and 0 <= request < block_table.shape[0]:
            requests.setdefault(request, []).append(row)
    for request, rows in requests.items():
        step = max(1, SCORES // max(counts[row] for row in rows))
        for start in range(0, len(rows), step):
            some = rows[start : start + step]
            yield Part(some, [counts[row] for row in some], block_table[request].long())


def part_scores(
    spec: IndexerSpec,
    part: Part,
    q: Tensor,
    q_scale: Tensor,
    weights: Tensor,
    cache: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Return the scores ``[rows, most keys]`` of a part in ``dtype``, −inf behind a row's keys."""
    fmt = formats.index(spec.index)
    # Rows are picked as bytes: torch cannot index FP8 on every device.
    query = fmt.decode_query(q.view(torch.uint8)[part.rows], q_scale[part.rows], torch.float64)
    weight = weights[part.rows].to(dtype)
    scores = weight.new_full((len(part.rows), max(part.counts)), -torch.inf)
    for start in range(0, scores.shape[1], KEYS):
        keys, missing = read_keys(fmt, part.pages, start, min(start + KEYS, scores.shape[1]), cache)
        for i, count in enumerate(part.counts):
            piece = scores[i, start : min(start + KEYS, count)]
            # Whole pages, however many keys count: the shape, and with it the sums, are the row's own.
            whole = -(-piece.shape[0] // fmt.page) * fmt.page
            piece.copy_(weighted(query[i] @ keys[:whole].T, weight[i])[: piece.shape[0]])
            piece.masked_fill_(missing[: piece.shape[0]], -torch.inf)
    return scores


def read_keys(
    fmt: formats.IndexFormat, pages: Tensor, start: int, end: int, cache: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the keys of local positions ``start`` to ``end``, and which of them have no page.

    Keys are float64 ``[whole pages, 128]``, zero where there is none; nothing else of a page is read.
    """
    position = torch.arange(start, end, device=cache.device)
    page = pages[position // fmt.page]
    missing = (page < 0) | (page >= cache.shape[0])
    slots = page * fmt.page + position % fmt.page
    rows = -(-(end - start) // fmt.page) * fmt.page
    keys = torch.zeros((rows, fmt.head_dim), dtype=torch.float64, device=cache.device)
    keys[: end - start][~missing] = fmt.read(cache, slots[~missing], torch.float64)
    return keys, missing


def weighted(dots: Tensor, weight: Tensor) -> Tensor:
    """Return ``Σ_h weight[h] · relu(dots[h])`` of ``[H, n]`` in the weights' dtype, added as a fixed tree."""
    terms = dots.relu().to(weight.dtype) * weight[:, None]
    while terms.shape[0] > 1:
        half = (terms.shape[0] + 1) // 2
        terms[: terms.shape[0] - half] += terms[half:]
        terms = terms[:half]
    return terms[0]


def write(part: Part, scores: Tensor, out: Tensor) -> None:
    """Write each row's own scores and nothing behind them."""
    for row, count, line in zip(part.rows, part.counts, scores, strict=True):
        kept = min(count, out.shape[1])
        out[row, :kept] = line[:kept]


def as_slots(
    spec: IndexerTopKSpec, part: Part, index: Tensor, scores: Tensor, cache: Tensor
) -> tuple[Tensor, Tensor]:
    """Turn selected positions into physical slots; those without a page drop out and the others close up."""
    page = part.pages[index.clamp(min=0) // spec.page]
    live = (index >= 0) & (page >= 0) & (page < cache.shape[0])
    slots = torch.where(live, page * spec.page + index % spec.page, -1)
    order = (~live).int().argsort(dim=1, stable=True)
    return slots.gather(1, order), scores.masked_fill(~live, -torch.inf).gather(1, order)
