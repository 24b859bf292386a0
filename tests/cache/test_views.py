"""Views of one pool: shapes, strides and addresses as kernels see them; every refusal of a pool."""

from __future__ import annotations

import pytest
import torch
from cache_cases import FP8, MXFP4, NVFP4, POW2, equal, kda_spec, kimi, pool_of, run, small
from index_cases import int32

from kimi_hal import cache
from kimi_hal.errors import CacheError
from kimi_hal.ops.indexer import StoreIndexSpec


@pytest.mark.parametrize("block_size", [64, 128, 256])
def test_views_have_the_shapes_that_kernels_expect(block_size: int) -> None:
    layout = kimi(block_size=block_size, num_blocks=3)
    pool = torch.empty(layout.bytes, dtype=torch.uint8)
    views = layout.views(pool)
    row = layout.block_bytes
    assert [len(views[kind]) for kind in ("latent", "index", "recurrent", "conv")] == [24, 24, 69, 69]
    latent, index = views["latent"][92], views["index"][92]
    assert (latent.shape, latent.stride()) == ((3, block_size * 576), (row, 1))
    assert (index.shape, index.stride()) == ((2 * (row // 8448) + block_size // 64, 8448), (8448, 1))
    state, conv = views["recurrent"][0], views["conv"][0]
    assert (state.shape, state.dtype) == ((3, 12, 128, 128), torch.float32)
    assert state.stride() == (row // 4, 128 * 128, 128, 1)
    assert (conv.shape, conv.dtype, conv.stride()) == ((3, 3, 4608), torch.bfloat16, (row // 2, 4608, 1))


def test_a_conv_state_in_channel_major_order() -> None:
    layout = kimi(block_size=64, num_blocks=2, conv_layout="channel_width")
    conv = layout.views(torch.empty(layout.bytes, dtype=torch.uint8))["conv"][4]
    assert (conv.shape, conv.stride()) == ((2, 4608, 3), (layout.block_bytes // 2, 3, 1))


def test_views_by_hand_are_the_same() -> None:
    layout = kimi(block_size=128, num_blocks=3)
    pool = torch.empty(layout.bytes, dtype=torch.uint8)
    row, blocks, tokens = layout.block_bytes, layout.num_blocks, layout.block_size
    latents = [pool.as_strided((blocks, tokens * 576), (row, 1), o) for o in layout.latent_offsets]
    pages = (blocks - 1) * (row // 8448) + tokens // 64
    keys = [pool.as_strided((pages, 8448), (8448, 1), o) for o in layout.index_offsets]
    for ours, theirs in ((layout.views(pool)["latent"], latents), (layout.views(pool)["index"], keys)):
        for a, b in zip(ours.values(), theirs, strict=True):
            assert (a.data_ptr(), a.shape, a.stride()) == (b.data_ptr(), b.shape, b.stride())


@pytest.mark.parametrize(("latent", "index"), [(FP8, POW2), (NVFP4, MXFP4)])
def test_every_byte_of_a_group_belongs_to_one_layer(latent: str, index: str) -> None:
    layout = cache.plan(small(latent, index), block_size=128, num_blocks=2)
    pool = torch.zeros(layout.bytes, dtype=torch.uint8)
    views, number = layout.views(pool), 0
    for kind in ("latent", "index"):
        for view in views[kind].values():
            number += 1
            step = layout.page_step(kind)
            view[step : step + layout.pages(kind)] += number  # block 1
    rows = pool.view(2, -1)
    assert not rows[0].any()
    counts = torch.bincount(rows[1].long(), minlength=5).tolist()
    sizes = [place.bytes for _, place in (*layout.places("latent"), *layout.places("index"))]
    assert counts == [layout.block_bytes - layout.used_bytes, *sizes]


def test_states_of_a_block_share_no_byte() -> None:
    layout = cache.plan(small(), block_size=128, num_blocks=3)
    group, state = layout.groups[1], layout.state("kda")
    pool = torch.zeros(layout.bytes, dtype=torch.uint8)
    views, sizes = layout.views(pool), []
    for place in group.places:
        for part in state.parts:
            sizes.append(part.local_bytes(1))
            views[part.name][place.layer][1].view(torch.uint8).fill_(len(sizes))
    rows = pool.view(3, -1)
    assert not rows[[0, 2]].any()
    assert torch.bincount(rows[1].long()).tolist() == [layout.block_bytes - sum(sizes), *sizes]


def test_a_pool_may_start_anywhere_in_its_storage_and_be_longer() -> None:
    layout = cache.plan(small(), block_size=64, num_blocks=2)
    storage = torch.zeros(layout.bytes + 4096, dtype=torch.uint8)
    alone = torch.zeros(layout.bytes, dtype=torch.uint8)
    for pool in (storage[256:], alone):
        views = layout.views(pool)
        for number, kind in enumerate(("latent", "index", "recurrent", "conv")):
            block = 0 if kind in ("latent", "index") else 1
            for layer, view in views[kind].items():
                view[block].view(torch.uint8).fill_(16 * number + layer + 1)
    assert equal(storage[256 : 256 + layout.bytes], alone)
    assert not storage[:256].any()
    assert not storage[256 + layout.bytes :].any()


def test_the_specs_of_the_operators_accept_the_views() -> None:
    layout = kimi(block_size=64, num_blocks=2)
    views = layout.views(pool_of(layout))
    spec = kda_spec(layout)
    q = torch.zeros(0, 12, 128).bfloat16()
    gate = (torch.zeros(12), torch.zeros(12 * 128))
    beta = torch.zeros(0, 12).bfloat16()
    out = run("kda_decode", spec)(q, q, q, q, beta, *gate, views["recurrent"][0], int32([]))
    assert out.shape == (0, 12, 128)


def test_offsets_beyond_2_to_the_31_bytes_reach_their_bytes() -> None:
    layout = kimi(block_size=64, num_blocks=2000)
    pool = torch.empty(layout.bytes, dtype=torch.uint8)  # only touched pages are real memory
    views = layout.views(pool)
    table, slots = cache.translate(
        torch.tensor([[1999]], dtype=torch.int32), torch.tensor([1999 * 64 + 63]), layout, "index"
    )
    assert table is not None
    assert slots is not None
    page = 1999 * (layout.block_bytes // 8448)
    assert (table.item(), slots.item()) == (page, page * 64 + 63) == (257_871, 16_503_807)
    start = 1999 * layout.block_bytes + layout.index_offsets[-1]
    assert start > 1 << 31
    pool[start : start + 8448].fill_(0xAB)
    run("store_index_keys", StoreIndexSpec(index=POW2))(torch.ones(1, 128), slots, views["index"][92])
    expected = torch.full((8448,), 0xAB, dtype=torch.uint8)
    alone = expected[None].clone()
    run("store_index_keys", StoreIndexSpec(index=POW2))(torch.ones(1, 128), torch.tensor([63]), alone)
    assert equal(pool[start : start + 8448], alone[0])
    assert not equal(alone[0], expected)


# --- refusals -----------------------------------------------------------------------------------------------


def test_refuses_a_pool_with_all_reasons() -> None:
    layout = cache.plan(small(), block_size=64, num_blocks=2)
    with pytest.raises(CacheError) as caught:
        layout.views(torch.zeros(layout.bytes, dtype=torch.uint8)[8:])
    assert str(caught.value) == (
        f"the pool has {layout.bytes - 8:,} bytes, 2 blocks need {layout.bytes:,}; "
        "the pool must start at a multiple of 16 bytes, starts 8 past one"
    )


def test_refuses_a_pool_of_another_shape_or_dtype() -> None:
    layout = cache.plan(small(), block_size=64, num_blocks=2)
    with pytest.raises(CacheError, match=r"must be contiguous 1-D uint8, got \[2, 8\] torch.uint8"):
        layout.views(torch.zeros(2, 8, dtype=torch.uint8))
    with pytest.raises(CacheError, match=r"must be contiguous 1-D uint8, got \[8\] torch.float32"):
        layout.views(torch.zeros(8))


def test_refuses_a_layout_without_blocks() -> None:
    with pytest.raises(CacheError, match=r"the layout has no blocks yet: layout.sized\(memory=…\)"):
        kimi().views(torch.zeros(16, dtype=torch.uint8))
