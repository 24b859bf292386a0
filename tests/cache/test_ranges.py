"""Descriptors of blocks and of their parts: plain ranges of one pool."""

from __future__ import annotations

import pytest
import torch
from cache_cases import kimi

from kimi_hal import cache
from kimi_hal.cache import Descriptor, Move
from kimi_hal.cache.ranges import joined
from kimi_hal.errors import CacheError, UnknownNameError

BASE = 0x7F00_0000_0000


def test_a_block_is_one_range() -> None:
    layout = kimi(block_size=64, num_blocks=8)
    row = layout.block_bytes
    assert cache.descriptors(layout, [5, 0], base=BASE) == (
        Descriptor(BASE + 5 * row, row, "block 5"),
        Descriptor(BASE, row, "block 0"),
    )


@pytest.mark.parametrize(
    ("kind", "count"), [("latent", 24), ("index", 24), ("recurrent", 69), ("conv", 3 * 69)]
)
def test_parts_of_a_block_are_where_the_views_are(kind: str, count: int) -> None:
    layout = kimi(block_size=128, num_blocks=4, conv_layout="channel_width")
    pool = torch.empty(layout.bytes, dtype=torch.uint8)
    views = layout.views(pool)[kind]
    found = cache.descriptors(layout, [3], base=pool.data_ptr(), what=kind)
    assert len(found) == count
    for layer, view in views.items():
        mine = [d for d in found if f"layer {layer}" == " ".join(d.what.split()[3:5])]
        step = layout.page_step(kind) if kind in ("latent", "index") else 1
        last = view[3 * step]
        pages = layout.pages(kind) if kind in ("latent", "index") else 1
        assert mine[0].address == last.data_ptr()
        assert sum(d.length for d in mine) == pages * last.numel() * last.element_size()


def test_a_channel_major_conv_state_is_three_reads() -> None:
    layout = kimi(block_size=64, num_blocks=2, conv_layout="channel_width")
    third = 12 * 128 * 3 * 2
    start = layout.block_bytes + layout.group("kda.0").places[0].offset + 786_432
    assert cache.descriptors(layout, [1], what="conv")[:3] == (
        Descriptor(start, third, "block 1 conv layer 0 q"),
        Descriptor(start + third, third, "block 1 conv layer 0 k"),
        Descriptor(start + 2 * third, third, "block 1 conv layer 0 v"),
    )


def test_a_token_major_conv_state_is_a_read_for_each_of_its_three_inputs() -> None:
    layout = kimi(block_size=64, num_blocks=2)
    found = cache.descriptors(layout, [0], what="conv")[:9]
    assert [d.length for d in found] == [12 * 128 * 2] * 9
    assert [d.what[-1] for d in found] == list("qkv" * 3)


def test_moves_of_whole_blocks_join_their_neighbours() -> None:
    layout = kimi(block_size=64, num_blocks=8)
    row = layout.block_bytes
    assert cache.whole_blocks(layout, [2, 3, 7], [4, 5, 6]) == (
        Move(2 * row, 4 * row, 2 * row, "block 2 to 4 … block 3 to 5"),
        Move(7 * row, 6 * row, row, "block 7 to 6"),
    )


def test_joining_keeps_order_and_every_byte() -> None:
    moves = [Move(0, 8, 4, "a"), Move(4, 12, 4, "b"), Move(8, 16, 2, "c"), Move(10, 0, 2, "d")]
    assert joined(moves) == (Move(0, 8, 10, "a … c"), Move(10, 0, 2, "d"))
    assert joined([]) == ()


def test_refuses_blocks_that_are_not_there() -> None:
    layout = kimi(block_size=64, num_blocks=8)
    with pytest.raises(
        CacheError, match=r"block ids \[-1, 8\] are outside the layout's 8 blocks; leave out padding"
    ):
        cache.descriptors(layout, [0, -1, 8])
    with pytest.raises(CacheError, match="2 blocks cannot be moved to 1: give as many of each"):
        cache.whole_blocks(layout, [0, 1], [2])


def test_refuses_an_unknown_part() -> None:
    with pytest.raises(UnknownNameError, match="unknown part of a block 'latents'; did you mean 'latent'"):
        cache.descriptors(kimi(num_blocks=1), [0], what="latents")
