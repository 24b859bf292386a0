"""Small operands for any Spec of the composites."""

from __future__ import annotations

from typing import Any

import torch

from kimi_hal.ops.composites import DSASpec, MoELayerSpec
from kimi_hal.ops.kda import KDASpec
from kimi_hal_conformance.case import Make
from kimi_hal_conformance.cases import composites as cases
from kimi_hal_conformance.operands import kda, moe
from kimi_hal_conformance.operands.recipe import Fields, Recipe
from kimi_hal_conformance.operands.sparse_mla import quantised, with_scale

LENGTHS = (130, 1, 48)
#: Fields of a part -> the field of another part that a Spec ties them to.
TIED = {
    "query.index": "indexer.index",
    "query.num_heads": "indexer.num_heads",
    "query.head_dim": "indexer.head_dim",
    "query.weights_dtype": "indexer.weights_dtype",
    "attn.topk": "indexer.topk",
    **{f"attn.dcp.{name}": f"indexer.dcp.{name}" for name in ("world", "rank", "interleave", "index")},
    "merge.topk": "indexer.topk",
    "merge.score": "indexer.score",
    **{f"merge.dcp.{name}": f"indexer.dcp.{name}" for name in ("world", "rank", "interleave", "index")},
}


DSA_TIED = frozenset({*TIED, "indexer.dcp.rank", "indexer.emit", "attn.index_space", "attn.has_index_len"})
DSA_LEADING = ("indexer.dcp.world", "merge.protocol", "indexer.score")
MOE_TIED = frozenset({"experts.num_experts", "experts.topk", "experts.has_expert_map"})


def ranks(spec: DSASpec) -> int:
    """Return the ranks of the group; one rank needs none."""
    return spec.dcp.world if spec.dcp.world > 1 else 0


def dsa(spec: DSASpec, rows: int) -> Make:
    """Return whole steps whose selections every right kernel makes alike."""
    make = cases.dsa_operands(spec, LENGTHS[: max(1, rows // 2)], grouped=bool(ranks(spec)))
    if spec.q_dtype == "bfloat16":
        return make
    if not ranks(spec):
        return quantised(make, spec.q_dtype)

    def wrapped(g: torch.Generator) -> Any:
        return {"ranks": [with_scale(own, spec.q_dtype) for own in make(g)["ranks"]]}

    return wrapped


def dsa_bytes(spec: DSASpec, rows: int) -> int:
    """Return the bytes of every rank's caches, queries and selections."""
    page = 6 * spec.attn.page * 1152
    attention = rows * spec.attn.num_heads * 1100 * 32
    selection = rows * (spec.attn.topk * 96 + spec.indexer.num_heads * 8192)
    return spec.dcp.world * (page * 4 + attention + selection + (2 << 20))


def bind_dsa(fields: Fields) -> None:
    """Give what the parts share one value, and what follows from how keys are spread its only one."""
    fields["indexer.dcp.rank"], fields["indexer.emit"] = 0, "local"
    # What a claim doesn't name stands at its default: one rank; of several, each has keys of its own.
    world = fields.get("indexer.dcp.world", 1)
    sharded = world > 1 and fields.get("indexer.dcp.index", "sharded") == "sharded"
    protocol = fields.get("merge.protocol")
    if sharded and protocol == "compact":
        fields["indexer.score"] = "bfloat16"
    if protocol != "compact":
        fields["merge.quota"] = None
    if protocol == "scores_only":
        fields["merge.return_global"] = False
    for name, source in TIED.items():
        if source in fields:
            fields[name] = fields[source]
    fields["attn.index_space"] = "local" if sharded else "position"
    fields["attn.has_index_len"] = sharded
    heads = fields["attn.num_heads"]
    fields["attn.num_heads"] = max(1, heads // world) * world
    if sharded:
        fields["indexer.return_selected"] = True
    if world > 1:
        fields["attn.return_lse"] = True
    if not sharded:
        fields["merge"] = None
    else:
        fields.pop("merge", None)


def kda_layer(spec: KDASpec, rows: int) -> Make:
    """Return one token a row, the last two padding and out of range."""
    return cases.kda_operands(spec, rows)


def moe_layer(spec: MoELayerSpec, rows: int) -> Make:
    """Return rows whose experts every right kernel chooses alike; every rank holds the same slice."""
    return cases.moe_operands(spec, rows)


def moe_bytes(spec: MoELayerSpec, rows: int) -> int:
    """Return the bytes of each rank's weights as they are drawn."""
    experts = moe.expert_bytes(spec.experts, rows) + spec.route.num_experts * spec.model_dim * 16
    dense = (2 * spec.experts.hidden + 3 * spec.shared_intermediate) * spec.model_dim * 16
    return spec.tp * (experts + dense + (2 << 20))


def bind_moe(fields: Fields) -> None:
    """Router and experts agree; no map; one rank holds all experts."""
    moe.bind_route(fields, "route.")
    fields["experts.num_experts"] = fields["route.num_experts"]
    fields["experts.topk"] = fields["route.topk"]
    fields["experts.has_expert_map"] = False
    moe.fit(fields, "experts.")
    if fields["tp"] == 1:
        fields["experts.num_local"] = fields["route.num_experts"]
        fields["experts.expert_offset"] = 0
    fields["shared_intermediate"] = fields["shared_intermediate"] // fields["tp"] * fields["tp"]


DSA = {
    "indexer.num_heads": 4,
    "indexer.topk": 33,
    "attn.num_heads": 4,
    "attn.page": 16,
    "indexer.dcp.world": 1,
}
MOE = {
    "route.num_experts": 12,
    "route.topk": 3,
    "experts.num_local": 12,
    "experts.hidden": 64,
    "experts.intermediate": 32,
    "model_dim": 80,
    "shared_intermediate": 40,
}
RECIPES = {
    "dsa_decode": Recipe(
        dsa, dsa_bytes, ranks=ranks, bind=bind_dsa, tied=DSA_TIED, leading=DSA_LEADING, small=DSA, rows=6
    ),
    "kda_layer_decode": Recipe(kda_layer, kda.state_bytes, small=kda.SMALL, rows=5),
    "moe_layer": Recipe(
        moe_layer,
        moe_bytes,
        ranks=lambda spec: spec.tp if spec.tp > 1 else 0,
        bind=bind_moe,
        tied=MOE_TIED,
        leading=("tp", "route.num_experts", "route.groups"),
        small=MOE,
        rows=4,
    ),
}
