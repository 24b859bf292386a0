"""The bytes of latent rows, in torch: what the methods of the latent formats do."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_hal.errors import FormatError
from kimi_hal.formats import minifloat, slots
from kimi_hal.formats.latents import LatentFormat, TensorScaledLatent

KV_RANK = 512
PE_DIM = 64


def check_scale(fmt: LatentFormat, k_scale: Tensor | None) -> None:
    """Raise FormatError unless ``k_scale`` is given exactly where the format needs one."""
    if fmt.needs_scale and k_scale is None:
        raise FormatError(f"{fmt.name} needs k_scale, the one-element float32 factor of the cache")
    if not fmt.needs_scale and k_scale is not None:
        raise FormatError(f"{fmt.name} carries its own scales and takes no k_scale")


def _rows(fmt: LatentFormat, cache: Tensor, page: int) -> Tensor:
    """View a cache as ``[pages, page, row_bytes]``."""
    return cache.view(cache.shape[0], page, fmt.row_bytes)


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
    check_scale(fmt, k_scale)
    if not where.numel():
        return
    rows = slots.last_writer(where)
    where = where[rows].to(torch.int64)
    kv_c, k_pe = parts
    packed = fmt.pack(kv_c[rows].float(), k_pe[rows].float(), k_scale)
    _rows(fmt, cache, page)[where // page, where % page] = packed


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
    check_scale(fmt, k_scale)
    where = where.to(torch.int64)
    rows = _rows(fmt, cache, page)[where // page, where % page]
    return fmt.unpack(rows, k_scale, dtype or torch.float32)


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
