"""The packed block cache: pages that do not overlap, and addresses that name the right bytes."""

from __future__ import annotations

from typing import Any

import torch

from kimi_hal_conformance.properties.property import Modules, expect, holds, plain

INDEX, LATENT = "index.fp8.e4m3fn.pow2.page64", "latent.fp8.e4m3fn.tensor"
BLOCK, BLOCKS = 256, 3


def layout(modules: Modules, dim: int = 16, **fields: Any) -> Any:
    """Return the layout of four attention layers and of four KDA layers with heads of ``dim``."""
    kinds, cache = modules("cache.kinds"), modules("cache")
    layers = (3, 7, 11, 15)
    states = modules("cache.models").delta_attention((0, 1, 2, 4), heads=8, dim=dim, width=3)
    given = (
        kinds.TokenCache(name="latent", layers=layers, entry_bytes=576, format=LATENT),
        kinds.TokenCache(name="index", layers=layers, entry_bytes=132, format=INDEX, page=64),
        states,
    )
    return cache.plan(given, **{"block_size": BLOCK, "tp": 2, "num_blocks": BLOCKS} | fields)


@plain("cache")
def one_layer(modules: Modules) -> object:
    """Translate for a cache of one layer alone, on one rank, into buffers of the right size."""
    kinds, cache = modules("cache.kinds"), modules("cache")
    only = (kinds.TokenCache(name="index", layers=(0,), entry_bytes=132, page=64),)
    made = cache.plan(only, block_size=BLOCK, num_blocks=4)
    table, slots = cache.translate(
        torch.tensor([[1, 3]], dtype=torch.int32), torch.arange(600), made, "index"
    )
    return table.tolist(), slots.tolist()


@holds(
    "cache/places",
    "a block row of two kinds of pages, and four states of which three fit one, at 1 and 2 ranks",
)
def places(modules: Modules) -> None:
    """What stands in a row does not overlap, ends inside it, and is reached by whole pages."""
    for tp in (1, 2):
        made = layout(modules, dim=80, tp=tp)
        for group in made.groups:
            end = 0
            for place in group.places:
                expect(
                    f"{group.name}: {place.cache} {place.layer} starts behind the last",
                    place.offset >= end,
                    True,
                )
                end = place.offset + place.bytes
            expect(f"{group.name} ends inside the row", end <= made.block_bytes, True)
        expect("rows are whole latents", made.block_bytes % 576, 0)
        expect("rows are whole index pages", made.block_bytes % (64 * 132), 0)
        held = sorted(p.layer for g in made.groups for p in g.places if p.cache == "kda")
        expect("layers with a state", held, [0, 1, 2, 4])


@holds("cache/kernel-pages", "an engine's table of 3 blocks of 256 tokens, for pages of 64 keys")
def kernel_pages(modules: Modules) -> None:
    """Each page and slot of a kernel's view is the byte at which it stands in its block's row."""
    made, cache = layout(modules), modules("cache")
    pool = torch.zeros(made.bytes, dtype=torch.uint8)
    views = made.views(pool)
    blocks, slots = [2, 0, -1], torch.tensor([0, 255, 256, 300, 767, -1, 768])
    for kind, entry, page in (("latent", 576, BLOCK), ("index", 132, 64)):
        table = torch.tensor([blocks], dtype=torch.int32)
        pages, moved = cache.translate(table, slots, made, kind)
        for layer, start in zip(made.cache(kind).layers, made.offsets(kind), strict=True):
            view = views[kind][layer]
            first = view.data_ptr() - pool.data_ptr()
            got = [first + int(p) * view.stride(0) if p >= 0 else -1 for p in pages[0]]
            inside = [start + j * page * entry for j in range(BLOCK // page)]
            wanted = [b * made.block_bytes + byte if b >= 0 else -1 for b in blocks for byte in inside]
            expect(f"bytes of {kind} pages of layer {layer}", got, wanted)
        step = made.block_bytes // (page * entry) if kind == "index" else 1
        places = [(s // BLOCK * step + s % BLOCK // page) * page + s % page for s in slots.tolist()]
        known = [0 <= s < BLOCKS * BLOCK for s in slots.tolist()]
        expect(f"{kind} slots", moved.tolist(), [p if k else -1 for p, k in zip(places, known, strict=True)])


@holds("cache/fixed-buffers", "a step of 1 request after one of 3, in the same buffers")
def fixed_buffers(modules: Modules) -> None:
    """Nothing of an earlier step is left in a fixed buffer."""
    made, cache = layout(modules), modules("cache")
    out = (torch.full((3, 8), 7, dtype=torch.int32), torch.full((5,), 7))
    table, slots = torch.tensor([[1]], dtype=torch.int32), torch.tensor([256])
    pages, moved = cache.translate(table, slots, made, "index", out=out)
    expect("same buffers", (pages is out[0], moved is out[1]), (True, True))
    expect("table behind the step", pages.flatten()[4:].tolist(), [-1] * 20)
    expect("slots behind the step", moved[1:].tolist(), [-1] * 4)


@holds("cache/interleaved-slots", "16 positions of one block on 2 ranks, interleave 4, page 8")
def interleaved_slots(modules: Modules) -> None:
    """A rank's slots are those of its own runs (fault report: ATOM #2008): position 9 is slot 45 of rank 0."""
    kinds, cache, dcp = modules("cache.kinds"), modules("cache"), modules("ops.spec").DCP
    only = (kinds.TokenCache(name="latent", layers=(0,), entry_bytes=576),)
    made = cache.plan(only, block_size=8, tp=2, dcp=dcp(world=2, interleave=4), num_blocks=6)
    table, request = torch.tensor([[5]], dtype=torch.int32), torch.zeros(16, dtype=torch.int32)
    for rank in range(2):
        got = cache.slots(table, request, torch.arange(16), made, "latent", rank=rank)
        mine = iter(range(40, 48))
        wanted = [next(mine) if p // 4 % 2 == rank else -1 for p in range(16)]
        expect(f"slots on rank {rank}", got.tolist(), wanted)


@holds("cache/out-of-the-table", "positions and blocks that no table has")
def out_of_the_table(modules: Modules) -> None:
    """A position behind the table, a missing block and an unknown request have no slot."""
    made, cache = layout(modules), modules("cache")
    table = torch.tensor([[2, -1], [0, 1]], dtype=torch.int32)
    request = torch.tensor([0, 0, 1, 2, -1], dtype=torch.int32)
    got = cache.slots(table, request, torch.tensor([5, 300, 512, 5, 5]), made, "latent")
    expect("slots", got.tolist(), [2 * BLOCK + 5, -1, -1, -1, -1])
    pages, _ = cache.translate(torch.tensor([[2, 3, -1]], dtype=torch.int32), None, made, "latent")
    expect("pages", pages.tolist(), [[2, -1, -1]])


@holds("cache/state-columns", "100,096 tokens, blocks of 128, states every 2,176")
def state_columns(modules: Modules) -> None:
    """The column of a state is counted in its own blocks (fault report: vllm #53142)."""
    kinds, cache = modules("cache.kinds"), modules("cache")
    part = kinds.StatePart(name="recurrent", dtype="float32", shape=(2, 4, 4))
    given = (
        kinds.TokenCache(name="latent", layers=(0,), entry_bytes=576),
        kinds.StateCache(name="kda", layers=(1,), heads=2, parts=(part,), interval=2176),
    )
    made = cache.plan(given, block_size=128, num_blocks=2)
    expect("column of the state", made.column("kda", 100_096), 45)
    expect("column of the latents", made.column("latent", 100_096), 781)


@holds("cache/replicated-keys", "index keys that each of 2 ranks holds whole")
def replicated_keys(modules: Modules) -> None:
    """A block holds the keys of all ranks' tokens where they are replicated."""
    made = layout(modules, dcp=modules("ops.spec").DCP(world=2, index="replicated"))
    expect("latents of a block", made.entries("latent"), BLOCK)
    expect("keys of a block", made.entries("index"), 2 * BLOCK)
    expect("owner of keys", made.dcp(1, "index").world, 1)


@holds("cache/state-transfer", "a prefill on 2 ranks and a decode on 4, states coded by head")
def state_transfer(modules: Modules) -> None:
    """A decode rank reads the heads that it holds, and no others, from the ranks that hold them."""
    cache = modules("cache")
    prefill, decode = layout(modules, tp=2), layout(modules, tp=4)
    pair = cache.pair(prefill, decode)
    pools = []
    for rank in range(2):
        pool = torch.zeros(prefill.bytes, dtype=torch.uint8)
        filled(prefill.views(pool), rank, heads=4)
        pools.append(pool)
    source, target = {"tokens": [0], "kda": [1]}, {"tokens": [1], "kda": [2]}
    for rank in range(4):
        pool = torch.zeros(decode.bytes, dtype=torch.uint8)
        for peer, moves in pair.moves(rank, source, target).items():
            cache.copy(moves, pools[peer], pool)
        wanted = torch.zeros(decode.bytes, dtype=torch.uint8)
        filled(decode.views(wanted), rank, heads=2)
        for name in ("recurrent", "conv"):
            for layer, view in decode.views(pool)[name].items():
                same = torch.equal(view[2], decode.views(wanted)[name][layer][2])
                expect(f"{name} of layer {layer} on rank {rank} is right", same, True)


def filled(views: Any, rank: int, heads: int) -> None:
    """Write each head's number into its states: 1,000 times the layer, plus the head."""
    for layer, state in views["recurrent"].items():
        state.copy_((1000 * layer + rank * heads + torch.arange(heads)).view(1, heads, 1, 1).expand_as(state))
    for layer, conv in views["conv"].items():
        head = (rank * heads + torch.arange(heads)).repeat_interleave(16).repeat(3)
        segment = torch.arange(3).repeat_interleave(16 * heads) * 50
        conv.copy_((10 * layer + head + segment).view(1, 1, -1).expand_as(conv))
