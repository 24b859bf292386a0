"""Kimi K3.1 Pro's own Specs: what an engine plans for each operator at a tensor-parallel size.

Imports no torch, so that ``kimi-hal explain`` can show them anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kimi_hal.model import K3_1_PRO, Model
from kimi_hal.ops.all_gather import GatherSpec
from kimi_hal.ops.composites import DSASpec, MoELayerSpec
from kimi_hal.ops.indexer import IndexerSpec, IndexerTopKSpec, IndexQuerySpec, StoreIndexSpec
from kimi_hal.ops.kda import KDASpec
from kimi_hal.ops.moe import MoESpec, RouteSpec
from kimi_hal.ops.sparse_mla import MergeSpec, SparseMLASpec, StoreLatentSpec
from kimi_hal.ops.spec import DCP, Spec
from kimi_hal.ops.topk_merge import TopKMergeSpec, TopKSpec

LATENT = "latent.fp8.e4m3fn.tensor"
INDEX = "index.fp8.e4m3fn.pow2.page64"


@dataclass(frozen=True)
class Deployment:
    """How the model is laid out: what its Specs follow from.

    Args:
        tp: tensor-parallel ranks; heads and expert columns are divided by it.
        dcp: which share of each context this rank holds.
        latent: format of the latent cache.
        index: format of the index keys.
        page: tokens of a latent page.
        local_experts: experts that this rank holds.
        expert_offset: its first expert.
        model: whose numbers.
    """

    tp: int = 8
    dcp: DCP = DCP()
    latent: str = LATENT
    index: str = INDEX
    page: int = 64
    local_experts: int | None = None
    expert_offset: int = 0
    model: Model = K3_1_PRO

    @property
    def sharded_index(self) -> bool:
        """Tell whether each rank holds only its own index keys, so that selections are merged."""
        return self.dcp.world > 1 and self.dcp.index == "sharded"

    def specs(self) -> dict[str, Spec]:
        """Return the Spec of every operator, by operator name."""
        return dict(self._specs())

    def _specs(self) -> Iterator[tuple[str, Spec]]:
        yield from self._attention()
        kda = KDASpec(num_heads=self.model.heads(self.tp), lower_bound=self.model.gate_lower_bound)
        for name in ("conv", "gate", "prefill", "decode", "verify", "commit", "layer_decode"):
            yield f"kda_{name}", kda
        yield from self._experts()
        yield "all_gather", GatherSpec(layout="rank_major", dtype="bfloat16", ndim=3, dcp=self.dcp)

    def _attention(self) -> Iterator[tuple[str, Spec]]:
        query = IndexQuerySpec(index=self.index, num_heads=self.model.index_heads)
        select = self.indexer_topk()
        attend = self.sparse_mla()
        yield "quantize_index_query", query
        yield "store_index_keys", StoreIndexSpec(index=self.index)
        yield "indexer_logits", IndexerSpec(index=self.index, num_heads=self.model.index_heads, dcp=self.dcp)
        yield "indexer_topk", select
        yield "topk_select", TopKSpec(topk=self.model.topk, dcp=self.dcp)
        merge = TopKMergeSpec(dcp=self.dcp, topk=self.model.topk)
        yield "topk_merge", merge
        yield "store_latent", StoreLatentSpec(latent=self.latent, page=self.page)
        yield "sparse_mla", attend
        parts = MergeSpec(parts=max(2, self.dcp.world), num_heads=self.model.heads(self.tp))
        yield "merge_attn_states", parts
        merged = merge if self.sharded_index else None
        yield "dsa_decode", DSASpec(query=query, indexer=select, attn=attend, merge=merged)

    def indexer_topk(self) -> IndexerTopKSpec:
        """Return the fused selection's Spec; with one rank its positions are final."""
        return IndexerTopKSpec(
            index=self.index,
            num_heads=self.model.index_heads,
            topk=self.model.topk,
            dcp=self.dcp,
            ordered=True,
            return_selected=self.sharded_index,
        )

    def sparse_mla(self) -> SparseMLASpec:
        """Return attention's Spec; under DCP a rank attends with the heads of the whole group."""
        return SparseMLASpec(
            num_heads=self.model.heads(self.tp) * self.dcp.world,
            latent=self.latent,
            page=self.page,
            topk=self.model.topk,
            softmax_scale=self.model.softmax_scale,
            index_space="local" if self.sharded_index else "position",
            has_index_len=self.sharded_index,
            dcp=self.dcp,
        )

    def _experts(self) -> Iterator[tuple[str, Spec]]:
        route = RouteSpec(num_experts=self.model.experts, topk=self.model.experts_per_token)
        experts = MoESpec(
            num_experts=self.model.experts,
            num_local=self.local_experts or self.model.experts,
            expert_offset=self.expert_offset,
            topk=self.model.experts_per_token,
            hidden=self.model.moe_hidden,
            intermediate=self.model.intermediate(self.tp),
            beta=self.model.situ_beta,
            linear_beta=self.model.situ_linear_beta,
        )
        yield "moe_route", route
        yield "prepare_moe_weights", experts
        yield "moe_experts", experts
        if self.local_experts is None:  # a slice of the experts is a layer only together with its group
            yield (
                "moe_layer",
                MoELayerSpec(route=route, experts=experts, model_dim=self.model.hidden, tp=self.tp),
            )
