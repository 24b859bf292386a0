"""Small packed caches in poisoned pools, one model step through views or plain caches, and the NIXL child."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from index_cases import int32, planned
from kda_cases import Layer, Rows
from torch import Tensor

from kimi_hal import cache, formats
from kimi_hal.cache import Layout, StateCache, TokenCache
from kimi_hal.cache.models import delta_attention
from kimi_hal.ops.indexer import IndexerTopKSpec, IndexQuerySpec, StoreIndexSpec
from kimi_hal.ops.kda import KDASpec
from kimi_hal.ops.operator import get
from kimi_hal.ops.sparse_mla import SparseMLASpec, StoreLatentSpec
from kimi_hal.reference import indexer

FP8 = "latent.fp8.e4m3fn.tensor"
NVFP4 = "latent.nvfp4.352"
POW2 = "index.fp8.e4m3fn.pow2.page64"
MXFP4 = "index.mxfp4.page64"

#: Fills bytes that a case does not own: NaN as float32, bf16 and FP8.
POISON = 0xFF

HEADS, DIM, INDEX_HEADS, TOPK = 4, 64, 4, 64


def kimi(**fields: Any) -> Layout:
    """Plan Kimi K3.1 Pro in FP8 at TP8, but for what is given."""
    return cache.plan(**({"block_size": 1024, "tp": 8, "latent": FP8, "index": POW2} | fields))


def small(latent: str = FP8, index: str = POW2, conv_layout: str = "width_channel") -> tuple[Any, ...]:
    """Describe a model of 2 sparse-attention layers and 5 KDA layers of 4 heads of 64."""
    rows, keys = formats.latent(latent), formats.index(index)
    return (
        TokenCache(name="latent", layers=(2, 5), entry_bytes=rows.row_bytes, format=latent),
        TokenCache(name="index", layers=(2, 5), entry_bytes=keys.row_bytes, format=index, page=64),
        delta_attention((0, 1, 3, 4, 6), heads=HEADS, dim=DIM, width=3, conv_layout=conv_layout),
    )


def states(*sizes: int, interval: int | None = None) -> tuple[StateCache, ...]:
    """Describe states of one layer each, of so many bytes."""
    parts = [cache.StatePart(name=f"part{i}", dtype="uint8", shape=(n,)) for i, n in enumerate(sizes)]
    return tuple(
        StateCache(name=f"state{i}", layers=(i,), heads=None, parts=(part,), interval=interval)
        for i, part in enumerate(parts)
    )


def pool_of(layout: Layout) -> Tensor:
    """Return a pool in which every byte is poison."""
    return torch.full((layout.bytes,), POISON, dtype=torch.uint8)


@dataclass
class Caches:
    """The caches that a step writes, by kind and layer, and how their pages are numbered."""

    layout: Layout
    views: dict[str, dict[int, Tensor]]
    index_numbers: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

    @classmethod
    def packed(cls, layout: Layout, pool: Tensor) -> Caches:
        """Return the views of one pool; index pages are numbered by ``translate``."""

        def numbers(table: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
            found, moved = cache.translate(table, slots, layout, "index")
            assert found is not None
            assert moved is not None
            return found, moved

        return cls(layout, layout.views(pool), numbers)

    @classmethod
    def plain(cls, layout: Layout) -> Caches:
        """Return separate contiguous caches of the same sizes; a block's index pages follow each other."""
        some = {
            kind: {layer: torch.full_like(view, 0).contiguous() for layer, view in layers.items()}
            for kind, layers in layout.views(torch.empty(layout.bytes, dtype=torch.uint8)).items()
        }
        pages = layout.pages("index")
        for layers in some.values():
            for layer, view in layers.items():
                layers[layer] = poisoned(view.shape, view.dtype)
        size = layout.num_blocks * pages
        for layer, view in some["index"].items():
            some["index"][layer] = poisoned((size, view.shape[1]), torch.uint8)

        def numbers(table: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
            inside = torch.arange(pages)
            return (table[:, :, None] * pages + inside).flatten(1).int(), slots

        return cls(layout, some, numbers)


def poisoned(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> Tensor:
    """Return a tensor of poison bytes."""
    item = torch.empty(0, dtype=dtype).element_size()
    return torch.full((*shape[:-1], shape[-1] * item), POISON, dtype=torch.uint8).view(dtype)


@dataclass
class Step:
    """One step of every layer: tokens of two requests are stored, searched and attended to, states advanced.

    ``lengths`` tokens of request r stand in ``blocks[r]``; its KDA states in the blocks ``state_blocks[g][r]``
    of group g.
    """

    caches: Caches
    lengths: tuple[int, int] = (200, 65)
    blocks: tuple[tuple[int, ...], ...] = ((3, 1), (4, -1))
    state_blocks: tuple[tuple[int, int], ...] = ((0, 5), (6, 2), (7, 8), (9, 10), (11, 12))
    seed: int = 0

    def run(self) -> dict[str, Tensor]:
        """Store and advance every layer, then read what was stored; returns every output by name."""
        layout = self.caches.layout
        for layer in layout.cache("latent").layers:
            self.store(layer)
        prefilled = {f"prefilled {layer}": self.prefill(layer, ids) for layer, ids in self.states()}
        return prefilled | self.reads()

    def reads(self) -> dict[str, Tensor]:
        """Search and attend to what stands in the caches, and decode one token from the states that do."""
        found = {f"decoded {layer}": self.decode(layer, ids) for layer, ids in self.states()}
        for layer in self.caches.layout.cache("latent").layers:
            found |= {f"{name} {layer}": value for name, value in self.attend(layer).items()}
        return found

    def states(self) -> list[tuple[int, Tensor]]:
        """Return each KDA layer with the blocks of the requests' states."""
        groups = zip(self.state_blocks, self.caches.layout.groups[1:], strict=False)
        return [(place.layer, int32(ids)) for ids, group in groups for place in group.places]

    def expected(self, layout: Layout) -> Tensor:
        """Return a poisoned pool into which the blocks of this step's plain caches were copied."""
        pool = pool_of(layout)
        tokens = [block for blocks in self.blocks for block in blocks if block >= 0]
        owned = {
            place.layer: ids
            for ids, group in zip(self.state_blocks, layout.groups[1:], strict=False)
            for place in group.places
        }
        for kind, layers in layout.views(pool).items():
            for layer, view in layers.items():
                plain = self.caches.views[kind][layer]
                if kind != "index":
                    ids = list(owned[layer]) if kind in ("recurrent", "conv") else tokens
                    view[ids] = plain[ids]
                    continue
                pages, step = layout.pages(kind), layout.page_step(kind)
                for block in tokens:
                    view[block * step : block * step + pages] = plain[block * pages : (block + 1) * pages]
        return pool

    def numbers(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return block table and slots as the engine counts, then as the index keys' kernels do."""
        table, layout = int32(self.blocks), self.caches.layout
        requests = torch.cat([torch.full((n,), r, dtype=torch.int32) for r, n in enumerate(self.lengths)])
        positions = torch.cat([torch.arange(n) for n in self.lengths])
        slots = cache.slots(table, requests, positions, layout, "latent")
        return table, slots, *self.caches.index_numbers(table, slots)

    def formats(self) -> tuple[str, str, int, Tensor | None]:
        """Return latent and index format, the tokens of a latent page, and the latents' scale."""
        layout = self.caches.layout
        latent, index = layout.cache("latent").format, layout.cache("index").format
        scale = torch.tensor([0.5]) if formats.latent(latent).needs_scale else None
        return latent, index, layout.entries("latent"), scale

    def store(self, layer: int) -> None:
        """Store latents and index keys of every token."""
        latent, index, page, scale = self.formats()
        _, slots, _, index_slots = self.numbers()
        random = torch.Generator().manual_seed(self.seed + layer)
        kv_c, k_pe = (torch.randn(len(slots), n, generator=random) for n in (512, 64))
        views = self.caches.views
        spec = StoreLatentSpec(latent=latent, page=page)
        run("store_latent", spec)(kv_c, k_pe, slots, views["latent"][layer], scale)
        keys = torch.randn(len(slots), 128, generator=random)
        run("store_index_keys", StoreIndexSpec(index=index))(keys, index_slots, views["index"][layer])

    def attend(self, layer: int) -> dict[str, Tensor]:
        """Select and attend for the last row of each request, and for one in the middle."""
        latent, index, page, scale = self.formats()
        table, _, pages, _ = self.numbers()
        random = torch.Generator().manual_seed(self.seed + 100 + layer)
        views = self.caches.views
        rows, lens = int32([0, 1, 1]), int32([self.lengths[0], self.lengths[1], 7])
        query = indexer.quantize_index_query(
            IndexQuerySpec(index=index, num_heads=INDEX_HEADS),
            torch.randn(3, INDEX_HEADS, 128, generator=random),
            torch.randn(3, INDEX_HEADS, generator=random),
        )
        select = IndexerTopKSpec(
            index=index, num_heads=INDEX_HEADS, topk=TOPK, ordered=True, return_selected=True
        )
        found, scores = run("indexer_topk", select)(*query, views["index"][layer], pages, rows, lens)
        q = torch.randn(3, 2, 576, generator=random).bfloat16()
        spec = SparseMLASpec(num_heads=2, latent=latent, page=page, topk=TOPK, index_space="position")
        out, lse = run("sparse_mla", spec)(
            q, views["latent"][layer], found, scale, block_table=table, row_req=rows
        )
        return {"selected": found, "scores": scores, "out": out, "lse": lse}

    def prefill(self, layer: int, ids: Tensor) -> Tensor:
        """Run 5 and 3 tokens into the requests' fresh states; returns their outputs."""
        spec, views = kda_spec(self.caches.layout), self.caches.views
        made = Layer.random(spec, seed=self.seed + layer)
        rows = Rows.random(spec, 8, seed=self.seed + layer)
        state, conv = views["recurrent"][layer], views["conv"][layer]
        fresh, cuts = torch.tensor([False, False]), int32([0, 5, 8])
        y = run("kda_conv", spec)(rows.x, made.weight, conv, ids, cuts, fresh)
        r = made.convolved(rows, y)
        gate = (r.raw_g, r.raw_beta, made.A_log, made.dt_bias)
        out: Tensor = run("kda_prefill", spec)(r.q, r.k, r.v, *gate, state, ids, cuts, fresh)
        return out

    def decode(self, layer: int, ids: Tensor) -> Tensor:
        """Run one more token of each request from the states that stand there; returns their outputs."""
        spec, views = kda_spec(self.caches.layout), self.caches.views
        made = Layer.random(spec, seed=self.seed + layer)
        rows = Rows.random(spec, 2, seed=self.seed + 50 + layer)
        y = run("kda_conv", spec)(rows.x, made.weight, views["conv"][layer], ids, int32([0, 1, 2]))
        r = made.convolved(rows, y)
        gate = (r.raw_g, r.raw_beta, made.A_log, made.dt_bias)
        out: Tensor = run("kda_decode", spec)(r.q, r.k, r.v, *gate, views["recurrent"][layer], ids)
        return out


def run(operator: str, spec: Any) -> Callable[..., Any]:
    """Return the reference's run function, which checks strides and shapes first."""
    return planned(get(operator), spec)


def kda_spec(layout: Layout) -> KDASpec:
    """Return the Spec of a layout's KDA layers."""
    recurrent, conv = layout.state("kda").parts
    return KDASpec(
        num_heads=recurrent.local_shape(layout.tp)[0],
        head_dim=recurrent.shape[1],
        conv_layout="width_channel" if conv.axis else "channel_width",
    )


def equal(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors hold the same bits, NaN or not."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
