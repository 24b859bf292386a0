"""The planner: row arithmetic, groups, what can be described by data, and every refusal in one sentence."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from typing import Any

import pytest
from cache_cases import FP8, MXFP4, NVFP4, POW2, kimi, small, states
from hypothesis import assume, given
from hypothesis import strategies as st

from kimi_hal import cache, formats
from kimi_hal.cache import Layout, TokenCache, models
from kimi_hal.errors import CacheError, UnknownNameError
from kimi_hal.model import K3_1_PRO
from kimi_hal.ops.spec import DCP


def refusal(**fields: Any) -> str:
    with pytest.raises(CacheError) as caught:
        kimi(**fields)
    return str(caught.value)


# --- the row ------------------------------------------------------------------------------------------


def test_a_row_holds_all_latent_pages_then_all_index_pages() -> None:
    layout = kimi(block_size=64)
    latents, keys = 64 * 576, 64 * 132
    assert layout.latent_offsets == tuple(i * latents for i in range(24))
    assert layout.index_offsets == tuple(24 * latents + i * keys for i in range(24))
    assert [place.layer for _, place in layout.places("latent")] == list(K3_1_PRO.full_attention_layers)
    assert layout.used_bytes == 24 * 64 * (576 + 132) == 1_087_488


@pytest.mark.parametrize(
    ("latent", "index", "block_size", "tp", "row", "percent"),
    [
        (FP8, POW2, 64, 8, 1_089_792, 0.21),
        (FP8, POW2, 1024, 8, 17_411_328, 0.07),
        (NVFP4, MXFP4, 64, 16, 670_208, 3.89),
        (NVFP4, MXFP4, 128, 8, 1_292_544, 0.18),
        (NVFP4, POW2, 128, 8, 1_486_848, 0.0),
        (FP8, MXFP4, 64, 8, 1_018_368, 2.95),
        ("latent.bf16", POW2, 64, 8, 1_976_832, 0.23),
        (FP8, None, 64, 8, 884_736, 0.0),
    ],
)
def test_a_row_is_padded_to_whole_latent_rows_and_whole_index_pages(
    latent: str, index: str | None, block_size: int, tp: int, row: int, percent: float
) -> None:
    layout = kimi(latent=latent, index=index, block_size=block_size, tp=tp)
    assert layout.block_bytes == row
    assert round(100 * layout.padding, 2) == percent
    assert row % formats.latent(latent).row_bytes == 0
    assert index is None or row % formats.index(index).page_bytes == 0


@pytest.mark.parametrize("latent", formats.names("latent"))
@pytest.mark.parametrize("index", [*formats.names("index"), None])
def test_any_latent_goes_with_any_index_format(latent: str, index: str | None) -> None:
    layout = kimi(latent=latent, index=index, block_size=256, tp=32)
    each = formats.latent(latent).row_bytes + (formats.index(index).row_bytes if index else 0)
    assert layout.used_bytes == 24 * 256 * each
    assert layout.block_bytes - layout.used_bytes < math.lcm(
        256, formats.latent(latent).row_bytes, formats.index(index).page_bytes if index else 1
    )


def test_entries_of_tokens_are_the_same_at_every_tensor_parallel_size() -> None:
    rows = {kimi(tp=tp).block_bytes for tp in (4, 8, 16, 96)}
    assert rows == {17_411_328}
    assert {kimi(tp=tp).groups[0] for tp in (4, 8, 16, 96)} == {kimi().groups[0]}


# --- groups of states ---------------------------------------------------------------------------------


def test_a_state_is_its_recurrent_part_and_its_conv_part() -> None:
    state = kimi().state("kda")
    assert state.state_bytes(1) == 6_291_456 + 221_184
    assert state.state_bytes(8) == 786_432 + 27_648 == 814_080
    assert state.offsets(8) == {"recurrent": 0, "conv": 786_432}


@pytest.mark.parametrize(
    ("block_size", "tp", "sizes"),
    [
        (1024, 8, [18, 17, 17, 17]),  # 21 of 814,080 bytes fit 17,411,328
        (2048, 8, [35, 34]),  # 42 fit 34,822,656
        (2048, 16, [69]),
        (64, 8, [1] * 69),
        (8192, 1, [18, 17, 17, 17]),
    ],
)
def test_states_are_dealt_to_the_fewest_groups_that_fit(block_size: int, tp: int, sizes: list[int]) -> None:
    layout = kimi(block_size=block_size, tp=tp)
    assert [len(group.places) for group in layout.groups[1:]] == sizes
    assert sorted(p.layer for g in layout.groups[1:] for p in g.places) == list(K3_1_PRO.kda_layers)
    assert all(group.used <= layout.block_bytes for group in layout.groups)


def test_layers_are_dealt_in_turn() -> None:
    layers = K3_1_PRO.kda_layers
    assert [p.layer for p in kimi().group("kda.1").places] == list(layers[1::4])


@given(
    block=st.integers(6, 13),
    tp=st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96]),
    latent=st.sampled_from(formats.names("latent")),
    index=st.sampled_from([*formats.names("index"), None]),
)
def test_nothing_in_a_group_overlaps_and_all_of_it_is_inside_the_row(
    block: int, tp: int, latent: str, index: str | None
) -> None:
    fields: dict[str, Any] = {"block_size": 1 << block, "tp": tp, "latent": latent, "index": index}
    state = K3_1_PRO.kda_heads // tp * (128 * 128 * 4 + 3 * 3 * 128 * 2)
    each = formats.latent(latent).row_bytes + (formats.index(index).row_bytes if index else 0)
    assume(state <= (24 * each) << block)
    layout = kimi(**fields)
    for group in layout.groups:
        ends = [0, *(place.end for place in group.places)]
        assert [place.offset for place in group.places] == ends[:-1]
        assert ends[-1] == group.used <= layout.block_bytes
    assert layout.block_bytes % 256 == 0


# --- described by data ----------------------------------------------------------------------------------


def test_glm_5_3_flash_is_planned_from_its_description() -> None:
    layout = cache.plan(models.glm_5_3_flash(), block_size=2048, tp=2)
    assert layout.entries("latent") == 2048
    assert layout.entries("index") == 512
    assert layout.pages("index") == 8
    assert layout.used_bytes == 11 * (2048 * 576 + 512 * 132)
    assert layout.state("kda").state_bytes(2) == 2_097_152 + 73_728
    assert layout.state("ring").state_bytes(2) == layout.state("ring").state_bytes(1) == 2048
    assert sum(len(group.places) for group in layout.groups[1:]) == 34 + 11


def test_deepseek_v4_flash_is_planned_from_its_description() -> None:
    layout = cache.plan(models.deepseek_v4_flash(), block_size=256)
    four, many = layout.places("latent4"), layout.places("latent128")
    assert (len(four), four[0][1].bytes) == (21, 37_440)  # 64 entries of 584, to whole 576
    assert (len(many), many[0][1].bytes) == (20, 1_728)
    assert layout.places("index")[0][1].bytes == 8_640
    assert layout.block_bytes == layout.used_bytes == 21 * (37_440 + 8_640) + 20 * 1_728
    assert layout.block_bytes % 576 == 0
    assert [g.name for g in layout.groups if g.window == 128] == [
        "window128x64.0",
        "window128x64.1",
        "window128x8",
    ]
    assert layout.group("window8x4").blocks(10**6) == 3  # a window of 8 may touch 3 blocks of 4
    assert layout.group("tokens").blocks(1 << 20) == 4096


def test_a_model_of_states_alone_has_a_row_of_its_states() -> None:
    layout = cache.plan(states(1000, 3000), block_size=64)
    assert layout.block_bytes == 1024 + 3072
    assert [group.name for group in layout.groups] == ["state0+state1"]


def test_states_kept_at_another_interval_have_blocks_of_their_own() -> None:
    layout = cache.plan((*states(512), *small()), block_size=128, tp=4)
    kept = cache.plan((*states(512, interval=256), *small()), block_size=128, tp=4)
    assert [group.name for group in layout.groups] == ["tokens", "state0+kda"]
    assert [(g.name, g.tokens) for g in kept.groups] == [("tokens", 128), ("state0", 256), ("kda", None)]


def test_replicated_index_keys_stand_in_full_on_every_rank() -> None:
    sharded, replicated = (
        kimi(block_size=128, dcp=DCP(world=8, index=how)) for how in ("sharded", "replicated")
    )
    assert [x.entries("index") for x in (sharded, replicated)] == [128, 1024]
    assert [x.pages("index") for x in (sharded, replicated)] == [2, 16]
    assert [x.dcp(3, "index").world for x in (sharded, replicated)] == [8, 1]
    assert sharded.dcp(3) == DCP(world=8, rank=3)


# --- sizes ------------------------------------------------------------------------------------------------


def test_memory_is_cut_into_whole_rows() -> None:
    layout = kimi(memory=52 * 10**9)
    assert layout.num_blocks == 52 * 10**9 // 17_411_328 == 2986
    assert layout.bytes == 2986 * 17_411_328
    assert kimi(num_blocks=5).num_blocks == 5
    assert kimi().num_blocks == 0


def test_table_width_and_columns_count_in_their_own_blocks() -> None:
    layout = kimi(dcp=8)
    assert layout.table_width == 128
    assert layout.columns("latent") == 128
    assert layout.columns("index") == 128 * 16
    assert layout.group("kda.0").blocks(1 << 20) == 1
    windows = cache.plan(models.deepseek_v4_flash(), block_size=256)
    assert windows.columns("window") == (1 << 20) // 64
    assert kimi(max_context=1025).table_width == 2


def test_a_layout_survives_json() -> None:
    for layout in (kimi(num_blocks=3), cache.plan(models.deepseek_v4_flash(), block_size=256)):
        again = Layout.from_dict(json.loads(json.dumps(layout.to_dict())))
        assert again == layout
        assert again.key() == layout.key()
        assert hash(again) == hash(layout)


def test_planning_imports_no_torch() -> None:
    code = (
        "import sys, kimi_hal as hal\n"
        f"layout = hal.cache.plan(block_size=64, tp=8, latent={FP8!r}, index={POW2!r}, num_blocks=4)\n"
        "hal.cache.pair(layout, layout).moves(0, {'tokens': [1]}, {'tokens': [2]})\n"
        "hal.cache.descriptors(layout, [3]), hal.cache.capacity(layout, 10**10)\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --- refusals ---------------------------------------------------------------------------------------------


def test_refuses_a_block_size_that_is_no_power_of_two() -> None:
    assert refusal(block_size=1000) == (
        "block_size=1000 is not a power of two, so blocks of instances of other sizes could not pair with it: "
        "use 512 or 1024"
    )
    assert refusal(block_size=0).endswith("pair with it: use 1 to 1048576")


def test_refuses_a_block_that_is_not_whole_index_pages() -> None:
    assert refusal(block_size=32) == (
        "a block of 32 tokens is not whole pages of 64 entries of index; use block_size=64 or a larger power of two"
    )


def test_refuses_a_state_that_does_not_fit_the_row() -> None:
    assert refusal(block_size=64, tp=1) == (
        "one layer's kda, 6,512,640 bytes, does not fit a block row of 1,089,792 bytes; use block_size=512, or "
        "more than tp=1 ranks to divide the heads"
    )
    assert kimi(block_size=512, tp=1).groups[1].used == 6_512_640


def test_refuses_sizes_that_do_not_divide_and_gives_all_reasons() -> None:
    assert refusal(tp=5, dcp=2, block_size=96) == (
        "block_size=96 is not a power of two, so blocks of instances of other sizes could not pair with it: "
        "use 64 or 128; dcp=2 does not divide tp=5: a DCP group is ranks of the tensor-parallel group; "
        "tp=5 does not divide 96 heads of kda; possible: [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96]"
    )
    assert refusal(tp=0) == "tp=0 must be at least 1"


def test_refuses_an_interleave_that_leaves_a_block() -> None:
    assert refusal(dcp=DCP(world=2, interleave=48)) == (
        "interleave=48 does not divide block_size=1024: use a power of two up to it"
    )


def test_refuses_an_unknown_format_with_the_nearest() -> None:
    with pytest.raises(
        UnknownNameError, match=r"unknown latent format 'latent.nvfp4.353'; did you mean 'latent.nvfp4.352'"
    ):
        kimi(latent="latent.nvfp4.353")
    with pytest.raises(
        UnknownNameError, match=r"unknown index format 'index.mxfp4'; did you mean 'index.mxfp4.page64'"
    ):
        kimi(index="index.mxfp4")


def test_refuses_formats_that_are_missing_or_not_the_models() -> None:
    assert refusal(latent=None) == (
        "latent= is missing: Kimi K3.1 Pro needs a latent format, latent.fp8.e4m3fn.tensor"
    )
    with pytest.raises(CacheError, match="latent= and index= belong to a Model; descriptions name their own"):
        cache.plan(small(), block_size=64, latent=FP8)


def test_refuses_an_unknown_conv_layout() -> None:
    assert refusal(conv_layout="channel_first") == (
        "conv_layout='channel_first' is not 'width_channel' | 'channel_width'; did you mean 'channel_width'?"
    )


def test_refuses_a_memory_without_a_block() -> None:
    assert refusal(memory=10**6) == (
        "not one block of 17,411,328 bytes fits: memory=1000000, num_blocks=None; give at least 17,411,328 bytes "
        "or a smaller block_size"
    )
    assert (
        refusal(memory=10**9, num_blocks=1)
        == "give either memory= in bytes or num_blocks=, got both or neither"
    )


def test_refuses_page_numbers_beyond_int32() -> None:
    assert refusal(num_blocks=1 << 20) == (
        "1,048,576 blocks are 2,161,115,136 pages of index, beyond the int32 of block tables; use fewer blocks or "
        "a larger page"
    )


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"entry_bytes": 0}, "cache 'x': entry_bytes=0 must be at least 1"),
        ({"layers": (1, 1)}, "'x' must name at least one layer, and each once; got [1, 1]"),
        ({"layers": ()}, "'x' must name at least one layer, and each once; got []"),
        (
            {"block_size": 64},
            "cache 'x': block_size=64 needs a window; caches of the whole history share the plan's block_size",
        ),
    ],
)
def test_refuses_a_description_that_makes_no_sense(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(CacheError) as caught:
        TokenCache(**({"name": "x", "layers": (0,), "entry_bytes": 8} | fields))
    assert str(caught.value) == sentence


def test_refuses_parts_that_heads_do_not_divide() -> None:
    part = cache.StatePart(name="s", dtype="float32", shape=(6, 2))
    with pytest.raises(
        CacheError, match=r"state 'x': 4 heads and 1 segments do not divide axis 0 of s \[6, 2\]"
    ):
        cache.StateCache(name="x", layers=(0,), heads=4, parts=(part,))
    with pytest.raises(CacheError, match="state part 's': dtype 'int4' is not float32 or bfloat16"):
        cache.StatePart(name="s", dtype="int4", shape=(6,))
    with pytest.raises(CacheError, match=r"state part 's': axis 1 is not in shape \[6\]"):
        cache.StatePart(name="s", dtype="uint8", shape=(6,), axis=1)


def test_refuses_descriptions_of_one_name_and_none_at_all() -> None:
    with pytest.raises(CacheError, match=r"each its own name; got \['state0', 'state0'\]"):
        cache.plan([*states(8), *states(8)], block_size=64)
    with pytest.raises(CacheError, match=r"at least one description, and each its own name; got \[\]"):
        cache.plan([], block_size=64)


def test_refuses_two_parts_of_one_name() -> None:
    one = states(8)[0]
    with pytest.raises(CacheError, match=r"each its own name; got \['part0', 'part0'\]"):
        cache.plan([one, dataclasses.replace(one, name="other")], block_size=64)


def test_refuses_entries_that_ranks_would_split() -> None:
    compressed = TokenCache(name="c", layers=(0,), entry_bytes=8, ratio=4)
    with pytest.raises(
        CacheError, match="interleave=2 splits entries of 4 tokens of c over ranks: use a multiple of 4"
    ):
        cache.plan([compressed], block_size=64, tp=2, dcp=DCP(world=2, interleave=2))
    with pytest.raises(CacheError, match="a block of 64 tokens is not whole entries of 128 tokens of c"):
        cache.plan([TokenCache(name="c", layers=(0,), entry_bytes=8, ratio=128)], block_size=64)


def test_refuses_an_interval_that_is_not_whole_blocks() -> None:
    with pytest.raises(CacheError, match="state0 is kept every 100 tokens, which is not whole blocks of 64"):
        cache.plan(states(8, interval=100), block_size=64)


def test_names_the_nearest_of_an_unknown_cache_state_and_group() -> None:
    layout = kimi()
    with pytest.raises(UnknownNameError, match="unknown token cache 'latents'; did you mean 'latent'"):
        layout.cache("latents")
    with pytest.raises(UnknownNameError, match="unknown state cache 'kda_'; did you mean 'kda'"):
        layout.state("kda_")
    with pytest.raises(UnknownNameError, match=r"unknown group 'kda.9'; did you mean 'kda.3'"):
        layout.group("kda.9")
    with pytest.raises(UnknownNameError, match=r"unknown cache 'keys'\. Known: index, kda, latent"):
        layout.offsets("keys")
