"""Small whole layers for the composites: the same tokens on one rank or spread over several."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from latent_cases import FP8, Latents
from torch import Tensor

from kimi_hal import formats
from kimi_hal.ops.composites import DSASpec, MoELayerSpec
from kimi_hal.ops.indexer import IndexerTopKSpec, IndexQuerySpec, StoreIndexSpec
from kimi_hal.ops.kda import KDASpec
from kimi_hal.ops.moe import MoESpec, RouteSpec
from kimi_hal.ops.sparse_mla import SparseMLASpec, StoreLatentSpec
from kimi_hal.ops.spec import DCP
from kimi_hal.ops.topk_merge import TopKMergeSpec
from kimi_hal.parallel import ownership
from kimi_hal.reference import indexer, sparse_mla

INDEX = "index.fp8.e4m3fn.pow2.page64"


@dataclass
class DSACase:
    """Requests of some lengths, and rows that ask: ``rows`` is (request, row_len) a row."""

    lengths: tuple[int, ...] = (200, 1, 77)
    rows: tuple[tuple[int, int], ...] = ((0, 200), (0, 199), (1, 1), (2, 77), (99, 0), (2, 5))
    heads: int = 4
    index_heads: int = 3
    topk: int = 16
    page: int = 16
    latent: str = FP8
    index: str = INDEX
    score: str = "float32"
    out_dtype: str = "float32"
    seed: int = 0
    tokens: list[tuple[Tensor, Tensor, Tensor]] = field(init=False)
    q: Tensor = field(init=False)
    index_q: Tensor = field(init=False)
    index_w: Tensor = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.tokens = [(randn(n, 512), randn(n, 64), randn(n, 128)) for n in self.lengths]
        self.q = (4 * randn(len(self.rows), self.heads, 576)).bfloat16()
        self.index_q = randn(len(self.rows), self.index_heads, 128).bfloat16()
        self.index_w = randn(len(self.rows), self.index_heads)

    def spec(self, dcp: DCP = DCP(), protocol: str = "full", **fields: Any) -> DSASpec:
        """Return the Spec of one rank."""
        merged = dcp.world > 1 and dcp.index == "sharded"
        merge = {"protocol": protocol, "return_global": False, "topk": self.topk, "score": self.score}
        return DSASpec(
            query=IndexQuerySpec(index=self.index, num_heads=self.index_heads),
            indexer=IndexerTopKSpec(
                index=self.index,
                num_heads=self.index_heads,
                topk=self.topk,
                score=self.score,
                return_selected=merged,
                dcp=dcp,
            ),
            attn=SparseMLASpec(
                num_heads=self.heads,
                latent=self.latent,
                page=self.page,
                topk=self.topk,
                index_space="local" if merged else "position",
                has_index_len=merged,
                out_dtype=self.out_dtype,
                dcp=dcp,
            ),
            merge=TopKMergeSpec(dcp=dcp, **merge) if merged else None,
            **fields,
        )

    def operands(self, dcp: DCP = DCP()) -> dict[str, Any]:
        """Return what one rank passes: its heads, and caches with its own tokens in poisoned pools."""
        keys = ownership.of_keys(dcp)
        latents, latent_table = self._latents(dcp)
        index_cache, index_table = self._index(keys)
        per = self.heads // dcp.world
        return {
            "q": self.q[:, dcp.rank * per : (dcp.rank + 1) * per],
            "index_q": self.index_q,
            "index_w": self.index_w,
            "latent_cache": latents.cache,
            "index_cache": index_cache,
            "latent_table": latent_table,
            "index_table": index_table,
            "row_req": torch.tensor([r for r, _ in self.rows], dtype=torch.int32),
            "row_len": torch.tensor([n for _, n in self.rows], dtype=torch.int32),
            "k_scale": latents.k_scale,
        }

    def _latents(self, dcp: DCP) -> tuple[Latents, Tensor]:
        table = _table([ownership.local_length(n, dcp) for n in self.lengths], self.page)
        latents = Latents(self.latent, pages=int(table.max()) + 1, page=self.page)
        spec = StoreLatentSpec(latent=self.latent, page=self.page)
        for request, (kv_c, k_pe, _) in enumerate(self.tokens):
            slots = _slots(table[request], len(kv_c), dcp, self.page)
            sparse_mla.store_latent(spec, kv_c, k_pe, slots, latents.cache, latents.k_scale)
        return latents, table

    def _index(self, dcp: DCP) -> tuple[Tensor, Tensor]:
        fmt = formats.index(self.index)
        table = _table([ownership.local_length(n, dcp) for n in self.lengths], fmt.page)
        cache = torch.full((int(table.max()) + 1, fmt.page_bytes), 0x7F, dtype=torch.uint8)
        for request, (_, _, keys) in enumerate(self.tokens):
            slots = _slots(table[request], len(keys), dcp, fmt.page)
            indexer.store_index_keys(StoreIndexSpec(index=self.index), keys, slots, cache)
        return cache, table


def _table(lengths: list[int], page: int) -> Tensor:
    """Give every request the pages that it needs, in descending order so that none is where it looks."""
    counts = [-(-n // page) for n in lengths]
    table = torch.full((len(lengths), max(counts) + 1), -1, dtype=torch.int32)
    free = sum(counts)
    for request, count in enumerate(counts):
        table[request, :count] = torch.arange(free - 1, free - 1 - count, -1)
        free -= count
    return table


def _slots(line: Tensor, length: int, dcp: DCP, page: int) -> Tensor:
    """Return each token's slot on this rank, −1 where another owns it."""
    position = torch.arange(length)
    owned = ownership.owner(position, dcp) == dcp.rank
    place = torch.where(owned, ownership.local(position, dcp), 0)
    return torch.where(owned, line[place // page].long() * page + place % page, -1)


@dataclass
class KDACase:
    """A KDA layer with a pool of states, most of them strangers'."""

    rows: int = 3
    heads: int = 2
    slots: int = 6
    gate: str = "raw"
    conv_layout: str = "width_channel"
    seed: int = 0

    @property
    def spec(self) -> KDASpec:
        """Return the Spec."""
        return KDASpec(num_heads=self.heads, gate=self.gate, conv_layout=self.conv_layout)

    def operands(self) -> dict[str, Any]:
        """Return fresh operands; ``conv_state`` and ``state`` may be written."""
        generator = torch.Generator().manual_seed(self.seed)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        rows, heads, channels = self.rows, self.heads, self.spec.channels
        raw_g, raw_beta = randn(rows, heads, 128), randn(rows, heads)
        conv_state = randn(self.slots, 3, channels).bfloat16()
        if self.conv_layout == "channel_width":
            conv_state = conv_state.transpose(1, 2).contiguous()
        parameters = {"A_log": randn(heads), "dt_bias": randn(heads * 128)} if self.gate == "raw" else {}
        weights = {"conv": randn(channels, 4).bfloat16(), **parameters, "norm": randn(128).bfloat16()}
        if self.gate == "log":
            raw_g, raw_beta = -raw_g.abs(), torch.sigmoid(raw_beta)
        else:
            raw_g, raw_beta = raw_g.bfloat16(), raw_beta.bfloat16()
        return {
            "x": randn(rows, channels).bfloat16(),
            "raw_g": raw_g,
            "raw_beta": raw_beta,
            "out_gate": randn(rows, heads, 128).bfloat16(),
            "weights": list(weights.values()),
            "conv_state": conv_state,
            "state": randn(self.slots, heads, 128, 128),
            "state_ids": torch.randperm(self.slots, generator=generator)[:rows].int(),
        }


@dataclass
class MoECase:
    """A latent MoE layer, whole or cut over ranks by columns or by experts."""

    rows: int = 5
    experts: int = 6
    topk: int = 2
    width: int = 48
    hidden: int = 64
    intermediate: int = 128
    shared: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

        fmt = formats.experts("experts.mxfp4-pack")
        self.x = (randn(self.rows, self.width) * self.width**0.5).bfloat16()
        self.dense = {
            "gate": 3 * randn(self.experts, self.width),
            "bias": 0.1 * randn(self.experts),
            "down": randn(self.hidden, self.width).bfloat16(),
            "up": randn(self.width, self.hidden).bfloat16(),
            "norm": 1 + 0.1 * randn(self.hidden),
            "shared_w13": randn(2 * self.shared, self.width).bfloat16(),
            "shared_w2": randn(self.width, self.shared).bfloat16(),
        }
        w13 = fmt.encode(randn(self.experts, 2 * self.intermediate, self.hidden))
        w2 = fmt.encode(randn(self.experts, self.hidden, self.intermediate))
        self.packed = {"w13": w13[0], "w13_scale": w13[1], "w2": w2[0], "w2_scale": w2[1]}

    def spec(self, tp: int = 1, rank: int = 0, cut: str = "columns") -> MoELayerSpec:
        """Return the Spec of one rank."""
        local = {"intermediate": self.intermediate // tp, "num_local": self.experts}
        if cut == "experts":
            per = self.experts // tp
            local = {"intermediate": self.intermediate, "num_local": per, "expert_offset": rank * per}
        return MoELayerSpec(
            route=RouteSpec(num_experts=self.experts, topk=self.topk, ordered=True),
            experts=MoESpec(
                num_experts=self.experts, topk=self.topk, hidden=self.hidden, out_dtype="float32", **local
            ),
            model_dim=self.width,
            shared_intermediate=self.shared,
            tp=tp,
        )

    def weights(self, tp: int = 1, rank: int = 0, cut: str = "columns") -> dict[str, Tensor]:
        """Return the checkpoint's tensors of one rank."""
        shared = {
            "shared_w13": _columns_13(self.dense["shared_w13"], tp, rank),
            "shared_w2": self.dense["shared_w2"].chunk(tp, dim=-1)[rank],
        }
        if cut == "experts":
            packed = {name: tensor.chunk(tp)[rank] for name, tensor in self.packed.items()}
        else:
            packed = {
                name: _columns_13(tensor, tp, rank) if "13" in name else tensor.chunk(tp, dim=-1)[rank]
                for name, tensor in self.packed.items()
            }
        return {**self.dense, **shared, **{name: t.contiguous() for name, t in packed.items()}}


def _columns_13(w13: Tensor, tp: int, rank: int) -> Tensor:
    """Return a rank's gate rows, then its up rows."""
    gate, up = w13.chunk(2, dim=-2)
    return torch.cat([gate.chunk(tp, dim=-2)[rank], up.chunk(tp, dim=-2)[rank]], dim=-2)
