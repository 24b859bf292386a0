"""What only an accelerator shows of the packed cache: a captured translation, pinned copies, device memory moved."""

from __future__ import annotations

import pytest
import torch
import transfer_child as child
from cache_cases import equal, kimi
from index_cases import int32

from kimi_hal import cache
from kimi_hal.cache import HostTier
from kimi_hal.cache.transfer import Endpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_captured_translation_replays_with_new_numbers() -> None:
    layout = kimi(block_size=256, num_blocks=64)
    table = torch.zeros(4, 8, dtype=torch.int32, device="cuda")
    requests, positions = (
        torch.zeros(32, dtype=dtype, device="cuda") for dtype in (torch.int32, torch.int64)
    )
    out = (
        torch.zeros(4, 32, dtype=torch.int32, device="cuda"),
        torch.zeros(40, dtype=torch.int64, device="cuda"),
    )

    def step() -> None:
        cache.translate(
            table, cache.slots(table, requests, positions, layout, "index"), layout, "index", out=out
        )

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed in range(3):
        random = torch.Generator().manual_seed(seed)
        new = [
            torch.randint(-1, 66, table.shape, generator=random, dtype=torch.int32),
            torch.randint(-1, 5, requests.shape, generator=random, dtype=torch.int32),
            torch.randint(-1, 9 * 256, positions.shape, generator=random),
        ]
        for fixed, value in zip((table, requests, positions), new, strict=True):
            fixed.copy_(value)
        graph.replay()
        pages, slots = cache.translate(new[0], cache.slots(*new, layout, "index"), layout, "index")
        assert pages is not None
        assert slots is not None
        assert equal(out[0].cpu(), pages)
        assert equal(out[1][:32].cpu(), slots)
        assert (out[1][32:] == -1).all()


def test_blocks_go_to_pinned_memory_and_back() -> None:
    layout = kimi(block_size=64, num_blocks=6)
    pool = torch.randint(0, 256, (layout.bytes,), dtype=torch.uint8, device="cuda")
    rows, before = pool.view(6, -1), pool.clone().view(6, -1)
    tier = HostTier(layout, 3, pinned=True)
    tier.store(pool, [1, 2, 5], [2, 0, 1])
    rows[[1, 2, 5]] = 0
    tier.load(pool, [2, 0, 1], [5, 1, 2])
    torch.cuda.synchronize()
    assert equal(rows[[5, 1, 2]], before[[1, 2, 5]])
    assert equal(rows[[0, 3, 4]], before[[0, 3, 4]])


def test_views_of_device_memory_are_written_where_the_layout_says() -> None:
    layout = kimi(block_size=64, num_blocks=3)
    pool, alone = (
        torch.zeros(layout.bytes, dtype=torch.uint8, device="cuda"),
        torch.zeros(layout.bytes, dtype=torch.uint8),
    )
    for target in (pool, alone):
        views = layout.views(target)
        for number, kind in enumerate(views):
            for layer, view in views[kind].items():
                view[number % 3] = number + layer % 7
    assert equal(pool.cpu(), alone)


def test_blocks_of_device_memory_move_between_two_processes() -> None:
    pytest.importorskip("nixl", reason="block transfer needs the nixl wheel")
    other = child.Prefill(device="cuda")
    layout = child.layout(child.BLOCK, child.TP)
    here = Endpoint(
        "decode-device", torch.full((layout.bytes,), 0xFF, dtype=torch.uint8, device="cuda"), layout
    )
    peer = here.meet(other.cards[1])
    assert (here.memory, peer.memory) == ("VRAM", "VRAM")
    moves = cache.pair(peer.layout, layout).moves(1, {"tokens": [3, 4, 5]}, {"tokens": [7, 1, 2]})[1]
    here.read(peer, moves)
    torch.cuda.synchronize()
    theirs, ours = other.ask("pool", 1).view(child.BLOCKS, -1), here.pool.cpu().view(child.BLOCKS, -1)
    other.end()
    assert equal(ours[[7, 1, 2]], theirs[[3, 4, 5]])
    others = int32([b for b in range(child.BLOCKS) if b not in (7, 1, 2)])
    assert (ours[others] == 0xFF).all()
    here.close()
