"""Every layer's views of one pool. Made once, when an engine binds its cache; nothing is copied.

* A token cache whose page is the block: ``[num_blocks, page_bytes]`` with the row as stride; a page number is
  a block id, a slot ``block * block_size + offset``, so an engine's own numbers are valid as they are.
* A token cache with pages of its own: ``[pages, page_bytes]``, dense from its first byte in row 0. Page
  ``block * (block_bytes / page_bytes) + j`` is the block's j-th; the numbers in between belong to other
  layers, and no table names them (``translate``).
* A state: ``[num_blocks, …]`` in its own dtype; a state id is a block id.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kimi_hal.cache.kinds import ITEM_BYTES, StatePart, TokenCache
from kimi_hal.cache.layout import Layout
from kimi_hal.errors import CacheError

if TYPE_CHECKING:
    from torch import Tensor

#: A pool starts at a multiple of so many bytes, as float32 views and wide loads need.
POOL_ALIGN = 16


def views(layout: Layout, pool: Tensor) -> dict[str, dict[int, Tensor]]:
    """Return views by kind and layer: ``views(layout, pool)["latent"][3]``.

    Args:
        layout: with ``num_blocks`` known.
        pool: 1-D contiguous uint8 of at least ``layout.bytes`` bytes on any device; extra bytes stay unused.

    Returns:
        For each token cache its name, for each part of a state the part's: "latent", "index", "recurrent",
        "conv". Latents ``[num_blocks, block_size * row_bytes]`` and index keys ``[pages, page_bytes]`` uint8,
        recurrent state ``[num_blocks, H, V, K]`` float32, conv state ``[num_blocks, 3, C]`` or
        ``[num_blocks, C, 3]`` bf16.

    Raises:
        CacheError: the pool's dtype, shape, size or alignment, or a layout without blocks.
    """
    check_pool(layout, pool)
    found: dict[str, dict[int, Tensor]] = {}
    for cache in layout.caches:
        places = layout.places(cache.name)
        found[cache.name] = {p.layer: _pages(layout, cache, pool, p.offset) for _, p in places}
    for state in layout.states:
        starts = state.offsets(layout.tp)
        ranks = state.ranks(layout.tp)
        for part in state.parts:
            found[part.name] = {
                p.layer: _state(layout, part, pool, p.offset + starts[part.name], ranks)
                for _, p in layout.places(state.name)
            }
    return found


def check_pool(layout: Layout, pool: Tensor) -> None:
    """Refuse a pool that views cannot be made of; all reasons together."""
    reasons = []
    if layout.num_blocks < 1:
        reasons.append("the layout has no blocks yet: layout.sized(memory=…)")
    if not hasattr(pool, "data_ptr"):
        raise CacheError(f"the pool must be a tensor, got {type(pool).__name__}")
    if str(pool.dtype) != "torch.uint8" or pool.dim() != 1 or not pool.is_contiguous():
        reasons.append(f"the pool must be contiguous 1-D uint8, got {list(pool.shape)} {pool.dtype}")
    elif pool.numel() < layout.bytes:
        reasons.append(
            f"the pool has {pool.numel():,} bytes, {layout.num_blocks} blocks need {layout.bytes:,}"
        )
    past = pool.data_ptr() % POOL_ALIGN
    if past:
        reasons.append(f"the pool must start at a multiple of {POOL_ALIGN} bytes, starts {past} past one")
    if reasons:
        raise CacheError("; ".join(reasons))


def _pages(layout: Layout, cache: TokenCache, pool: Tensor, offset: int) -> Tensor:
    """Return one layer's pages."""
    start = pool.storage_offset() + offset
    if cache.page is None:
        size = cache.page_bytes(layout.entries(cache.name))
        return pool.as_strided((layout.num_blocks, size), (layout.block_bytes, 1), start)
    size = cache.page_bytes(cache.page)
    pages = (layout.num_blocks - 1) * layout.page_step(cache.name) + layout.pages(cache.name)
    return pool.as_strided((pages, size), (size, 1), start)


def _state(layout: Layout, part: StatePart, pool: Tensor, offset: int, ranks: int) -> Tensor:
    """Return one layer's part of its states, one a block."""
    import torch

    item = ITEM_BYTES[part.dtype]
    shape = part.local_shape(ranks)
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    typed = pool[: layout.bytes].view(getattr(torch, part.dtype))
    start = typed.storage_offset() + offset // item
    return typed.as_strided((layout.num_blocks, *shape), (layout.block_bytes // item, *strides), start)
