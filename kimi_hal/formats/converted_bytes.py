"""The bytes of converted pages and rows, in torch: what ``convert`` does."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_hal.errors import FormatError
from kimi_hal.formats import index_bytes, latent_bytes, slots
from kimi_hal.formats.index_keys import SCALE_BYTES, IndexFormat
from kimi_hal.formats.latents import LatentFormat

#: Pages converted at once: 4096 pages of 64 keys are 134 MB of float32.
PAGES_AT_ONCE = 4096

#: Latent rows converted at once: 2^16 rows of 576 are 151 MB of float32.
ROWS_AT_ONCE = 1 << 16


def index_pages(src: IndexFormat, dst: IndexFormat, pages: Tensor) -> Tensor:
    """Convert whole pages ``[n, src.page_bytes]`` to ``[n, dst.page_bytes]``."""
    slots.check_cache(src.name, pages, src.page_bytes)
    if (src.page, src.head_dim) != (dst.page, dst.head_dim):
        raise FormatError(
            f"{src.name!r} has pages of {src.page} keys of {src.head_dim}, {dst.name!r} of {dst.page} of "
            f"{dst.head_dim}: read the keys and write them"
        )
    out = torch.empty((pages.shape[0], dst.page_bytes), dtype=torch.uint8, device=pages.device)
    for start in range(0, pages.shape[0], PAGES_AT_ONCE):
        part = slice(start, start + PAGES_AT_ONCE)
        index_bytes.join(dst, *_keys(src, dst, *index_bytes.split(src, pages[part])), out[part])
    return out


def _keys(src: IndexFormat, dst: IndexFormat, elements: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Convert keys in token order: their bytes where these can mean the same, else decoded and encoded."""
    families = {src.element.startswith("e4m3"), dst.element.startswith("e4m3")}
    if type(src) is not type(dst) or len(families) > 1:
        return dst.pack(src.unpack(elements, scale, torch.float32))
    if (src.element, src.scale) == (dst.element, dst.scale):
        return elements, scale
    codes, factor, exact = _redialected(src.element, dst.element, elements)
    new_scale, same = _rewritten(src, dst, scale, factor)
    exact &= same
    if not bool(exact.all()):
        keys = src.unpack(elements[~exact], scale[~exact], torch.float32)
        codes[~exact], new_scale[~exact] = dst.pack(keys)
    return codes, new_scale


def _redialected(src: str, dst: str, codes: Tensor) -> tuple[Tensor, float, Tensor]:
    """Return FP8 codes in the other dialect, the factor of their scale, and which rows are exact.

    One more bias makes a code of fnuz half of what it is in fn. NaN has other codes, −0 becomes +0 where it
    doesn't exist, and the largest fnuz code (240) has no counterpart in fn.
    """
    every = torch.ones(codes.shape[0], dtype=torch.bool, device=codes.device)
    if src == dst:
        return codes.clone(), 1.0, every
    highest = codes & 0x7F == 0x7F
    if dst == "e4m3fnuz":
        return torch.where(highest, 0x80, torch.where(codes == 0x80, 0, codes)).to(torch.uint8), 2.0, every
    return torch.where(codes == 0x80, 0x7F, codes).to(torch.uint8), 0.5, ~highest.any(dim=-1)


def _rewritten(src: IndexFormat, dst: IndexFormat, scale: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Return scales times ``factor`` in the writing of ``dst``, and which of them hold exactly that."""
    value = index_bytes.scale_values(src, scale)
    one = value[:, 0] * factor
    same = (value == value[:, :1]).all(dim=-1) & (one / factor == value[:, 0])
    if dst.scale != "f32":
        # A normal power of two: what every writing can hold.
        same &= (one >= 2.0**-126) & (one < torch.inf) & (one.view(torch.int32) & 0x7FFFFF == 0)
    return index_bytes.scale_bytes(dst, one).reshape(-1, SCALE_BYTES).clone(), same


def latent_rows(
    src: LatentFormat, dst: LatentFormat, rows: Tensor, src_scale: Tensor | None, dst_scale: Tensor | None
) -> Tensor:
    """Convert rows ``[n, src.row_bytes]`` to ``[n, dst.row_bytes]``."""
    slots.check_cache(src.name, rows, src.row_bytes)
    latent_bytes.check_scale(src, src_scale)
    latent_bytes.check_scale(dst, dst_scale)
    if src == dst and (src_scale is None or dst_scale is None or torch.equal(src_scale, dst_scale)):
        return rows.clone(memory_format=torch.contiguous_format)
    out = torch.empty((rows.shape[0], dst.row_bytes), dtype=torch.uint8, device=rows.device)
    for start in range(0, rows.shape[0], ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        latent = src.unpack(rows[part], src_scale, torch.float32)
        out[part] = dst.pack(latent[:, : src.kv_rank], latent[:, src.kv_rank :], dst_scale)
    return out
