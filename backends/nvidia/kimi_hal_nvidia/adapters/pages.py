"""Pages of a cache as libraries are shown them."""

from __future__ import annotations

from torch import Tensor


def with_stride(cache: Tensor) -> Tensor:
    """Return a cache whose stride from page to page is a page's bytes where it has one page, else the cache itself.

    A caller may give a lone page any stride, since none is taken. But a view as wider numbers wants whole ones of it,
    and so does a kernel that is told it.
    """
    return cache[0].unsqueeze(0) if cache.shape[0] == 1 else cache
