"""Faults met in the field, on the packed cache. Numbers are the classes of ``docs/faults.md``."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from cache_cases import FP8, POISON, POW2, kimi, pool_of, run, small
from index_cases import int32

from kimi_hal import cache
from kimi_hal.cache import StateCache, StatePart, TokenCache
from kimi_hal.cache.models import delta_attention
from kimi_hal.errors import CacheError
from kimi_hal.ops.indexer import StoreIndexSpec
from kimi_hal.ops.sparse_mla import StoreLatentSpec
from kimi_hal.ops.spec import DCP

ONES = torch.ones(1)


def int64(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


# --- class 3: padding rows, −1, what an earlier step left -----------------------------------------------------


def test_fault_03_five_slots_for_eight_padded_rows() -> None:
    """Eight key rows of a captured graph, five slots: five rows are written, the rest of the cache is unchanged."""
    layout = cache.plan(small(), block_size=128, num_blocks=4)
    pool = pool_of(layout)
    view = layout.views(pool)["index"][2]
    fixed = (None, torch.full((8,), 3, dtype=torch.int64))  # what an earlier step of eight left
    _, slots = cache.translate(None, int64(130, 131, 132, 5, 6), layout, "index", out=fixed)
    assert slots is not None
    assert slots.shape == (8,)
    run("store_index_keys", StoreIndexSpec(index=POW2))(torch.ones(8, 128), slots, view)
    step = layout.page_step("index")
    page = view.view(-1, 64 * 132)
    keys = page[:, : 64 * 128].view(-1, 64, 128)
    written = (keys != POISON).all(-1).nonzero().tolist()
    assert written == [[0, 5], [0, 6], [step, 2], [step, 3], [step, 4]]
    assert (pool != POISON).sum() == 5 * 132


def test_fault_03_minus_one_is_not_the_last_slot() -> None:
    """Slots [3, −1] of 80: slot 3 is written, slot 79 keeps its bytes."""
    layout = cache.plan([*small()[:1]], block_size=16, num_blocks=5)
    pool = pool_of(layout)
    view = layout.views(pool)["latent"][5]
    _, slots = cache.translate(None, int64(3, -1), layout, "latent")
    assert slots is not None
    assert slots.tolist() == [3, -1]
    run("store_latent", StoreLatentSpec(latent=FP8, page=16))(
        torch.ones(2, 512), torch.ones(2, 64), slots, view, ONES
    )
    rows = view.reshape(80, 576)
    assert (rows[3] != POISON).all()
    assert (rows[79] == POISON).all()
    assert (pool != POISON).sum() == 576


def test_fault_03_a_shorter_step_leaves_nothing_of_a_longer_one() -> None:
    layout = kimi(block_size=128, num_blocks=8)
    out = (torch.zeros(4, 8, dtype=torch.int32), torch.zeros(6, dtype=torch.int64))
    cache.translate(int32([[7, 6, 5, 4]] * 4), int64(*range(6)), layout, "index", out=out)
    cache.translate(int32([[1]]), int64(0), layout, "index", out=out)
    assert out[0].tolist() == [[258, 259, *[-1] * 6], *[[-1] * 8] * 3]
    assert out[1].tolist() == [0, -1, -1, -1, -1, -1]


# --- class 8: int32 overflow of byte offsets --------------------------------------------------------------------


def test_fault_08_offsets_of_a_large_pool_stay_exact() -> None:
    """Page 254,250 of 8,448 bytes starts at byte 2,147,904,000."""
    keys = TokenCache(name="index", layers=(0,), entry_bytes=132, page=64)
    layout = cache.plan([keys], block_size=64, num_blocks=254_300)
    assert layout.block_bytes == 8_448
    ranges = cache.descriptors(layout, [254_250])
    assert (ranges[0].address, ranges[0].length) == (2_147_904_000, 8_448)
    _, slots = cache.translate(None, int64(254_250 * 64 + 7), layout, "index")
    assert slots is not None
    assert (slots // 64 * 8_448).tolist() == [2_147_904_000]
    pool = torch.empty(layout.bytes, dtype=torch.uint8)  # only the touched page is real memory
    view = layout.views(pool)["index"][0]
    view[254_250] = 0xAB
    run("store_index_keys", StoreIndexSpec(index=POW2))(torch.ones(1, 128), slots, view)
    page = pool[2_147_904_000 : 2_147_904_000 + 8_448]
    assert (page != 0xAB).nonzero().flatten().tolist() == [
        *range(7 * 128, 8 * 128),
        *range(8_192 + 28, 8_192 + 32),
    ]


def test_fault_08_a_block_whose_page_would_wrap_is_no_block() -> None:
    """2,061 pages a row: block 2,083,926 would wrap in 32 bits to page 4,190, which a pool of 8 blocks has."""
    layout = kimi(num_blocks=8)
    assert layout.page_step("index") == 2061
    table, _ = cache.translate(int32([[2_083_926, 3]]), None, layout, "index")
    assert table is not None
    assert table[0, :16].tolist() == [-1] * 16
    assert table[0, 16:].tolist() == [3 * 2061 + j for j in range(16)]


# --- class 10: the state's own column ---------------------------------------------------------------------------


def test_fault_10_a_state_is_looked_up_in_blocks_of_its_own_interval() -> None:
    """100,096 tokens, attention blocks of 128, states kept every 2,176: column 45, not 781."""
    state = dataclasses.replace(delta_attention((1,), heads=1, dim=16, width=3), interval=2_176)
    tokens = TokenCache(name="latent", layers=(0,), entry_bytes=576)
    layout = cache.plan([tokens, state], block_size=128, num_blocks=4)
    assert layout.column("kda", 100_096) == 45
    assert layout.column("latent", 100_096) == 781
    assert layout.column("kda", 0) == layout.column("kda", 2_176) == 0
    assert layout.column("kda", 2_177) == 1


# --- class 11: interleave ----------------------------------------------------------------------------------------


def test_fault_11_interleave_changes_owner_and_offset() -> None:
    """Two ranks, runs of 4, pages of 8, block 5: position 9 is slot 45 of rank 0."""
    tokens = TokenCache(name="latent", layers=(0,), entry_bytes=576)
    layout = cache.plan([tokens], block_size=8, tp=2, dcp=DCP(world=2, interleave=4), num_blocks=6)
    positions, requests = torch.arange(16), torch.zeros(16, dtype=torch.int32)
    ranks = [
        cache.slots(int32([[5]]), requests, positions, layout, "latent", rank=r).tolist() for r in (0, 1)
    ]
    assert ranks[0] == [40, 41, 42, 43, -1, -1, -1, -1, 44, 45, 46, 47, -1, -1, -1, -1]
    assert ranks[1] == [-1, -1, -1, -1, 40, 41, 42, 43, -1, -1, -1, -1, 44, 45, 46, 47]
    assert ranks[0][9] == 45
    for length, counts in ((6, [4, 2]), (5, [4, 1])):
        assert [sum(slot >= 0 for slot in rank[:length]) for rank in ranks] == counts


def test_fault_11_two_roles_with_other_interleaves_do_not_start() -> None:
    with pytest.raises(CacheError, match="with interleave 64, decode over 2 rank"):
        cache.pair(kimi(dcp=DCP(world=2, interleave=64)), kimi(dcp=DCP(world=2)))
    same = kimi(dcp=DCP(world=2, interleave=64))
    assert same.key() == kimi(dcp=DCP(world=2, interleave=64)).key()
    assert same.key() != kimi(dcp=DCP(world=2)).key()


# --- class 23: units of pages ------------------------------------------------------------------------------------


def test_fault_23_a_compressed_entry_is_found_in_units_of_its_own_page() -> None:
    """Ratio 4, blocks of 128 tokens, table [7, 3, 9]: position 255 is entry 63, block 3, offset 31, slot 127."""
    keys = TokenCache(name="index", layers=(0,), entry_bytes=132, ratio=4)
    layout = cache.plan([keys], block_size=128, num_blocks=10)
    table, request = int32([[7, 3, 9]]), int32([0])
    assert cache.slots(table, request, int64(255), layout, "index").tolist() == [127]
    assert cache.slots(table, request, int64(3 * 128), layout, "index").tolist() == [-1]  # no fourth column


def test_fault_23_a_state_and_tokens_of_one_pool_never_overlap() -> None:
    """State 1,048,576 bytes, 1,024 bytes a token, blocks of 2,048: token 2,048 stands in block 1, state 0 before it."""
    state = StatePart(name="recurrent", dtype="float32", shape=(16, 128, 128))
    caches = [
        TokenCache(name="keys", layers=(0,), entry_bytes=1_024),
        StateCache(name="state", layers=(1,), heads=16, parts=(state,)),
    ]
    layout = cache.plan(caches, block_size=2_048, num_blocks=2)
    assert layout.block_bytes == 2_097_152
    pool = torch.zeros(layout.bytes, dtype=torch.uint8)
    views = layout.views(pool)
    token = cache.slots(int32([[0, 1]]), int32([0]), int64(2_048), layout, "keys").item()
    assert token == 2_048
    row = views["keys"][0].view(2, 2_048, 1_024)[token // 2_048, token % 2_048]
    assert row.data_ptr() - pool.data_ptr() == 2_097_152
    row.fill_(1)
    assert not views["recurrent"][1][0].any()
    assert views["recurrent"][1][0].data_ptr() == pool.data_ptr()
    with pytest.raises(CacheError, match="block_size=2176 is not a power of two"):
        cache.plan(caches, block_size=2_176)


def test_fault_23_a_small_state_is_padded_to_a_large_page_and_keeps_its_interval() -> None:
    """State page 1 MiB, draft page 2 MiB: both have rows of 2 MiB, states stay every 1,024 tokens."""
    state = StatePart(name="recurrent", dtype="float32", shape=(16, 128, 128))
    caches = [
        TokenCache(name="draft", layers=(0,), entry_bytes=2_048),
        StateCache(name="state", layers=(1,), heads=16, parts=(state,), interval=1_024),
    ]
    layout = cache.plan(caches, block_size=1_024, memory=1 << 24)
    assert layout.block_bytes == 2_097_152
    assert layout.num_blocks == 8
    assert layout.group("state").used == 1_048_576
    assert layout.group("state").tokens == 1_024
    view = layout.views(torch.zeros(layout.bytes, dtype=torch.uint8))["recurrent"][1]
    assert view.stride(0) * 4 == 2_097_152


def test_fault_23_an_index_page_is_64_tokens_whatever_the_block() -> None:
    """Keys stand before scales in each page of 64, not in each block of 256: token 70 is token 6 of page 1."""
    layout = kimi(block_size=256, num_blocks=2)
    pool = pool_of(layout)
    view = layout.views(pool)["index"][3]
    _, slots = cache.translate(None, int64(256 + 70), layout, "index")
    assert slots is not None
    run("store_index_keys", StoreIndexSpec(index=POW2))(torch.ones(1, 128), slots, view)
    page = layout.block_bytes + layout.index_offsets[0] + 8_448
    touched = (pool != POISON).nonzero().flatten()
    assert touched[0].item() == page + 6 * 128
    assert touched[-1].item() == page + 64 * 128 + 6 * 4 + 3
    assert len(touched) == 132
