"""Prefill and decode instances of other sizes: what a decode rank reads is what it would have written."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from cache_cases import FP8, MXFP4, NVFP4, equal, kimi, pool_of, small, states
from torch import Tensor

from kimi_hal import cache
from kimi_hal.cache import Layout, TokenCache, models
from kimi_hal.errors import CacheError, UnknownNameError
from kimi_hal.ops.spec import DCP

TOKENS = 300


def content(layout: Layout, blocks: dict[str, list[int]], rank: int, pool: Tensor) -> None:
    """Fill one request's blocks with what depends on token, layer and head alone, as an instance would."""
    views = layout.views(pool)
    tokens = torch.arange(len(blocks["tokens"]) * layout.block_size)
    for cached in layout.caches:
        for layer, view in views[cached.name].items():
            unit = cached.page or 1  # a page is opaque: its bytes depend on which tokens it holds
            row = cached.page_bytes(unit)
            made = [((tokens[::unit, None] * 7 + torch.arange(row) * 3 + layer) % 251).to(torch.uint8)]
            flat = torch.cat(made).reshape(len(blocks["tokens"]), layout.pages(cached.name), -1)
            step = layout.page_step(cached.name)
            for i, block in enumerate(blocks["tokens"]):
                view[block * step : block * step + layout.pages(cached.name)] = flat[i]
    for state in layout.states:
        for group, place in layout.places(state.name):
            for part in state.parts:
                random = torch.Generator().manual_seed(place.layer)
                whole = torch.randn(part.shape, generator=random)
                share = whole.reshape(
                    *part.shape[: part.axis], len(part.segments), layout.tp, -1, *part.shape[part.axis + 1 :]
                ).select(part.axis + 1, rank)
                shape = part.local_shape(layout.tp)
                views[part.name][place.layer][blocks[group.name][0]] = share.reshape(shape)


def request(layout: Layout, tokens: int = TOKENS, first: int = 0) -> dict[str, list[int]]:
    """Return blocks for a request: every second block, downwards, then one for each group of states."""
    count = -(-tokens // (layout.block_size * layout.world))
    blocks = {"tokens": [2 * i + 1 for i in range(count)][::-1]}
    others = [group.name for group in layout.groups if group.name != "tokens"]
    return blocks | {name: [2 * i] for i, name in enumerate(others)}


def planned(block_size: int, tp: int, conv: str = "channel_width", **fields: Any) -> Layout:
    return cache.plan(small(conv_layout=conv, **fields), block_size=block_size, tp=tp, num_blocks=24)


SIZES = [
    (64, 4, 64, 4),
    (64, 4, 128, 2),
    (64, 4, 256, 1),
    (128, 2, 64, 4),
    (256, 1, 128, 2),
    (128, 1, 128, 4),
    (64, 1, 256, 1),  # five groups of states to one
    (256, 2, 64, 1),
]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("conv", ["channel_width", "width_channel"])
def test_a_decode_rank_reads_what_it_would_have_written(sizes: tuple[int, int, int, int], conv: str) -> None:
    prefill, decode = planned(sizes[0], sizes[1], conv), planned(sizes[2], sizes[3], conv)
    pairing = cache.pair(prefill, decode)
    source, target = request(prefill), request(decode)
    pools = []
    for rank in range(prefill.tp):
        pools.append(pool_of(prefill))
        content(prefill, source, rank, pools[-1])
    for rank in range(decode.tp):
        got, expected = pool_of(decode), pool_of(decode)
        for peer, moves in pairing.moves(rank, source, target).items():
            cache.copy(moves, pools[peer], got)
        content(decode, target, rank, expected)
        for name, blocks in target.items():
            for place in decode.group(name).places:
                whole = len(source["tokens"]) * prefill.block_size
                for i, block in enumerate(blocks):
                    start, end = (
                        block * decode.block_bytes + place.offset,
                        block * decode.block_bytes + place.end,
                    )
                    if name == "tokens" and (i + 1) * decode.block_size > whole:
                        kept = (whole - i * decode.block_size) * place.bytes // decode.block_size
                        assert (got[start + kept : end] == 0xFF).all()  # what the prefill never had
                        end = start + kept
                    assert equal(got[start:end], expected[start:end]), (name, place, i)
        if not pairing.same:
            named = {block for blocks in target.values() for block in blocks}
            rows = got.view(decode.num_blocks, -1)
            assert all((rows[b] == 0xFF).all() for b in range(decode.num_blocks) if b not in named)


def test_instances_of_one_layout_move_whole_blocks() -> None:
    layout = kimi(num_blocks=12)
    pairing = cache.pair(layout, layout)
    row = layout.block_bytes
    assert pairing.same
    moves = pairing.moves(3, {"tokens": [4, 5], "kda.1": [7]}, {"tokens": [1, 2], "kda.1": [9]})
    assert [(m.source, m.target, m.length) for m in moves.pop(3)] == [
        (4 * row, row, 2 * row),
        (7 * row, 9 * row, row),
    ]
    assert not moves


def test_token_blocks_of_one_size_move_as_one_range_whatever_the_tensor_parallel_size() -> None:
    prefill, decode = kimi(num_blocks=8, tp=16), kimi(num_blocks=8, tp=8)
    moves = cache.pair(prefill, decode).moves(0, {"tokens": [3, 6]}, {"tokens": [5, 2]})
    row, used = prefill.block_bytes, prefill.used_bytes
    assert [(m.source, m.target, m.length) for m in moves[0]] == [
        (3 * row, 5 * row, used),
        (6 * row, 2 * row, used),
    ]


def test_a_state_moves_by_heads_and_its_conv_part_as_three_reads() -> None:
    prefill, decode = planned(64, 4), planned(256, 1)
    pairing = cache.pair(prefill, decode)
    assert pairing.state_ranks(0) == (0, 1, 2, 3)
    source, target = request(prefill), request(decode)
    moves = pairing.moves(0, source, target)
    layer = [m for m in moves[2] if m.what.endswith("layer 3")]
    head = 64 * 64 * 4
    assert [(m.what, m.length) for m in layer] == [
        ("recurrent layer 3", head),
        ("conv q layer 3", 64 * 3 * 2),
        ("conv k layer 3", 64 * 3 * 2),
        ("conv v layer 3", 64 * 3 * 2),
    ]
    place = next(p for _, p in decode.places("kda") if p.layer == 3)
    group = next(g for g, p in decode.places("kda") if p.layer == 3)
    assert layer[0].target == target[group.name][0] * decode.block_bytes + place.offset + 2 * head


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "rank", "states", "tokens"),
    [(8, 8, 5, (5,), 5), (16, 8, 5, (10, 11), 10), (8, 16, 5, (2,), 2), (8, 1, 0, tuple(range(8)), 0)],
)
def test_ranks_that_a_decode_rank_reads_from(
    prefill_tp: int, decode_tp: int, rank: int, states: tuple[int, ...], tokens: int
) -> None:
    pairing = cache.pair(kimi(tp=prefill_tp), kimi(tp=decode_tp, block_size=8192))
    assert pairing.state_ranks(rank) == states
    assert pairing.token_rank(rank) == tokens


def test_under_dcp_a_decode_rank_reads_tokens_from_a_rank_of_its_own_share() -> None:
    pairing = cache.pair(kimi(tp=16, dcp=8), kimi(tp=8, dcp=8))
    assert [pairing.token_rank(rank) % 8 for rank in range(8)] == list(range(8))
    assert pairing.state_ranks(5) == (10, 11)
    wider = cache.pair(kimi(tp=8, dcp=8), kimi(tp=16, dcp=8))
    assert [wider.token_rank(rank) for rank in range(16)] == [*range(8), *range(8)]


def test_a_pair_survives_json_of_its_layouts() -> None:
    prefill, decode = kimi(tp=16), kimi(block_size=2048)
    sent = Layout.from_dict(json.loads(prefill.key()))
    assert cache.pair(sent, decode) == cache.pair(prefill, decode)


def test_windows_move_block_for_block() -> None:
    layout = cache.plan(models.deepseek_v4_flash(), block_size=256, num_blocks=8)
    other = cache.plan(models.deepseek_v4_flash(), block_size=256, num_blocks=9, tp=2)
    names = [group.name for group in layout.groups if group.window]
    source, target = (
        {name: [i] for i, name in enumerate(names)},
        {name: [7 - i] for i, name in enumerate(names)},
    )
    moves = cache.pair(layout, other).moves(1, source, target)[0]
    assert sum(m.length for m in moves) == sum(layout.group(name).used for name in names)
    assert len(moves) == len(names)  # each block's pages are one range


def test_a_state_that_every_rank_holds_whole_is_read_once() -> None:
    described = [*small(conv_layout="channel_width"), *states(512)]
    prefill, decode = (cache.plan(described, block_size=64, tp=tp, num_blocks=16) for tp in (4, 2))
    pairing = cache.pair(prefill, decode)
    for rank in (0, 1):
        moves = pairing.moves(rank, request(prefill, 64), request(decode, 64))
        found = [(peer, m.length) for peer, some in moves.items() for m in some if "part0" in m.what]
        assert found == [(pairing.token_rank(rank), 512)]


# --- refusals -----------------------------------------------------------------------------------------------


def refusal(prefill: Layout, decode: Layout) -> str:
    with pytest.raises(CacheError) as caught:
        cache.pair(prefill, decode)
    return str(caught.value)


def test_refuses_other_formats_and_says_all_that_differs() -> None:
    said = refusal(kimi(latent=FP8), kimi(latent=NVFP4, index=MXFP4))
    assert said == (
        "these instances cannot exchange blocks: "
        "prefill holds name='latent', entry_bytes=576, format='latent.fp8.e4m3fn.tensor' on 24 layers, "
        "decode name='latent', entry_bytes=352, format='latent.nvfp4.352' on 24 layers; "
        "prefill holds name='index', entry_bytes=132, format='index.fp8.e4m3fn.pow2.page64', page=64 on 24 layers, "
        "decode name='index', entry_bytes=68, format='index.mxfp4.page64', page=64 on 24 layers"
    )


def test_refuses_one_without_index_keys() -> None:
    assert refusal(kimi(), kimi(index=None)).endswith("page=64 on 24 layers, decode none")


def test_refuses_other_conv_orders() -> None:
    said = refusal(kimi(), kimi(conv_layout="channel_width"))
    assert "shape=(3, 36864), axis=1" in said
    assert "shape=(36864, 3), axis=0" in said


def test_refuses_positions_spread_in_another_way() -> None:
    assert refusal(kimi(dcp=8), kimi(dcp=DCP(world=8, interleave=64))) == (
        "these instances cannot exchange blocks: prefill spreads positions over 8 rank(s) with interleave 1, "
        "decode over 8 rank(s) with interleave 64: give both the same"
    )


def test_refuses_sizes_of_which_neither_divides_the_other() -> None:
    odd = dataclasses.replace(kimi(tp=6), block_size=1088)  # as another planner may have sent it
    assert refusal(odd, kimi(tp=4)) == (
        "these instances cannot exchange blocks: tensor-parallel sizes 6 and 4 do not divide evenly: use powers "
        "of two; block sizes 1088 and 1024 do not divide evenly: use powers of two"
    )


def test_refuses_two_block_sizes_where_a_page_is_the_block() -> None:
    opaque = [TokenCache(name="c", layers=(0,), entry_bytes=584, align=576)]
    assert refusal(cache.plan(opaque, block_size=64), cache.plan(opaque, block_size=128)) == (
        "these instances cannot exchange blocks: a page of c is a whole block: give both the same block_size"
    )


def test_refuses_blocks_that_do_not_match() -> None:
    prefill, decode = planned(64, 4), planned(128, 2)
    pairing = cache.pair(prefill, decode)
    with pytest.raises(
        CacheError, match=r"^3 token blocks of 64 do not match 1 of 128; prefill names 1 blocks of kda"
    ):
        pairing.moves(0, {"tokens": [1, 2, 3], "kda": [4]}, {"tokens": [1]})
    with pytest.raises(CacheError, match=r"prefill block ids \[99\] are outside the layout's 24 blocks"):
        pairing.moves(0, {"tokens": [99]}, {"tokens": [1]})
    with pytest.raises(CacheError, match="rank=8 is outside the decode instance's tp=8"):
        cache.pair(kimi(num_blocks=2), kimi(num_blocks=2)).moves(8, {"tokens": [1]}, {"tokens": [1]})
    with pytest.raises(CacheError, match="rank=2 is outside the decode instance's tp=2"):
        pairing.moves(2, {"tokens": [1]}, {"tokens": [1]})
    with pytest.raises(UnknownNameError, match="unknown group 'token'; did you mean 'tokens'"):
        pairing.moves(0, {"token": [1]}, {"tokens": [1]})
