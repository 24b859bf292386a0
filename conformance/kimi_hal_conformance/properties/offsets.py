"""Addresses beyond 2^31 bytes, in a pool that is virtual: its pages overlap, so that it fits in memory."""

from __future__ import annotations

import torch

from kimi_hal_conformance.properties.property import Modules, expect, holds, plain

#: A pool of index pages whose last ones begin behind 2^31 bytes (fault class 8).
PAGES, PAGE = 254_300, 254_250
#: Bytes from one page to the next, where a real pool has the whole page.
STEP = 128


@holds("offsets/page-254250", "page 254,250 of 254,300 pages of 8,448 bytes")
def last_pages_of_a_large_pool(modules: Modules) -> None:
    """A page behind 2^31 bytes is read where it is."""
    fmt = modules("formats").index("index.fp8.e4m3fn.f32.page64")
    keys = torch.randn(fmt.page, fmt.head_dim, generator=torch.Generator().manual_seed(1))
    written = torch.zeros((1, fmt.page_bytes), dtype=torch.uint8)
    fmt.write(written, torch.arange(fmt.page), keys)
    pool = torch.zeros(PAGES * STEP + fmt.page_bytes, dtype=torch.uint8)
    pool[PAGE * STEP :][: fmt.page_bytes] = written[0]
    cache = pool.as_strided((PAGES, fmt.page_bytes), (STEP, 1))
    got, missing = modules("reference.indexer").read_keys(fmt, torch.tensor([PAGE]), 0, fmt.page, cache)
    expect("keys without a page", int(missing.sum()), 0)
    wanted = fmt.read(written, torch.arange(fmt.page), torch.float64)
    expect(f"keys of page {PAGE} that differ", int((got != wanted).any(dim=1).sum()), 0)


@plain("offsets")
def small_pool(modules: Modules) -> torch.Tensor:
    """Return keys of a small pool."""
    fmt = modules("formats").index("index.fp8.e4m3fn.f32.page64")
    cache = torch.zeros((8, fmt.page_bytes), dtype=torch.uint8)
    fmt.write(cache, torch.arange(512), torch.randn(512, 128, generator=torch.Generator().manual_seed(1)))
    keys, _ = modules("reference.indexer").read_keys(fmt, torch.arange(8), 0, 512, cache)
    return torch.as_tensor(keys)
