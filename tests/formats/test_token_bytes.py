from __future__ import annotations

import pytest
import torch

from kimi_hal import formats
from kimi_hal.errors import FormatError
from kimi_hal.formats import token_bytes

PAGE = 16
NAMES = [*formats.names("index"), *formats.names("latent")]


def pool(fmt: formats.Format, pages: int, seed: int) -> torch.Tensor:
    """Return pages of random bytes whose stride is wider than they are."""
    size = token_bytes.page_bytes(fmt, PAGE)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (pages, size + 48), dtype=torch.uint8, generator=generator)[:, :size]


def tokens(fmt: formats.Format) -> int:
    return 3 * (fmt.page if fmt.kind == "index" else PAGE)


@pytest.mark.parametrize("name", NAMES)
def test_a_cache_taken_apart_and_put_together_is_the_cache(name: str) -> None:
    fmt = formats.get(name)
    cache, order = pool(fmt, 3, 0), torch.randperm(tokens(formats.get(name)))
    copy = torch.zeros_like(cache)
    token_bytes.put(fmt, copy, PAGE, order, token_bytes.take(fmt, cache, PAGE, order))
    assert copy.equal(cache)


@pytest.mark.parametrize("name", NAMES)
def test_moved_tokens_decode_to_what_they_were(name: str) -> None:
    fmt, generator = formats.get(name), torch.Generator().manual_seed(1)
    source = torch.zeros_like(pool(fmt, 3, 0))
    target = pool(fmt, 3, 2)
    from_slots = torch.randperm(tokens(fmt), generator=generator)[:9]
    to_slots = torch.randperm(tokens(fmt), generator=generator)[:9]
    if fmt.kind == "index":
        fmt.write(source, from_slots, torch.randn(9, 128, generator=generator))
    else:
        scale = torch.tensor([0.5]) if fmt.needs_scale else None
        operands = torch.randn(9, 512, generator=generator), torch.randn(9, 64, generator=generator)
        fmt.write(source, PAGE, from_slots, *operands, scale)
    token_bytes.put(fmt, target, PAGE, to_slots, token_bytes.take(fmt, source, PAGE, from_slots))
    if fmt.kind == "index":
        assert fmt.read(target, to_slots).equal(fmt.read(source, from_slots))
    else:
        read = (fmt.read(c, PAGE, s, scale) for c, s in ((target, to_slots), (source, from_slots)))
        assert torch.equal(*read)


@pytest.mark.parametrize("name", NAMES)
def test_slots_below_zero_give_zeros_and_change_nothing(name: str) -> None:
    fmt = formats.get(name)
    cache, before = pool(fmt, 2, 0), pool(fmt, 2, 0)
    rows = token_bytes.take(fmt, cache, PAGE, torch.tensor([-1, 3, -1]))
    assert rows.shape == (3, fmt.row_bytes)
    assert rows[[0, 2]].count_nonzero() == 0
    token_bytes.put(fmt, cache, PAGE, torch.tensor([-1, -1]), torch.full((2, fmt.row_bytes), 7).byte())
    assert cache.equal(before)


@pytest.mark.parametrize("name", NAMES)
def test_putting_a_token_changes_its_own_bytes_alone(name: str) -> None:
    fmt = formats.get(name)
    cache = torch.zeros_like(pool(fmt, 2, 0))
    token_bytes.put(fmt, cache, PAGE, torch.tensor([5]), torch.full((1, fmt.row_bytes), 255).byte())
    assert int((cache == 255).sum()) == int(cache.count_nonzero()) == fmt.row_bytes


def test_pages_of_another_size_are_refused() -> None:
    fmt = formats.latent("latent.bf16")
    with pytest.raises(FormatError, match=r"^latent\.bf16 takes a cache of \[pages, 18432\] uint8, not"):
        token_bytes.take(fmt, torch.zeros(2, 100, dtype=torch.uint8), PAGE, torch.tensor([0]))
