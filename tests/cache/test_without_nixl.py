"""Without the optional package everything else works, and the endpoint says what to install."""

from __future__ import annotations

import sys

import pytest
from cache_cases import kimi, pool_of

from kimi_hal.cache import transfer
from kimi_hal.cache.transfer import Endpoint
from kimi_hal.errors import CacheError


def test_says_what_to_install_when_nixl_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    monkeypatch.delitem(sys.modules, "nixl._api", raising=False)
    layout = kimi(block_size=64, num_blocks=1)
    with pytest.raises(CacheError) as caught:
        Endpoint("x", pool_of(layout), layout)
    assert str(caught.value).startswith("block transfer needs NIXL (")
    assert str(caught.value).endswith(transfer.INSTALL)
