"""Real operators over the views of one packed pool: the same bits as over separate caches, and no byte more."""

from __future__ import annotations

import pytest
from cache_cases import FP8, MXFP4, NVFP4, POISON, POW2, Caches, Step, equal, pool_of, small

from kimi_hal import cache

FORMATS = [
    (FP8, POW2, "width_channel"),
    (FP8, MXFP4, "channel_width"),
    (NVFP4, POW2, "channel_width"),
    (NVFP4, MXFP4, "width_channel"),
    ("latent.bf16", "index.fp8.e4m3fnuz.f32.shuffled.page64", "width_channel"),
    ("latent.flashmla.656", "index.mxfp4.gfx950.page64", "channel_width"),
]


@pytest.mark.parametrize(("latent", "index", "conv"), FORMATS)
def test_a_step_over_packed_views_gives_the_bits_of_separate_caches(
    latent: str, index: str, conv: str
) -> None:
    layout = cache.plan(small(latent, index, conv), block_size=128, num_blocks=13)
    pool, plain = pool_of(layout), Caches.plain(layout)
    packed = Step(Caches.packed(layout, pool)).run()
    apart = Step(plain)
    separate = apart.run()
    assert packed.keys() == separate.keys()
    assert len(packed) == 4 * 2 + 2 * 5
    for name, value in packed.items():
        assert equal(value, separate[name]), name
    assert equal(pool, apart.expected(layout))


def test_a_step_writes_every_layer_of_the_blocks_that_it_names_and_no_other_block() -> None:
    layout = cache.plan(small(), block_size=128, num_blocks=14)
    pool = pool_of(layout)
    step = Step(Caches.packed(layout, pool))
    step.run()
    named = {
        block for ids in (*step.blocks, *step.state_blocks[: len(layout.groups) - 1]) for block in ids
    } - {-1}
    rows = pool.view(layout.num_blocks, layout.block_bytes)
    touched = {block for block in range(layout.num_blocks) if not (rows[block] == POISON).all()}
    assert touched == named
    for group in layout.groups:
        for place in group.places:
            parts = [rows[block, place.offset : place.end] for block in named]
            assert any(not (part == POISON).all() for part in parts), place
