"""The array of blocks on the host: what is taken, and put, are the bytes of the packed cache's own views."""

from __future__ import annotations

import pytest
import torch
from cache_cases import FP8, MXFP4, NVFP4, POW2, equal, small
from index_cases import int32
from torch import Tensor

from kimi_hal import cache
from kimi_hal.cache import Layout
from kimi_hal.errors import CacheError, UnknownNameError
from kimi_hal_tpu.pool import Pool

BLOCKS = 7
KINDS = ("latent", "index", "recurrent", "conv")


def layout_of(latent: str = FP8, index: str = POW2, conv: str = "width_channel") -> Layout:
    return cache.plan(small(latent, index, conv), block_size=128, num_blocks=BLOCKS)


def filled(layout: Layout) -> tuple[Pool, Tensor]:
    """Return an array of random blocks, and the same blocks as a pool of the packed cache."""
    packed = torch.randint(0, 256, (layout.bytes,), dtype=torch.uint8)
    last = torch.zeros(1, layout.block_bytes // 4, dtype=torch.int32)
    return Pool(layout, torch.cat([packed.view(torch.int32).view(BLOCKS, -1), last])), packed


def own(layout: Layout, packed: Tensor, kind: str, layer: int, block: int) -> Tensor:
    """Return one block's part of the packed cache's view."""
    view = layout.views(packed)[kind][layer]
    if kind != "index":
        return view[block : block + 1]
    first = block * layout.page_step(kind)
    return view[first : first + layout.pages(kind)]


@pytest.mark.parametrize(
    ("latent", "index", "conv"),
    [
        (FP8, POW2, "width_channel"),
        (NVFP4, MXFP4, "channel_width"),
        ("latent.flashmla.656", POW2, "width_channel"),
    ],
)
def test_what_is_taken_are_the_blocks_that_a_table_names(latent: str, index: str, conv: str) -> None:
    layout = layout_of(latent, index, conv)
    pool, packed = filled(layout)
    step = pool.step(int32([[5, 2], [0, -1]]))
    for kind in KINDS:
        for layer in layout.views(packed)[kind]:
            taken = pool.take(kind, layer, step).chunk(4)
            for part, block in zip(taken, (5, 2, 0), strict=False):
                assert equal(part, own(layout, packed, kind, layer, block)), (kind, layer)
            assert not taken[3].view(torch.uint8).any()  # what names nothing reads the row behind the blocks


def test_what_mosaic_reads_are_the_same_bytes_in_its_layouts() -> None:
    pool, _ = filled(layout_of())
    step = pool.step(int32([[3, 1, 6]]))
    pages, rows = pool.kernel("index", 5, step), pool.kernel("latent", 2, step)
    assert (pages.shape, pages.dtype) == ((3 * 2, 66, 128), torch.uint8)
    assert (rows.shape, rows.dtype) == ((3 * 128, 144), torch.int32)
    assert equal(pages.flatten(), pool.take("index", 5, step).flatten())
    assert equal(rows.flatten().view(torch.uint8), pool.take("latent", 2, step).flatten())


def test_numbers_of_a_step_name_the_bytes_that_the_pools_own_name() -> None:
    layout = layout_of()
    pool, packed = filled(layout)
    table = int32([[5, 2], [0, -1], [2, 9]])
    rows, positions = int32([0, 0, 1, 1, 2, 2]), torch.tensor([3, 200, 127, 128, 64, 130])
    step = pool.step(table)
    for kind, page, view in (("index", 64, 2), ("latent", 128, 5)):
        slots = cache.slots(table, rows, positions, layout, kind)
        own_table, own_slots = cache.translate(table, slots, layout, kind)
        new_table, new_slots = step.numbers(kind, step.slots(rows, positions, kind))
        assert own_table is not None
        assert own_slots is not None
        assert new_slots is not None
        assert ((new_table >= 0) == (own_table >= 0)).all()
        assert ((new_slots >= 0) == (own_slots >= 0)).all()
        before, after = layout.views(packed)[kind][view], pool.take(kind, view, step)
        named = own_table >= 0
        assert equal(after[new_table[named].long()], before[own_table[named].long()])
        live = own_slots >= 0
        assert (new_slots % page)[live].tolist() == (own_slots % page)[live].tolist()
        assert equal(after[(new_slots // page)[live]], before[(own_slots // page)[live]])


def test_what_is_put_changes_the_blocks_and_parts_that_are_named_and_nothing_else() -> None:
    layout = layout_of()
    pool, packed = filled(layout)
    step = pool.step(int32([[4, -1, 1]]))
    views = layout.views(packed)
    for kind, layer in (("latent", 5), ("index", 2), ("recurrent", 1), ("conv", 6)):
        value = torch.randint_like(pool.take(kind, layer, step).view(torch.uint8), 256)
        value = value.view(views[kind][layer].dtype)
        pool.put(kind, layer, step, value)
        for part, block in zip(value.chunk(3), (4, None, 1), strict=True):
            if block is not None:
                own(layout, packed, kind, layer, block).copy_(part)
    assert equal(pool.blocks[:BLOCKS].reshape(-1).view(torch.uint8), packed)


def test_a_step_without_blocks_takes_and_puts_nothing() -> None:
    pool, packed = filled(layout_of())
    step = pool.step(torch.zeros(0, 2, dtype=torch.int32))
    for kind, layer in (("latent", 2), ("index", 2), ("recurrent", 0)):
        taken = pool.take(kind, layer, step)
        assert taken.shape[0] == 0
        pool.put(kind, layer, step, taken)
    assert equal(pool.blocks[:BLOCKS].reshape(-1).view(torch.uint8), packed)


def test_what_a_pool_cannot_be_made_of_is_said() -> None:
    layout = layout_of()
    with pytest.raises(CacheError) as error:
        Pool(layout, torch.zeros(BLOCKS, layout.block_bytes // 4, dtype=torch.int32))
    assert str(error.value) == (
        f"the array of blocks must be int32 [8, {layout.block_bytes // 4}], one row more than blocks; "
        f"got int32 [7, {layout.block_bytes // 4}]"
    )
    with pytest.raises(CacheError, match="the layout has no blocks yet: layout"):
        Pool(cache.plan(small(), block_size=128))
    part = cache.StatePart(name="ring", dtype="uint8", shape=(5,))
    odd = cache.StateCache(name="odd", layers=(0,), heads=None, parts=(part,))
    with pytest.raises(CacheError, match=r"^ring is not whole words of 4 bytes$"):
        Pool(cache.plan([*small(), odd], block_size=128, num_blocks=2))
    with pytest.raises(CacheError, match="index has no layer 3; it has 2, 5"):
        Pool(layout).take("index", 3, Pool(layout).step(int32([[0]])))
    with pytest.raises(UnknownNameError, match="unknown token cache 'latents'"):
        Pool(layout).take("latents", 2, Pool(layout).step(int32([[0]])))


def test_tables_that_hold_no_int32_are_refused_before_a_block_is_named() -> None:
    pool, _ = filled(layout_of())
    wide, halves = torch.tensor([[1 << 32, (1 << 32) + 1]]), torch.tensor([[0.5, 1.9]])
    for table, got in (
        (wide, "int64 [1, 2]"),
        (halves, "float32 [1, 2]"),
        (int32([1, 2]), "int32 [2]"),
    ):
        with pytest.raises(CacheError) as error:
            pool.step(table)
        assert str(error.value) == f"block_table must be int32 [R, columns] on cpu, got {got} on cpu"


def test_copies_of_as_many_blocks_as_there_are_targets() -> None:
    pool, _ = filled(layout_of())
    before = pool.blocks.clone()
    with pytest.raises(CacheError) as error:
        pool.copy(int32([0, 1]), int32([2]))
    assert str(error.value) == "source names 2 blocks, target 1: each pair is one copy"
    with pytest.raises(CacheError, match=r"^source names 1 blocks, target 2: each pair is one copy$"):
        pool.copy(int32([0]), int32([1, 2]))
    with pytest.raises(CacheError) as error:
        pool.copy(int32([[0]]), torch.tensor([1 << 32]))
    assert str(error.value) == (
        "source must be int32 [n] on cpu, got int32 [1, 1] on cpu; "
        "target must be int32 [n] on cpu, got int64 [1] on cpu"
    )
    assert equal(pool.blocks, before)
    pool.copy(int32([0, 3, 9]), int32([1, -1, 2]))
    assert equal(pool.blocks[1], before[0])
    assert equal(pool.blocks[2:BLOCKS], before[2:BLOCKS])


def test_what_is_put_must_be_what_was_taken() -> None:
    pool, _ = filled(layout_of())
    before, step = pool.blocks.clone(), pool.step(int32([[4, 1]]))
    taken = pool.take("index", 2, step)
    for value, got in (
        (taken[:1], f"uint8 {[1, taken.shape[1]]}"),
        (taken.float(), f"float32 {list(taken.shape)}"),
        (taken.view(torch.int32), f"int32 {[4, taken.shape[1] // 4]}"),
        (pool.take("latent", 2, step), f"uint8 {[2, 128 * 576]}"),
    ):
        with pytest.raises(CacheError) as error:
            pool.put("index", 2, step, value)
        assert str(error.value) == (
            f"index of layer 2 is uint8 [4, {taken.shape[1]}] on cpu in a step of 2 blocks, got {got} on cpu: "
            "give what take('index', 2, step) returned"
        )
    assert equal(pool.blocks, before)
