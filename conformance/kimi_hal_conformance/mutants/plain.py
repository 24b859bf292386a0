"""The inputs that a kernel's own tests take: random, in range, nothing empty, no padding, one of everything.

A mutant is right on them, as far as the field's tolerances can tell. Heads are 16, states and histories start
at zero, scales are 1, ranks hold a whole share each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kimi_hal import formats
from kimi_hal.ops.all_gather import GatherSpec
from kimi_hal.ops.composites import DSASpec, MoELayerSpec
from kimi_hal.ops.indexer import IndexerSpec, IndexerTopKSpec, IndexQuerySpec, StoreIndexSpec
from kimi_hal.ops.kda import KDASpec
from kimi_hal.ops.moe import MoESpec, RouteSpec
from kimi_hal.ops.sparse_mla import MergeSpec, SparseMLASpec, StoreLatentSpec
from kimi_hal.ops.spec import DCP, Spec
from kimi_hal.ops.topk_merge import TopKMergeSpec, TopKSpec
from kimi_hal.reference.sizes import records_bytes
from kimi_hal_conformance.draws import ints, normal

BF16 = torch.bfloat16
INDEX, LATENT = "index.fp8.e4m3fn.pow2.page64", "latent.fp8.e4m3fn.tensor"
KEYS, K, ROWS = 512, 128, 4
ONE = torch.ones(1)
EXPERTS = MoESpec(num_experts=8, num_local=8, topk=2, hidden=128, intermediate=128)
KDA = KDASpec(num_heads=2, head_dim=32)


@dataclass(frozen=True)
class Plain:
    """A call: the Spec, and the operands; one set a rank where ranks meet."""

    spec: Spec
    operands: Mapping[str, Any]
    ranks: tuple[Mapping[str, Any], ...] = ()


Draw = Callable[[torch.Generator, float], Plain]


def index_query(g: torch.Generator, spread: float) -> Plain:
    """Return queries of 32 heads."""
    q, weights = normal(g, ROWS, 32, 128, dtype=BF16, spread=spread), normal(g, ROWS, 32)
    return Plain(IndexQuerySpec(index=INDEX), {"q": q, "weights": weights})


def index_store(g: torch.Generator, spread: float) -> Plain:
    """Return keys for the slots of four pages."""
    cache = torch.zeros(4, formats.index(INDEX).page_bytes, dtype=torch.uint8)
    keys = normal(g, 192, 128, dtype=BF16, spread=spread)
    return Plain(StoreIndexSpec(index=INDEX), {"k": keys, "slots": torch.arange(1, 193), "cache": cache})


def scored(g: torch.Generator, spread: float) -> dict[str, Tensor]:
    """Return quantised queries over two requests of full pages."""
    fmt = formats.index(INDEX)
    cache = torch.zeros(2 * KEYS // 64, fmt.page_bytes, dtype=torch.uint8)
    fmt.write(cache, torch.arange(2 * KEYS), normal(g, 2 * KEYS, 128, spread=spread))
    q, scale = fmt.encode_query(normal(g, ROWS, 32, 128, spread=spread).bfloat16())
    weights = normal(g, ROWS, 32) * scale * (128 * 32) ** -0.5
    return {
        "q": q,
        "q_scale": torch.empty(ROWS, 32, 0, dtype=torch.uint8),
        "weights": weights,
        "cache": cache,
        "block_table": torch.arange(2 * KEYS // 64, dtype=torch.int32).view(2, -1),
        "row_req": ints([0, 0, 1, 1]),
        "row_len": ints([KEYS] * ROWS),
    }


def index_scores(g: torch.Generator, spread: float) -> Plain:
    """Return queries to score."""
    return Plain(IndexerSpec(index=INDEX), scored(g, spread))


def index_topk(g: torch.Generator, spread: float) -> Plain:
    """Return queries to score and select for."""
    return Plain(IndexerTopKSpec(index=INDEX, topk=K), scored(g, spread))


def select(g: torch.Generator, spread: float) -> Plain:
    """Return rows of distinct scores, every column a key."""
    return Plain(
        TopKSpec(topk=K), {"scores": normal(g, ROWS, 4096, spread=spread), "row_len": ints([4096] * ROWS)}
    )


def merge(protocol: str) -> Draw:
    """Return what two ranks selected from rows of distinct scores."""

    def draw(g: torch.Generator, spread: float) -> Plain:
        score = "bfloat16" if protocol == "compact" else "float32"
        spec = TopKMergeSpec(
            dcp=DCP(world=2), topk=K, protocol=protocol, score=score, return_global=protocol != "scores_only"
        )
        scores = torch.stack([torch.randperm(200 * K, generator=g)[: 8 * K] for _ in range(ROWS)]).float()
        if protocol == "compact":  # distinct in bfloat16 too
            scores = torch.stack([distinct(g, 8 * K) for _ in range(ROWS)])
        ranks = []
        for rank in range(2):
            best = scores[:, rank::2].topk(K, dim=1)
            ranks.append(
                {
                    "scores": (best.values * spread).to(getattr(torch, score)),
                    "indices": best.indices.int(),
                    "row_len": ints([8 * K] * ROWS),
                }
            )
        return Plain(spec, {}, tuple(ranks))

    return draw


def distinct(g: torch.Generator, count: int) -> Tensor:
    """Return distinct positive bfloat16 numbers as float32."""
    codes = torch.randperm(0x3F80 - 0x2000, generator=g)[:count] + 0x2000
    return codes.to(torch.int16).view(torch.bfloat16).float()


def latent_store(g: torch.Generator, spread: float) -> Plain:
    """Return latents for the slots of three pages."""
    kv_c, k_pe = normal(g, 128, 512, dtype=BF16, spread=spread), normal(g, 128, 64, dtype=BF16, spread=spread)
    cache = torch.zeros(3, 64 * 576, dtype=torch.uint8)
    given = {
        "kv_c": kv_c,
        "k_pe": k_pe,
        "slots": torch.arange(1, 129),
        "cache": cache,
        "k_scale": ONE.clone(),
    }
    return Plain(StoreLatentSpec(latent=LATENT), given)


def attention(g: torch.Generator, spread: float) -> Plain:
    """Return queries of 16 heads that each select half of a cache; the LSE is not asked for."""
    spec = SparseMLASpec(num_heads=16, latent=LATENT, topk=2 * K, return_lse=False)
    cache = torch.zeros(KEYS // 64, 64 * 576, dtype=torch.uint8)
    latents = normal(g, KEYS, 576, spread=spread)
    formats.latent(LATENT).write(cache, 64, torch.arange(KEYS), latents[:, :512], latents[:, 512:], ONE)
    indices = torch.stack([torch.randperm(KEYS, generator=g)[: 2 * K] for _ in range(ROWS)]).int()
    q = normal(g, ROWS, 16, 576, dtype=BF16, spread=spread)
    return Plain(spec, {"q": q, "cache": cache, "indices": indices, "k_scale": ONE.clone()})


def states(g: torch.Generator, spread: float) -> Plain:
    """Return two parts of equal standing."""
    spec = MergeSpec(parts=2, num_heads=16, return_lse=False)
    outs = normal(g, 2, ROWS, 16, 512, dtype=BF16, spread=spread)
    return Plain(spec, {"outs": outs, "lses": 7.0 + normal(g, 2, ROWS, 16, spread=spread)})


def tokens(g: torch.Generator, rows: int, spread: float) -> dict[str, Tensor]:
    """Return q, k, v and the raw gate of some rows."""
    heads, dim = KDA.num_heads, KDA.head_dim
    q, k, v = (normal(g, rows, heads, dim, dtype=BF16, spread=spread) for _ in range(3))
    return {"q": q, "k": k, "v": v} | gates(g, rows)


def gates(g: torch.Generator, rows: int) -> dict[str, Tensor]:
    """Return the raw gate of some rows, and its parameters."""
    heads, dim = KDA.num_heads, KDA.head_dim
    return {
        "raw_g": normal(g, rows, heads, dim, dtype=BF16),
        "raw_beta": normal(g, rows, heads, dtype=BF16),
        "A_log": torch.rand(heads, generator=g) - 1.0,
        "dt_bias": normal(g, heads * dim),
    }


def pools(slots: int) -> dict[str, Tensor]:
    """Return states and histories that hold nothing yet."""
    size = KDA.head_dim
    return {
        "state": torch.zeros(slots, KDA.num_heads, size, size),
        "conv_state": torch.zeros(slots, KDA.conv_width - 1, KDA.channels, dtype=BF16),
    }


def fresh(lengths: tuple[int, ...]) -> dict[str, Tensor]:
    """Return sequences that begin, each in its own slot from 1 on."""
    return {
        "state_ids": ints(range(1, len(lengths) + 1)),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).int(),
    }


def conv(g: torch.Generator, spread: float) -> Plain:
    """Return raw inputs of two sequences that begin."""
    given = {
        "x": normal(g, 48, KDA.channels, dtype=BF16, spread=spread),
        "weight": normal(g, KDA.channels, 4, dtype=BF16, spread=0.5),
        "conv_state": pools(3)["conv_state"],
        **fresh((16, 32)),
        "has_initial_state": torch.tensor([False, False]),
    }
    return Plain(KDA, given)


def gate(g: torch.Generator, spread: float) -> Plain:
    """Return raw gates."""
    return Plain(KDASpec(num_heads=2, head_dim=32, lower_bound=None), gates(g, 64))


def prefill(g: torch.Generator, spread: float) -> Plain:
    """Return two sequences that begin."""
    given = tokens(g, 96, spread) | {"state": pools(3)["state"]} | fresh((32, 64))
    return Plain(KDA, given | {"has_initial_state": torch.tensor([False, False])})


def decode(g: torch.Generator, spread: float) -> Plain:
    """Return one row for each of some slots that hold nothing."""
    return Plain(
        KDA, tokens(g, ROWS, spread) | {"state": pools(ROWS + 1)["state"], "state_ids": ints([1, 2, 3, 4])}
    )


def verify(g: torch.Generator, spread: float) -> Plain:
    """Return drafts of two sequences that begin."""
    given = dict(conv(g, spread).operands) | {"x": normal(g, 8, KDA.channels, dtype=BF16, spread=spread)}
    del given["has_initial_state"]
    given |= fresh((4, 4)) | gates(g, 8) | {"state": pools(3)["state"]}
    return Plain(KDA, given | {"records": torch.zeros(2, records_bytes(KDA, 4), dtype=torch.uint8)})


def route(g: torch.Generator, spread: float) -> Plain:
    """Return logits of 64 experts with a small correction."""
    spec = RouteSpec(num_experts=64, topk=8)
    return Plain(spec, {"logits": normal(g, 16, 64, spread=spread), "bias": normal(g, 64, spread=0.02)})


def weights(g: torch.Generator, spread: float) -> dict[str, Tensor]:
    """Return packed experts."""
    fmt, wide, narrow = formats.experts(EXPERTS.weights), 2 * EXPERTS.intermediate, EXPERTS.hidden
    w13, w13_scale = fmt.encode(normal(g, EXPERTS.num_local, wide, narrow, spread=spread * narrow**-0.5))
    w2, w2_scale = fmt.encode(
        normal(g, EXPERTS.num_local, narrow, wide // 2, spread=spread * (wide // 2) ** -0.5)
    )
    return {"w13": w13, "w13_scale": w13_scale, "w2": w2, "w2_scale": w2_scale}


def prepare(g: torch.Generator, spread: float) -> Plain:
    """Return a checkpoint's experts."""
    return Plain(EXPERTS, weights(g, spread))


def experts(g: torch.Generator, spread: float) -> Plain:
    """Return rows for two experts each."""
    ids = torch.stack([torch.randperm(EXPERTS.num_experts, generator=g)[:2] for _ in range(8)]).int()
    given = {
        "x": normal(g, 8, EXPERTS.hidden, dtype=BF16, spread=spread),
        "topk_weights": torch.softmax(normal(g, 8, 2), dim=-1),
        "topk_ids": ids,
        "weights": list(weights(g, spread).values()),
    }
    return Plain(EXPERTS, given)


def gathered(g: torch.Generator, spread: float) -> Plain:
    """Return two ranks' tokens."""
    spec = GatherSpec(layout="token_order", dtype="bfloat16", dcp=DCP(world=2), ndim=2)
    return Plain(spec, {}, tuple({"x": normal(g, 8, 16, dtype=BF16, spread=spread)} for _ in range(2)))


def dsa(g: torch.Generator, spread: float) -> Plain:
    """Return a decode step on one rank."""
    index = scored(g, spread)
    attend = attention(g, spread).operands
    spec = DSASpec(
        query=IndexQuerySpec(index=INDEX),
        indexer=IndexerTopKSpec(index=INDEX, topk=K),
        attn=SparseMLASpec(num_heads=16, latent=LATENT, topk=K, index_space="position", return_lse=False),
    )
    cache = torch.cat([attend["cache"]] * 2)
    given = {
        "q": attend["q"],
        "index_q": normal(g, ROWS, 32, 128, dtype=BF16, spread=spread),
        "index_w": normal(g, ROWS, 32),
        "latent_cache": cache,
        "index_cache": index["cache"],
        "latent_table": index["block_table"],
        "index_table": index["block_table"],
        "row_req": index["row_req"],
        "row_len": index["row_len"],
        "k_scale": ONE.clone(),
    }
    return Plain(spec, given)


def kda_layer(g: torch.Generator, spread: float) -> Plain:
    """Return one row for each of some slots that hold nothing."""
    own = gates(g, ROWS)
    norm = 1.0 + normal(g, KDA.head_dim, spread=0.1)
    given = {
        "x": normal(g, ROWS, KDA.channels, dtype=BF16, spread=4 * spread),
        "raw_g": own["raw_g"],
        "raw_beta": own["raw_beta"],
        "out_gate": normal(g, ROWS, KDA.num_heads, KDA.head_dim, dtype=BF16),
        "weights": [normal(g, KDA.channels, 4, dtype=BF16), own["A_log"], own["dt_bias"], norm],
        **pools(ROWS + 1),
        "state_ids": ints([1, 2, 3, 4]),
    }
    return Plain(KDA, given)


def moe_layer(g: torch.Generator, spread: float) -> Plain:
    """Return rows for a layer on one rank."""
    spec = MoELayerSpec(
        route=RouteSpec(num_experts=8, topk=2), experts=EXPERTS, model_dim=192, shared_intermediate=128
    )
    size, latent, shared = spec.model_dim, EXPERTS.hidden, spec.shared_intermediate
    dense = (
        normal(g, 8, size, spread=size**-0.5),
        normal(g, 8, spread=0.02),
        normal(g, latent, size, dtype=BF16, spread=size**-0.5),
        normal(g, size, latent, dtype=BF16, spread=latent**-0.5),
        1.0 + normal(g, latent, spread=0.1),
        normal(g, 2 * shared, size, dtype=BF16, spread=size**-0.5),
        normal(g, size, shared, dtype=BF16, spread=shared**-0.5),
    )
    x = normal(g, 8, size, dtype=BF16, spread=spread)
    return Plain(spec, {"x": x, "weights": [*dense, *weights(g, spread).values()]})


PLAIN: Mapping[str, tuple[Draw, ...]] = {
    "quantize_index_query": (index_query,),
    "store_index_keys": (index_store,),
    "indexer_logits": (index_scores,),
    "indexer_topk": (index_topk,),
    "topk_select": (select,),
    "topk_merge": (merge("full"), merge("compact"), merge("scores_only")),
    "store_latent": (latent_store,),
    "sparse_mla": (attention,),
    "merge_attn_states": (states,),
    "kda_conv": (conv,),
    "kda_gate": (gate,),
    "kda_prefill": (prefill,),
    "kda_decode": (decode,),
    "kda_verify": (verify,),
    "kda_commit": (verify,),
    "moe_route": (route,),
    "prepare_moe_weights": (prepare,),
    "moe_experts": (experts,),
    "all_gather": (gathered,),
    "dsa_decode": (dsa,),
    "kda_layer_decode": (kda_layer,),
    "moe_layer": (moe_layer,),
}
