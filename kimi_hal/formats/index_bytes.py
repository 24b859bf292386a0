"""The bytes of index-key pages, in torch: what the methods of ``IndexFormat`` do."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_hal.formats import minifloat, scales, slots
from kimi_hal.formats.index_keys import SCALE_BYTES, IndexFormat

FLOAT32 = torch.float32


def pack(fmt: IndexFormat, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise ``keys [n, 128]`` into element bytes and scale bytes."""
    if fmt.scale == "e8m0":
        return scales.mx_encode(keys)
    largest = scales.amax(keys)
    if fmt.scale == "f32":
        scale = scales.fp8_raw(largest, fmt.element)
    else:
        scale = scales.exp2(scales.fp8_exponent(largest, fmt.element))
    codes = minifloat.encode(keys.float() / scale[:, None], minifloat.ELEMENTS[fmt.element])
    return codes, scale_bytes(fmt, scale)


def scale_bytes(fmt: IndexFormat, scale: Tensor) -> Tensor:
    """Return the four bytes ``[n, 4]`` of one float32 scale a key, ``[n]``."""
    if fmt.scale == "ue8m0x4":
        return (scale.view(torch.int32) >> 23).to(torch.uint8)[:, None].repeat(1, SCALE_BYTES)
    return scale.contiguous()[:, None].view(torch.uint8)


def unpack(fmt: IndexFormat, elements: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply elements by their scales in ``dtype``."""
    if fmt.scale == "e8m0":
        return scales.mx_decode(elements, scale, dtype)
    values = minifloat.decode(elements, minifloat.ELEMENTS[fmt.element], dtype)
    factor = scale_values(fmt, scale).to(dtype)
    return (scales.groups(values, fmt.head_dim // factor.shape[-1]) * factor[..., None]).flatten(-2)


def scale_values(fmt: IndexFormat, scale: Tensor) -> Tensor:
    """Return scale bytes ``[n, 4]`` as float32: ``[n, 1]`` of a float32 scale, ``[n, 4]`` of e8m0 bytes."""
    if fmt.scale in ("ue8m0x4", "e8m0"):
        return minifloat.decode_e8m0(scale)
    return scale.clone(memory_format=torch.contiguous_format).view(torch.float32)


def regions(fmt: IndexFormat, cache: Tensor) -> tuple[Tensor, Tensor]:
    """View a cache as its elements and its scales.

    Returns:
        ``[pages, runs, chunks, tokens of a run, bytes of a chunk]`` and
        ``[pages, runs, lanes, tokens of a run, bytes of a lane]``.
    """
    slots.check_cache(fmt.name, cache, fmt.page_bytes)
    pages, runs, tokens = cache.shape[0], fmt.page // fmt.tile_tokens, fmt.tile_tokens
    chunk, lanes = fmt.tile_bytes or fmt.element_bytes, fmt.scale_lanes
    border = fmt.page * fmt.element_bytes
    elements = cache[:, :border].view(pages, runs, fmt.element_bytes // chunk, tokens, chunk)
    scale = cache[:, border:].view(pages, runs, lanes, tokens, SCALE_BYTES // lanes)
    return elements, scale


def place(fmt: IndexFormat, where: Tensor) -> tuple[Tensor, Tensor, slice, Tensor]:
    """Return the index of slots into a view of ``regions``; what it selects is ``[n, chunks, bytes]``."""
    where = where.to(torch.int64)
    offset = where % fmt.page
    return where // fmt.page, offset // fmt.tile_tokens, slice(None), offset % fmt.tile_tokens


def write(fmt: IndexFormat, cache: Tensor, where: Tensor, keys: Tensor) -> None:
    """Quantise keys and put their bytes into the named slots."""
    elements, scale = regions(fmt, cache)
    if not where.numel():
        return
    slots.check_slots(fmt.name, where, cache.shape[0] * fmt.page)
    rows = slots.last_writer(where)
    element_bytes, scale_bytes = fmt.pack(keys[rows])
    index = place(fmt, where[rows])
    elements[index] = scales.groups(element_bytes, elements.shape[4])
    scale[index] = scales.groups(scale_bytes, fmt.scale_lanes).transpose(1, 2)


def gather(fmt: IndexFormat, cache: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
    """Return the element bytes and the scale bytes of the named slots."""
    elements, scale = regions(fmt, cache)
    slots.check_slots(fmt.name, where, cache.shape[0] * fmt.page)
    index = place(fmt, where)
    return elements[index].flatten(1), scale[index].transpose(1, 2).flatten(1)


def split(fmt: IndexFormat, pages: Tensor) -> tuple[Tensor, Tensor]:
    """Return the element bytes and the scale bytes of all keys of whole pages, in token order."""
    elements, scale = regions(fmt, pages)
    plain = elements.permute(0, 1, 3, 2, 4).reshape(-1, fmt.element_bytes)
    return plain, scale.permute(0, 1, 3, 4, 2).reshape(-1, SCALE_BYTES)


def join(fmt: IndexFormat, element_bytes: Tensor, scale_bytes: Tensor, pages: Tensor) -> None:
    """Undo ``split``: put the bytes of all keys, in token order, into whole pages."""
    elements, scale = regions(fmt, pages)
    _, runs, chunks, tokens, chunk = elements.shape
    elements.copy_(element_bytes.reshape(-1, runs, tokens, chunks, chunk).permute(0, 1, 3, 2, 4))
    lanes, each = scale.shape[2], scale.shape[4]
    scale.copy_(scale_bytes.reshape(-1, runs, tokens, each, lanes).permute(0, 1, 4, 2, 3))


def encode_query(fmt: IndexFormat, q: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise queries: FP8 with one power of two a query, or MXFP4."""
    if fmt.element == "e2m1":
        return scales.mx_encode(q)
    scale = scales.exp2(scales.fp8_exponent(scales.amax(q), fmt.element))
    codes = minifloat.encode(q.float() / scale[..., None], minifloat.ELEMENTS[fmt.element])
    return codes.view(getattr(torch, fmt.query_dtype)), scale


def decode_query(fmt: IndexFormat, q: Tensor, q_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Undo ``encode_query``."""
    if fmt.element == "e2m1":
        assert q_scale is not None
        return scales.mx_decode(q, q_scale, dtype)
    values = minifloat.decode(q.view(torch.uint8), minifloat.ELEMENTS[fmt.element], dtype)
    if q_scale is None or not q_scale.numel():
        return values
    return values * q_scale.to(dtype)[..., None]
