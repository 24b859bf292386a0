"""Conversion of cache bytes from one format to another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kimi_hal.errors import FormatError
from kimi_hal.formats.index_keys import IndexFormat
from kimi_hal.formats.latents import LatentFormat
from kimi_hal.formats.registry import get

if TYPE_CHECKING:
    from torch import Tensor


def convert(
    src: str,
    dst: str,
    data: Tensor,
    *,
    src_scale: Tensor | None = None,
    dst_scale: Tensor | None = None,
) -> Tensor:
    """Return the same keys or latents in another format, as new bytes.

    Where the destination can hold a row's values they don't change: another element order; a power of two
    written as float32 or as four e8m0 bytes; the other FP8 dialect, by the same codes under twice or half
    the scale; a latent of the same format and scale. Decided row by row. Every other row is decoded to
    float32 and encoded by the rule of ``dst``.

    Args:
        src: name of the format that ``data`` is in.
        dst: name of the format to return, of the same kind.
        data: index keys: pages ``[n, page_bytes]`` uint8; latents: rows ``[n, row_bytes]`` uint8.
        src_scale: one-element float32 ``k_scale`` of the source, for a latent format that needs one.
        dst_scale: the same for the destination.

    Returns:
        Index keys ``[n, page_bytes]``, latents ``[n, row_bytes]``, uint8.

    Raises:
        UnknownNameError: a name is not known.
        FormatError: the formats are of different kinds, or the data is not in ``src``.
    """
    a, b = get(src), get(dst)
    from kimi_hal.formats import converted_bytes

    if isinstance(a, IndexFormat) and isinstance(b, IndexFormat):
        return converted_bytes.index_pages(a, b, data)
    if isinstance(a, LatentFormat) and isinstance(b, LatentFormat):
        return converted_bytes.latent_rows(a, b, data, src_scale, dst_scale)
    if a.kind == b.kind:
        raise FormatError(f"{a.kind} are two tensors a matrix: use decode of {src!r}, then encode of {dst!r}")
    raise FormatError(
        f"{src!r} holds {a.kind} and {dst!r} holds {b.kind}: convert between formats of one kind"
    )
