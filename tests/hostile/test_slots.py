"""Slots outside a cache: through the formats themselves, where −1 as an index would be the last slot."""

from __future__ import annotations

import pytest
import torch

from kimi_hal import formats
from kimi_hal.errors import FormatError

PAGE = 16


@pytest.mark.parametrize("slot", [-1, -(2**63), 128, 2**62])
@pytest.mark.parametrize("name", formats.names("index"))
def test_an_index_format_reaches_no_slot_outside_its_cache(name, slot):
    fmt = formats.index(name)
    cache = torch.zeros(2, fmt.page_bytes, dtype=torch.uint8)
    slots = torch.tensor([0, slot])
    said = rf"{name}: slots name {slot}, outside 0 to 127; leave padding out before"
    with pytest.raises(FormatError, match=said):
        fmt.write(cache, slots, torch.ones(2, 128))
    with pytest.raises(FormatError, match=said):
        fmt.read(cache, slots)
    assert not cache.any()


@pytest.mark.parametrize("slot", [-1, 2 * PAGE])
@pytest.mark.parametrize("name", formats.names("latent"))
def test_a_latent_format_reaches_no_slot_outside_its_cache(name, slot):
    fmt = formats.latent(name)
    cache = torch.zeros(2, PAGE * fmt.row_bytes, dtype=torch.uint8)
    scale = torch.ones(1) if fmt.needs_scale else None
    said = rf"{name}: slots name {slot}, outside 0 to 31; leave padding out before"
    with pytest.raises(FormatError, match=said):
        fmt.write(cache, PAGE, torch.tensor([slot]), torch.ones(1, 512), torch.ones(1, 64), scale)
    with pytest.raises(FormatError, match=said):
        fmt.read(cache, PAGE, torch.tensor([slot]), scale)
    assert not cache.any()


def test_the_first_and_the_last_slot_are_ordinary():
    fmt = formats.index("index.mxfp4.page64")
    cache = torch.zeros(2, fmt.page_bytes, dtype=torch.uint8)
    fmt.write(cache, torch.tensor([0, 127]), torch.ones(2, 128))
    assert fmt.read(cache, torch.tensor([0, 126, 127]))[:, 0].tolist() == [1.0, 0.0, 1.0]
