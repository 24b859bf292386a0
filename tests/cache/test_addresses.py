"""Translation of block tables and slots to kernel pages, and the slots of positions under DCP."""

from __future__ import annotations

import pytest
import torch
from cache_cases import MXFP4, NVFP4, kimi
from hypothesis import given
from hypothesis import strategies as st
from index_cases import int32
from torch import Tensor

from kimi_hal import cache
from kimi_hal.cache import Layout, TokenCache, models
from kimi_hal.errors import CacheError, UnknownNameError
from kimi_hal.ops.spec import DCP
from kimi_hal.parallel import ownership


def int64(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def translated(
    table: Tensor | None, slots: Tensor | None, layout: Layout, kind: str
) -> tuple[object, object]:
    a, b = cache.translate(table, slots, layout, kind)
    return None if a is None else a.tolist(), None if b is None else b.tolist()


# --- translate ----------------------------------------------------------------------------------------------


def test_latents_keep_an_engines_own_numbers() -> None:
    layout = kimi(block_size=256, num_blocks=8)
    assert translated(int32([[5, 0, 7]]), int64([5 * 256 + 255, 0]), layout, "latent") == (
        [[5, 0, 7]],
        [1535, 0],
    )


def test_index_pages_of_a_block_follow_each_other_and_blocks_are_a_row_apart() -> None:
    layout = kimi(block_size=256, num_blocks=8)
    step = layout.block_bytes // 8448
    assert step == layout.page_step("index") == 516
    table, slots = translated(int32([[5, 0], [2, 3]]), int64([5 * 256 + 70, 255]), layout, "index")
    assert table == [
        [2580, 2581, 2582, 2583, 0, 1, 2, 3],
        [1032, 1033, 1034, 1035, 1548, 1549, 1550, 1551],
    ]
    assert slots == [2581 * 64 + 6, 3 * 64 + 63]


@pytest.mark.parametrize("kind", ["latent", "index"])
def test_negative_numbers_and_blocks_beyond_the_pool_become_minus_one(kind: str) -> None:
    layout = kimi(block_size=64, num_blocks=4)
    table, slots = translated(
        int32([[-1, -7, 4, 2**31 - 1]]), int64([-1, -(2**62), 256, 2**40]), layout, kind
    )
    assert table == [[-1] * 4]
    assert slots == [-1] * 4


def test_fixed_buffers_are_filled_to_their_ends() -> None:
    layout = kimi(block_size=128, num_blocks=4)
    tables, slots = torch.full((3, 6), 99, dtype=torch.int32), torch.full((5,), 99)
    given = (int32([[1, 2]]), int64([128, -1]))
    back = cache.translate(*given, layout, "index", out=(tables, slots))
    assert back[0] is tables
    assert back[1] is slots
    step = layout.page_step("index")
    assert tables.tolist() == [[step, step + 1, 2 * step, 2 * step + 1, -1, -1], [-1] * 6, [-1] * 6]
    assert slots.tolist() == [step * 64, -1, -1, -1, -1]


def test_only_a_table_or_only_slots() -> None:
    layout = kimi(block_size=64, num_blocks=4)
    assert translated(int32([[1]]), None, layout, "latent") == ([[1]], None)
    assert translated(None, int64([3]), layout, "latent") == (None, [3])


def test_an_empty_step() -> None:
    layout = kimi(block_size=128, num_blocks=4)
    table, slots = cache.translate(torch.zeros(0, 3, dtype=torch.int32), int64([]), layout, "index")
    assert table is not None
    assert slots is not None
    assert (table.shape, slots.shape) == ((0, 6), (0,))


def test_a_strided_table_is_read_by_its_strides() -> None:
    layout = kimi(block_size=64, num_blocks=8)
    wide = int32([[1, 9, 2, 9], [3, 9, 4, 9]])
    assert translated(wide[:, ::2], wide[:, 0].long(), layout, "latent") == ([[1, 2], [3, 4]], [1, 3])


@given(st.integers(6, 12), st.lists(st.integers(0, 2**20), min_size=1, max_size=20), st.booleans())
def test_a_slot_and_the_table_name_the_same_byte(block: int, places: list[int], small: bool) -> None:
    layout = kimi(
        block_size=1 << block, tp=96, num_blocks=64, **({"latent": NVFP4, "index": MXFP4} if small else {})
    )
    table = torch.randperm(64, generator=torch.Generator().manual_seed(block)).int()[None]
    positions = int64([place % (64 << block) for place in places])
    slots = cache.slots(table, torch.zeros(len(positions), dtype=torch.int32), positions, layout, "index")
    pages, moved = cache.translate(table, slots, layout, "index")
    assert pages is not None
    assert moved is not None
    page = layout.cache("index").page
    assert page is not None
    assert moved.tolist() == (pages[0, positions // page].long() * page + positions % page).tolist()
    byte = moved // page * layout.cache("index").page_bytes(page)
    assert (byte // layout.block_bytes).tolist() == table[0, positions >> block].tolist()


def test_refuses_dtypes_shapes_and_small_buffers_with_all_reasons() -> None:
    layout = kimi(block_size=128, num_blocks=4)
    with pytest.raises(CacheError) as caught:
        cache.translate(
            torch.zeros(2, 2),
            int32([1]),
            layout,
            "index",
            out=(torch.zeros(2, 3, dtype=torch.int32), torch.zeros(0, dtype=torch.int64)),
        )
    assert str(caught.value) == (
        "block_table must be int32 with 2 dimension(s), got float32 [2, 2]; "
        "out of block_table must be at least [2, 4], got [2, 3]; "
        "slots must be int64 with 1 dimension(s), got int32 [1]; "
        "out of slots must be at least [1], got [0]"
    )


def test_states_need_no_translation() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown token cache 'kda'\. Known: index, latent"):
        cache.translate(int32([[1]]), None, kimi(num_blocks=2), "kda")


# --- slots --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world", "interleave"), [(1, 1), (2, 1), (8, 1), (2, 4), (4, 64)])
def test_every_position_stands_on_one_rank_at_its_local_place(world: int, interleave: int) -> None:
    layout = kimi(block_size=64, num_blocks=9, tp=8, dcp=DCP(world=world, interleave=interleave))
    positions = torch.arange(3 * 64 * world)
    table, requests = int32([[7, 2, 5]]), torch.zeros(len(positions), dtype=torch.int32)
    owners = torch.zeros(len(positions), dtype=torch.int64)
    for rank in range(world):
        found = cache.slots(table, requests, positions, layout, "latent", rank=rank)
        owners += found >= 0
        local = ownership.local(positions, layout.dcp(rank))[found >= 0]
        assert found[found >= 0].tolist() == (table[0, local // 64].long() * 64 + local % 64).tolist()
        assert local.tolist() == list(range(3 * 64))
    assert (owners == 1).all()


def test_positions_without_a_slot_get_minus_one() -> None:
    layout = kimi(block_size=64, num_blocks=9)
    table = int32([[3, -1], [4, 5]])
    requests = int32([0, 0, 0, 1, -1, 2, 1])
    positions = int64([0, 64, 128, 64, 0, 0, -1])
    assert cache.slots(table, requests, positions, layout, "latent").tolist() == [
        192,
        -1,
        -1,
        320,
        -1,
        -1,
        -1,
    ]


def test_an_empty_table_has_no_slot() -> None:
    layout = kimi(block_size=64, num_blocks=9)
    found = cache.slots(torch.zeros(0, 4, dtype=torch.int32), int32([0]), int64([5]), layout, "index")
    assert found.tolist() == [-1]


def test_positions_of_one_compressed_entry_share_a_slot() -> None:
    layout = cache.plan(models.glm_5_3_flash(), block_size=2048, tp=2, num_blocks=9)
    found = cache.slots(int32([[4, 6]]), int32([0] * 4), int64([0, 3, 4, 2051]), layout, "index")
    assert found.tolist() == [4 * 512, 4 * 512, 4 * 512 + 1, 6 * 512]
    moved = cache.translate(None, found, layout, "index")[1]
    assert moved is not None
    step = layout.page_step("index")
    assert moved.tolist() == [4 * step * 64, 4 * step * 64, 4 * step * 64 + 1, 6 * step * 64]


def test_replicated_keys_have_a_slot_on_every_rank() -> None:
    layout = kimi(block_size=64, num_blocks=9, dcp=DCP(world=2, index="replicated"))
    positions, requests = int64([0, 1, 127, 128]), int32([0] * 4)
    for rank in (0, 1):
        found = cache.slots(int32([[3, 1]]), requests, positions, layout, "index", rank=rank)
        assert found.tolist() == [3 * 128, 3 * 128 + 1, 3 * 128 + 127, 128]
    assert cache.slots(int32([[3, 1]]), requests, positions, layout, "latent", rank=1).tolist() == [
        -1,
        192,
        255,
        -1,
    ]


def test_a_window_counts_in_blocks_of_its_own() -> None:
    window = TokenCache(name="window", layers=(0,), entry_bytes=8, window=128, block_size=64)
    whole = TokenCache(name="whole", layers=(0,), entry_bytes=8)
    layout = cache.plan([whole, window], block_size=256, num_blocks=9)
    table = int32([[-1, -1, 5, 6]])  # what has left the window has no block
    found = cache.slots(table, int32([0, 0, 0]), int64([127, 128, 255]), layout, "window")
    assert found.tolist() == [-1, 5 * 64, 6 * 64 + 63]
