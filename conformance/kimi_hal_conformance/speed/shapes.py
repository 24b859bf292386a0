"""The one call of each operator that is timed: K3.1 at TP 8, decoding for 256 requests, or a prefill of 4,096 rows.

They are large enough that a device is busy with them and not with launches. What they give is not judged: values
are the cases' business. A cache holds random bytes, which take as long as others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from kimi_hal import formats, ops
from kimi_hal.ops.composites import DSASpec
from kimi_hal.ops.indexer import IndexerSpec, IndexerTopKSpec, IndexQuerySpec, StoreIndexSpec
from kimi_hal.ops.kda import KDASpec
from kimi_hal.ops.moe import MoESpec, RouteSpec
from kimi_hal.ops.sparse_mla import MergeSpec, SparseMLASpec, StoreLatentSpec
from kimi_hal.ops.spec import Limits, Spec
from kimi_hal.ops.topk_merge import TopKSpec
from kimi_hal_conformance.case import Checkpoint
from kimi_hal_conformance.draws import ints, normal
from kimi_hal_conformance.oracle import Question
from kimi_hal_conformance.relations.variants import total

ROWS, PREFILL, HEADS, TOPK, CONTEXT = 256, 4096, 12, 2048, 16384
REQUESTS = 16
#: Tokens of each of 256 requests, which have latents of their own.
DECODED = 4096
INDEX, LATENT = "index.fp8.e4m3fn.pow2.page64", "latent.fp8.e4m3fn.tensor"
BF16 = torch.bfloat16
KDA = KDASpec(num_heads=HEADS)
EXPERTS = MoESpec(num_experts=896, num_local=64, intermediate=384)

Shape = tuple[Spec, dict[str, Any]]


def question(operator: str) -> Question:
    """Return the call of an operator that is timed."""
    spec, operands = SHAPES[operator](torch.Generator().manual_seed(0))
    limits = Limits(max_rows=total(operator, operands), max_reqs=ROWS, max_context=CONTEXT)
    return Question(ops.get(operator), spec, limits, operands)


def index_query(g: torch.Generator) -> Shape:
    """Return 4,096 rows of queries of 32 heads."""
    q, weights = normal(g, PREFILL, 32, 128, dtype=BF16), normal(g, PREFILL, 32)
    return IndexQuerySpec(index=INDEX), {"q": q, "weights": weights}


def index_store(g: torch.Generator) -> Shape:
    """Return 131,072 tokens for shuffled slots: a short call would be all launch."""
    tokens = 1 << 17
    cache = _bytes(g, tokens // 64, formats.index(INDEX).page_bytes)
    slots = torch.randperm(tokens, generator=g)
    return StoreIndexSpec(index=INDEX), {
        "k": normal(g, tokens, 128, dtype=BF16),
        "slots": slots,
        "cache": cache,
    }


def scored(g: torch.Generator) -> dict[str, Any]:
    """Return 256 rows over 16 requests of 16,384 keys."""
    pages = REQUESTS * CONTEXT // 64
    q, scale = formats.index(INDEX).encode_query(normal(g, ROWS, 32, 128).bfloat16())
    return {
        "q": q,
        "q_scale": torch.empty(ROWS, 32, 0, dtype=torch.uint8),
        "weights": normal(g, ROWS, 32) * scale,
        "cache": index_keys(g, pages),
        "block_table": torch.randperm(pages, generator=g).int().view(REQUESTS, -1),
        "row_req": torch.arange(ROWS, dtype=torch.int32) % REQUESTS,
        "row_len": ints([CONTEXT] * ROWS),
    }


def index_keys(g: torch.Generator, pages: int) -> Tensor:
    """Return pages of normal keys, the same 64 again and again."""
    fmt = formats.index(INDEX)
    own = torch.zeros(64, fmt.page_bytes, dtype=torch.uint8)
    fmt.write(own, torch.arange(64 * 64), normal(g, 64 * 64, 128))
    return own.repeat(pages // 64, 1)


def index_scores(g: torch.Generator) -> Shape:
    """Score every key of every row's request."""
    return IndexerSpec(index=INDEX), scored(g)


def index_topk(g: torch.Generator) -> Shape:
    """Score them and select 2,048."""
    return IndexerTopKSpec(index=INDEX, topk=TOPK), scored(g)


def select(g: torch.Generator) -> Shape:
    """Select 2,048 of 65,536 scores in 256 rows."""
    width = 1 << 16
    return TopKSpec(topk=TOPK), {"scores": normal(g, ROWS, width), "row_len": ints([width] * ROWS)}


def kda_rows(g: torch.Generator, rows: int) -> dict[str, Any]:
    """Return rows of q, k, v and the raw gate, and a state for each of 256 sequences."""
    mixed = normal(g, rows, 3, HEADS, 128, dtype=BF16)
    return {
        **{name: mixed[:, i] for i, name in enumerate("qkv")},
        **gate_rows(g, rows),
        "state": normal(g, ROWS, HEADS, 128, 128, spread=0.1),
    }


def gate_rows(g: torch.Generator, rows: int) -> dict[str, Any]:
    """Return the raw gate of rows, and its parameters."""
    return {
        "raw_g": normal(g, rows, HEADS, 128, dtype=BF16),
        "raw_beta": normal(g, rows, HEADS, dtype=BF16),
        "A_log": normal(g, HEADS),
        "dt_bias": normal(g, HEADS * 128),
    }


def gate(g: torch.Generator) -> Shape:
    """Return the gate of 32,768 rows."""
    return KDA, gate_rows(g, 8 * PREFILL)


def decode(g: torch.Generator) -> Shape:
    """Return one token of 256 sequences."""
    return KDA, kda_rows(g, ROWS) | {"state_ids": torch.randperm(ROWS, generator=g).int()}


def _sequences(count: int) -> dict[str, Tensor]:
    ends = torch.arange(count + 1, dtype=torch.int32) * (PREFILL // count)
    return {"state_ids": torch.arange(count, dtype=torch.int32), "cu_seqlens": ends}


def prefill(g: torch.Generator) -> Shape:
    """Return 4,096 rows of four sequences."""
    return KDA, kda_rows(g, PREFILL) | _sequences(4)


def conv(g: torch.Generator) -> Shape:
    """Return 4,096 rows of four sequences."""
    channels = 3 * HEADS * 128
    operands = {
        "x": normal(g, PREFILL, channels, dtype=BF16),
        "weight": normal(g, channels, 4, dtype=BF16),
        "conv_state": normal(g, ROWS, 3, channels, dtype=BF16),
    }
    return KDA, operands | _sequences(4)


def route(g: torch.Generator) -> Shape:
    """Return logits of 4,096 rows."""
    return RouteSpec(), {"logits": normal(g, 4 * PREFILL, 896), "bias": normal(g, 896, spread=0.1)}


def experts(g: torch.Generator) -> Shape:
    """Return 256 rows routed to 64 experts of this rank."""
    spec = EXPERTS
    fmt = formats.experts(spec.weights)
    w13 = fmt.encode(normal(g, 1, 2 * spec.intermediate, spec.hidden, spread=spec.hidden**-0.5))
    w2 = fmt.encode(normal(g, 1, spec.hidden, spec.intermediate, spread=spec.intermediate**-0.5))
    names = ("w13", "w13_scale", "w2", "w2_scale")
    whole = {n: t.repeat(spec.num_local, 1, 1) for n, t in zip(names, (*w13, *w2), strict=True)}
    ids = torch.stack([torch.randperm(spec.num_local, generator=g)[: spec.topk] for _ in range(ROWS)])
    return spec, {
        "x": normal(g, ROWS, spec.hidden, dtype=BF16),
        "topk_weights": torch.softmax(normal(g, ROWS, spec.topk), dim=-1),
        "topk_ids": ids.int(),
        "weights": Checkpoint(**whole),
    }


def latent_store(g: torch.Generator) -> Shape:
    """Return 32,768 tokens for shuffled slots."""
    tokens = 1 << 15
    cache = _bytes(g, tokens // 64, 64 * formats.latent(LATENT).row_bytes)
    latents = {"kv_c": normal(g, tokens, 512, dtype=BF16), "k_pe": normal(g, tokens, 64, dtype=BF16)}
    slots = torch.randperm(tokens, generator=g)
    return StoreLatentSpec(latent=LATENT), {
        **latents,
        "slots": slots,
        "cache": cache,
        "k_scale": torch.ones(1),
    }


def attention(g: torch.Generator) -> Shape:
    """Return 256 rows that select 2,048 of 262,144 tokens each."""
    tokens = REQUESTS * CONTEXT
    cache = _bytes(g, tokens // 64, 64 * formats.latent(LATENT).row_bytes) & 0x77  # no NaN among them
    indices = torch.randint(0, tokens, (ROWS, TOPK), generator=g, dtype=torch.int32)
    q = normal(g, ROWS, HEADS, 576, dtype=BF16)
    spec = SparseMLASpec(num_heads=HEADS, latent=LATENT, topk=TOPK)
    return spec, {"q": q, "cache": cache, "indices": indices, "k_scale": torch.full((1,), 0.01)}


def sparse_decode(g: torch.Generator) -> Shape:
    """Return one row of each of 256 requests of 4,096 tokens, in caches of their own."""
    pages = ROWS * DECODED // 64
    latents = _bytes(g, pages, 64 * formats.latent(LATENT).row_bytes) & 0x77  # no NaN among them
    spec = DSASpec(
        query=IndexQuerySpec(index=INDEX),
        indexer=IndexerTopKSpec(index=INDEX, topk=TOPK),
        attn=SparseMLASpec(num_heads=HEADS, latent=LATENT, topk=TOPK, index_space="position"),
    )
    return spec, {
        "q": normal(g, ROWS, HEADS, 576, dtype=BF16),
        "index_q": normal(g, ROWS, 32, 128, dtype=BF16),
        "index_w": normal(g, ROWS, 32),
        "latent_cache": latents,
        "index_cache": index_keys(g, pages),
        "latent_table": torch.randperm(pages, generator=g).int().view(ROWS, -1),
        "index_table": torch.randperm(pages, generator=g).int().view(ROWS, -1),
        "row_req": torch.arange(ROWS, dtype=torch.int32),
        "row_len": ints([DECODED] * ROWS),
        "k_scale": torch.full((1,), 0.01),
    }


def merge(g: torch.Generator) -> Shape:
    """Return eight parts of 1,024 rows."""
    rows = 4 * ROWS
    outs, lses = normal(g, 8, rows, HEADS, 512, dtype=BF16), normal(g, 8, rows, HEADS)
    return MergeSpec(parts=8, num_heads=HEADS), {"outs": outs, "lses": lses}


def _bytes(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(0, 255, shape, generator=g, dtype=torch.uint8)


SHAPES: Mapping[str, Callable[[torch.Generator], Shape]] = {
    "quantize_index_query": index_query,
    "store_index_keys": index_store,
    "indexer_logits": index_scores,
    "indexer_topk": index_topk,
    "topk_select": select,
    "kda_conv": conv,
    "kda_gate": gate,
    "kda_prefill": prefill,
    "kda_decode": decode,
    "moe_route": route,
    "moe_experts": experts,
    "store_latent": latent_store,
    "sparse_mla": attention,
    "merge_attn_states": merge,
    "dsa_decode": sparse_decode,
}


#: Fields of a Spec that say how operands are kept.
KINDS = ("index", "latent", "weights")


def described(asked: Question) -> str:
    """Say what is timed, operand by operand."""
    parts = (
        f"{n} {list(t.shape)}" for n, t in asked.operands.items() if isinstance(t, Tensor) and t.ndim > 1
    )
    whole = {f.name: getattr(asked.spec, f.name) for f in dataclasses.fields(asked.spec)}
    specs = [asked.spec, *(part for part in whole.values() if isinstance(part, Spec))]  # a composite's parts
    kinds = dict.fromkeys(
        str(kind) for name in KINDS for spec in specs if (kind := getattr(spec, name, None))
    )
    return ", ".join([*kinds, *parts])
