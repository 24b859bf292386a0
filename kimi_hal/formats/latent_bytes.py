"""The bytes of latent rows, in torch: what the methods of the latent formats do."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_hal.errors import FormatError
from kimi_hal.formats import minifloat, scales, slots
from kimi_hal.formats.latents import FlashMLALatent, LatentFormat, NVFP4Latent, TensorScaledLatent

#: Lanes of the NVFP4 scale order: scale s stands at ``[s % 4, s // 4]``.
NVFP4_LANES = 4

#: The smallest scale of FlashMLA's record.
FLASHMLA_FLOOR = 1e-4


def check_scale(fmt: LatentFormat, k_scale: Tensor | None) -> None:
    """Raise FormatError unless ``k_scale`` is given exactly where the format needs one."""
    if fmt.needs_scale and k_scale is None:
        raise FormatError(f"{fmt.name} needs k_scale, the one-element float32 factor of the cache")
    if not fmt.needs_scale and k_scale is not None:
        raise FormatError(f"{fmt.name} carries its own scales and takes no k_scale")


def _pages(fmt: LatentFormat, cache: Tensor, page: int) -> Tensor:
    """View a cache as ``[pages, page, row_bytes]``."""
    return cache.view(cache.shape[0], page, fmt.row_bytes)


def of_slots(fmt: LatentFormat, cache: Tensor, page: int, where: Tensor) -> Tensor:
    """Return the bytes of the named slots, ``[n, row_bytes]``."""
    where = where.to(torch.int64)
    return _pages(fmt, cache, page)[where // page, where % page]


def write(
    fmt: LatentFormat,
    cache: Tensor,
    page: int,
    where: Tensor,
    parts: tuple[Tensor, Tensor],
    k_scale: Tensor | None,
) -> None:
    """Quantise latents and put their rows into the named slots."""
    slots.check_cache(fmt.name, cache, page * fmt.row_bytes)
    slots.check_slots(fmt.name, where, cache.shape[0] * page)
    check_scale(fmt, k_scale)
    if not where.numel():
        return
    rows = slots.last_writer(where)
    where = where[rows].to(torch.int64)
    kv_c, k_pe = parts
    packed = fmt.pack(kv_c[rows].float(), k_pe[rows].float(), k_scale)
    _pages(fmt, cache, page)[where // page, where % page] = packed


def read(
    fmt: LatentFormat,
    cache: Tensor,
    page: int,
    where: Tensor,
    k_scale: Tensor | None,
    dtype: torch.dtype | None,
) -> Tensor:
    """Return the latents of the named slots."""
    slots.check_cache(fmt.name, cache, page * fmt.row_bytes)
    slots.check_slots(fmt.name, where, cache.shape[0] * page)
    check_scale(fmt, k_scale)
    return fmt.unpack(of_slots(fmt, cache, page, where), k_scale, dtype or torch.float32)


def pack_scaled(fmt: TensorScaledLatent, kv_c: Tensor, k_pe: Tensor, k_scale: Tensor | None) -> Tensor:
    """Return ``[n, 576]`` FP8 codes of ``x / k_scale``."""
    assert k_scale is not None
    x = torch.cat((kv_c, k_pe), dim=-1)
    # Expanded on the data's device: a host scalar would be turned into a multiplication by its reciprocal.
    scale = k_scale.to(x.device, torch.float32).reshape(1, 1).expand_as(x)
    return minifloat.encode(x / scale, minifloat.ELEMENTS[fmt.element])


def unpack_scaled(
    fmt: TensorScaledLatent, rows: Tensor, k_scale: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return ``code * k_scale`` in ``dtype``."""
    assert k_scale is not None
    return minifloat.decode(rows, minifloat.ELEMENTS[fmt.element], dtype) * k_scale.to(rows.device, dtype)


def pack_nvfp4(fmt: NVFP4Latent, kv_c: Tensor, k_pe: Tensor) -> Tensor:
    """Return ``[n, 352]``: packed e2m1, e4m3 key part, scales in lane order."""
    blocks = scales.groups(kv_c, fmt.group)
    needed = scales.divide(scales.amax(blocks), 6.0).clamp(min=2.0**-9, max=448.0)
    scale_code = minifloat.encode_up(needed, minifloat.E4M3FN)
    # A NaN has no e2m1 code, so it makes its block's scale NaN.
    scale_code = torch.where(torch.isnan(blocks).any(dim=-1), minifloat.E4M3FN.nan or 0, scale_code)
    scale = minifloat.decode(scale_code, minifloat.E4M3FN)
    codes = minifloat.encode(blocks * (torch.ones_like(scale) / scale)[..., None], minifloat.E2M1)
    lanes = scales.groups(scale_code, NVFP4_LANES).transpose(1, 2).flatten(1)
    packed = minifloat.pack_nibbles(codes.flatten(1))
    return torch.cat((packed, minifloat.encode(k_pe, minifloat.E4M3FN), lanes), dim=-1)


def unpack_nvfp4(fmt: NVFP4Latent, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``[n, 576]`` of 352-byte rows."""
    packed, rest = rows[:, : fmt.kv_rank // 2], rows[:, fmt.kv_rank // 2 :]
    k_pe, lanes = rest[:, : fmt.pe_dim], rest[:, fmt.pe_dim :]
    scale_code = scales.groups(lanes, fmt.kv_rank // fmt.group // NVFP4_LANES).transpose(1, 2).flatten(1)
    values = scales.groups(minifloat.decode_nibbles(packed, dtype), fmt.group)
    latent = (values * minifloat.decode(scale_code, minifloat.E4M3FN, dtype)[..., None]).flatten(1)
    return torch.cat((latent, minifloat.decode(k_pe, minifloat.E4M3FN, dtype)), dim=-1)


def pack_flashmla(fmt: FlashMLALatent, kv_c: Tensor, k_pe: Tensor) -> Tensor:
    """Return ``[n, 656]``: e4m3fn, float32 scales, bf16 key part."""
    blocks = scales.groups(kv_c, fmt.group)
    needed = scales.divide(scales.amax(blocks), 448.0).clamp(min=FLASHMLA_FLOOR)
    scale = scales.exp2(scales.ceil_log2(needed))
    codes = minifloat.encode(blocks / scale[..., None], minifloat.E4M3FN).flatten(1)
    return torch.cat((codes, scale.view(torch.uint8), bf16_bytes(k_pe)), dim=-1)


def unpack_flashmla(fmt: FlashMLALatent, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``[n, 576]`` of 656-byte rows."""
    codes, k_pe = rows[:, : fmt.kv_rank], rows[:, -2 * fmt.pe_dim :]
    factor = flashmla_scales(fmt, rows).to(dtype)
    values = scales.groups(minifloat.decode(codes, minifloat.E4M3FN, dtype), fmt.group)
    return torch.cat(((values * factor[..., None]).flatten(1), unpack_bf16(k_pe).to(dtype)), dim=-1)


def flashmla_scales(fmt: FlashMLALatent, rows: Tensor) -> Tensor:
    """Return the float32 scales ``[n, 4]`` of 656-byte rows, copied first so that they are aligned."""
    held = rows[:, fmt.kv_rank : -2 * fmt.pe_dim]
    return held.clone(memory_format=torch.contiguous_format).view(torch.float32)


def no_scales(where: Tensor) -> Tensor:
    """Return a scale of 1 for each of the named slots, ``[n, 1]``."""
    return torch.ones(where.shape[0], 1, dtype=torch.float32, device=where.device)


def bf16_bytes(x: Tensor) -> Tensor:
    """Return bf16 bytes, ``[n, K]`` to ``[n, 2K]``; every NaN becomes 0x7FC0, which casts do not agree on."""
    bits = x.to(torch.bfloat16).view(torch.int16)
    return torch.where(torch.isnan(x), 0x7FC0, bits).to(torch.int16).view(torch.uint8)


def pack_bf16(kv_c: Tensor, k_pe: Tensor) -> Tensor:
    """Return ``[n, 1152]``."""
    return bf16_bytes(torch.cat((kv_c, k_pe), dim=-1))


def unpack_bf16(rows: Tensor) -> Tensor:
    """Return the bf16 values of ``[n, 2K]`` bytes, copied first so that they are aligned."""
    return rows.clone(memory_format=torch.contiguous_format).view(torch.bfloat16)
