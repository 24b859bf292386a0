"""The bytes of single tokens in a cache, taken out and put in as they are: nothing is decoded or rounded."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_hal.formats import index_bytes, slots
from kimi_hal.formats.index_keys import SCALE_BYTES, IndexFormat
from kimi_hal.formats.latents import LatentFormat
from kimi_hal.formats.scales import groups


def page_bytes(fmt: IndexFormat | LatentFormat, page: int) -> int:
    """Return the bytes of a page of ``page`` tokens (an index page has the format's own number)."""
    return fmt.page_bytes if isinstance(fmt, IndexFormat) else page * fmt.row_bytes


def take(fmt: IndexFormat | LatentFormat, cache: Tensor, page: int, where: Tensor) -> Tensor:
    """Return the bytes of the named slots, and of no others.

    Args:
        fmt: of the cache; for index keys an element's and a scale's bytes stand apart in the page.
        cache: ``[pages, page_bytes]`` uint8, ``stride(0)`` free.
        page: tokens of a page.
        where: ``[n]`` int64 slots; −1 gives zeros.

    Returns:
        ``[n, row_bytes]`` uint8: elements, then scales in token order.
    """
    slots.check_cache(fmt.name, cache, page_bytes(fmt, page))
    rows = cache.new_zeros((where.shape[0], fmt.row_bytes))
    live = where >= 0
    if isinstance(fmt, IndexFormat):
        rows[live] = torch.cat(index_bytes.gather(fmt, cache, where[live]), dim=1)
    else:
        slot = where[live]
        rows[live] = cache.view(len(cache), page, fmt.row_bytes)[slot // page, slot % page]
    return rows


def put(fmt: IndexFormat | LatentFormat, cache: Tensor, page: int, where: Tensor, rows: Tensor) -> None:
    """Undo ``take``: write the bytes ``rows [n, row_bytes]`` into slots of a cache of the same format.

    Slots are distinct; those below 0 are skipped. No other byte changes.
    """
    slots.check_cache(fmt.name, cache, page_bytes(fmt, page))
    live = where >= 0
    slot, kept = where[live], rows[live]
    if not isinstance(fmt, IndexFormat):
        cache.view(len(cache), page, fmt.row_bytes)[slot // page, slot % page] = kept
        return
    elements, scale = index_bytes.regions(fmt, cache)
    index = index_bytes.place(fmt, slot)
    elements[index] = groups(kept[:, : fmt.element_bytes], elements.shape[4])
    scale[index] = groups(kept[:, -SCALE_BYTES:], fmt.scale_lanes).transpose(1, 2)
