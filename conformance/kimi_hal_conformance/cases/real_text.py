"""Real text through a trained encoder, at the model's widths: what random numbers never show (``docs/workload.md``).

Channels that stand out, scores that are mostly exactly 0, attention mass on few keys, decays over all of their range.
The activations must have been built; where they are not, these cases are not run, and say what to type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

import torch
from torch import Tensor

from kimi_hal import formats, workload
from kimi_hal.errors import KimiHalError
from kimi_hal.ops.composites import DSASpec
from kimi_hal.ops.indexer import IndexerSpec, IndexerTopKSpec, IndexQuerySpec, StoreIndexSpec
from kimi_hal.ops.kda import KDASpec
from kimi_hal.ops.moe import MoESpec, RouteSpec
from kimi_hal.ops.sparse_mla import MergeSpec, SparseMLASpec, StoreLatentSpec
from kimi_hal.ops.spec import DCP, Limits, Spec
from kimi_hal.ops.topk_merge import TopKMergeSpec, TopKSpec
from kimi_hal.presets import Deployment
from kimi_hal.reference.indexer import indexer_logits, quantize_index_query
from kimi_hal.reference.sparse_mla import sparse_mla
from kimi_hal.workload.reader import Workload
from kimi_hal_conformance.case import STANDARD, Case, Checkpoint, Operands, add
from kimi_hal_conformance.cases.kda import conv_pool, state_pool
from kimi_hal_conformance.cases.model_shapes import packed
from kimi_hal_conformance.cases.topk_merge import rank_operands
from kimi_hal_conformance.draws import block_tables, ints, owned_slots, stale_pages
from kimi_hal_conformance.sparse import CannotTryError

LIMITS = Limits(max_rows=256, max_reqs=16, max_context=1 << 15, rows_per_req=8, uniform=False)
FP8, LATENT = "index.fp8.e4m3fn.pow2.page64", "latent.fp8.e4m3fn.tensor"
#: Rows that ask: the last of the text, one in its middle, one with fewer keys than k, and the first.
ASKING = (32_767, 16_000, 1_500, 0)
KEYS = 2048

Draw = Callable[[torch.Generator, Workload], Operands]


@lru_cache(maxsize=1)
def text() -> Workload:
    """Return the workload, read once.

    Raises:
        CannotTryError: it is not built, or this machine cannot read it; says what to type.
    """
    try:
        return workload.load()
    except KimiHalError as error:
        raise CannotTryError(str(error)) from error


def scale_of(values: Tensor) -> Tensor:
    """Return the factor under which the largest value is FP8's largest."""
    return (values.float().abs().max() / 448.0).reshape(1)


def index_cache(g: torch.Generator, w: Workload, name: str, length: int) -> tuple[Tensor, Tensor]:
    """Return the keys of the text's first tokens on shuffled pages, and their block table."""
    fmt = formats.index(name)
    pages = -(-length // fmt.page)
    table = block_tables(g, [length], fmt.page, pages, pages)
    cache = stale_pages(pages, fmt.page_bytes)
    fmt.write(cache, owned_slots(table, [length], fmt.page), w.index_keys(slice(0, length)).float())
    return cache, table


def latent_cache(g: torch.Generator, w: Workload, page: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the latents of the text's first tokens on shuffled pages, their block table and their scale."""
    latent, shared = w.latents(0, length)
    scale, fmt = scale_of(torch.cat([latent, shared], dim=1)), formats.latent(LATENT)
    pages = -(-length // page)
    table = block_tables(g, [length], page, pages, pages)
    cache = stale_pages(pages, page * fmt.row_bytes)
    slots = owned_slots(table, [length], page)
    fmt.write(cache, page, slots, latent.float(), shared.float(), scale)
    return cache, table, scale


def scored(g: torch.Generator, w: Workload) -> Operands:
    """Return quantised queries of the asking rows over the whole text."""
    q, weights = w.index_query(ASKING)
    codes, scale, folded = quantize_index_query(IndexQuerySpec(index=FP8), q, weights)
    cache, table = index_cache(g, w, FP8, w.context)
    return {
        "q": codes,
        "q_scale": scale,
        "weights": folded,
        "cache": cache,
        "block_table": table,
        "row_req": ints([0] * len(ASKING)),
        "row_len": ints([position + 1 for position in ASKING]),
    }


def all_scores(g: torch.Generator, w: Workload) -> tuple[Tensor, Tensor]:
    """Return the scores of the asking rows, and their lengths."""
    given = scored(g, w)
    return indexer_logits(IndexerSpec(index=FP8), **given), given["row_len"]


def selecting(g: torch.Generator, w: Workload) -> Operands:
    """Return real scores to select from."""
    scores, lengths = all_scores(g, w)
    return {"scores": scores, "row_len": lengths}


def merging(spec: TopKMergeSpec) -> Draw:
    """Return what each of two ranks selects from its share of real scores."""

    def draw(g: torch.Generator, w: Workload) -> Operands:
        scores, lengths = all_scores(g, w)
        given = scores.to(getattr(torch, spec.score))
        return {
            "ranks": [rank_operands(spec, given, lengths.tolist(), rank) for rank in range(spec.dcp.world)]
        }

    return draw


def attending(spec: SparseMLASpec) -> Draw:
    """Return queries of the asking rows over 2,048 tokens that stand before each, spread over the text."""

    def draw(g: torch.Generator, w: Workload) -> Operands:
        cache, table, scale = latent_cache(g, w, spec.page, w.context)
        chosen = torch.full((len(ASKING), KEYS), -1, dtype=torch.int32)
        for row, last in enumerate(ASKING):
            some = torch.randperm(last + 1, generator=g)[:KEYS].sort().values
            chosen[row, : some.numel()] = some.int()
        return {
            "q": w.mla_query(ASKING, spec.num_heads),
            "cache": cache,
            "indices": chosen,
            "k_scale": scale,
            "block_table": table,
            "row_req": ints([0] * len(ASKING)),
        }

    return draw


def parted(spec: MergeSpec) -> Draw:
    """Return attention over two halves of a text's first tokens."""

    def draw(g: torch.Generator, w: Workload) -> Operands:
        attend = SparseMLASpec(num_heads=spec.num_heads, latent=LATENT, topk=512)
        cache, _, scale = latent_cache(g, w, attend.page, 1024)
        q = w.mla_query((1023, 700), spec.num_heads)
        halves = torch.arange(1024, dtype=torch.int32).view(2, 1, 512).expand(2, 2, 512)
        found = [sparse_mla(attend, q, cache, half.contiguous(), scale) for half in halves]
        outs, lses = (torch.stack(part) for part in zip(*found, strict=True))
        return {"outs": outs.bfloat16(), "lses": lses.float()}

    return draw


def deciding(spec: DSASpec) -> Draw:
    """Return a decode step at the end of so many tokens as are selected, and one in their middle."""

    def draw(g: torch.Generator, w: Workload) -> Operands:
        length = KEYS  # all keys are selected: which of two close scores is larger does not decide anything
        latents, latent_table, scale = latent_cache(g, w, spec.attn.page, length)
        keys, index_table = index_cache(g, w, FP8, length)
        q, weights = w.index_query((length - 1, 1000))
        return {
            "q": w.mla_query((length - 1, 1000), spec.heads),
            "index_q": q,
            "index_w": weights,
            "latent_cache": latents,
            "index_cache": keys,
            "latent_table": latent_table,
            "index_table": index_table,
            "row_req": ints([0, 0]),
            "row_len": ints([length, 1001]),
            "k_scale": scale,
        }

    return draw


def gates(w: Workload, spec: KDASpec, rows: range) -> dict[str, Tensor]:
    """Return raw gates of some rows and their parameters."""
    found = w.kda_inputs(rows, spec.num_heads)
    return {"raw_g": found.raw_g, "raw_beta": found.raw_beta, "A_log": found.A_log, "dt_bias": found.dt_bias}


def projected(w: Workload, spec: KDASpec, rows: range) -> dict[str, Tensor]:
    """Return q, k and v of some rows, as a convolution would give them."""
    mixed = w.kda_inputs(rows, spec.num_heads).x.view(len(rows), 3, spec.num_heads, spec.head_dim)
    return dict(zip("qkv", mixed.unbind(1), strict=True)) | gates(w, spec, rows)


def convolving(spec: KDASpec, rows: int) -> Draw:
    """Return raw inputs of two stretches of the text."""

    def draw(g: torch.Generator, w: Workload) -> Operands:
        found = w.kda_inputs(range(rows), spec.num_heads)
        return {
            "x": found.x,
            "weight": found.conv_weight,
            "conv_state": conv_pool(g, spec),
            "state_ids": ints([1, 4]),
            "cu_seqlens": ints([0, rows // 3, rows]),
            "has_initial_state": torch.tensor([False, True]),
        }

    return draw


def prefilling(spec: KDASpec, rows: int) -> Draw:
    """Return a stretch of the text in one sequence that begins, and a short one that continues."""

    def draw(g: torch.Generator, w: Workload) -> Operands:
        cut = {"state_ids": ints([1, 4]), "cu_seqlens": ints([0, rows - 3, rows])}
        starts = {"has_initial_state": torch.tensor([False, True])}
        return projected(w, spec, range(rows)) | {"state": state_pool(g, spec)} | cut | starts

    return draw


def decoding(spec: KDASpec) -> Draw:
    """Return a token of each of some requests."""

    def draw(g: torch.Generator, w: Workload) -> Operands:
        return projected(w, spec, range(500, 505)) | {
            "state": state_pool(g, spec),
            "state_ids": ints([3, 0, -1, 8, 5]),
        }

    return draw


def layered(spec: KDASpec) -> Draw:
    """Return a token of each of some requests, before the convolution."""

    def draw(g: torch.Generator, w: Workload) -> Operands:
        found = w.kda_inputs(range(500, 505), spec.num_heads)
        names = ("A_log", "dt_bias")
        parameters = {name: getattr(found, name) for name in names}
        return {
            "x": found.x,
            "raw_g": found.raw_g,
            "raw_beta": found.raw_beta,
            "out_gate": found.out_gate,
            "weights": Checkpoint(conv=found.conv_weight, **parameters, norm=found.norm_weight),
            "conv_state": conv_pool(g, spec),
            "state": state_pool(g, spec),
            "state_ids": ints([3, 0, -1, 8, 5]),
        }

    return draw


def routing(g: torch.Generator, w: Workload) -> Operands:
    """Return the router's logits of a stretch of the text."""
    return {"logits": w.router_logits(range(4000, 4130)), "bias": w.router().bias}


def mixing(spec: MoESpec) -> Draw:
    """Return hidden states, routed as the text routes them modulo the experts that are here."""

    def draw(g: torch.Generator, w: Workload) -> Operands:
        rows = range(4000, 4008)
        best = w.router_logits(rows).topk(spec.topk, dim=1)
        return {
            "x": w.hidden(rows, spec.hidden),
            "topk_weights": torch.softmax(best.values, dim=1),
            "topk_ids": best.indices.int(),
            "weights": packed(g, spec),
        }

    return draw


def cases() -> Iterator[Case]:
    """Every operator that has an operand in a text."""
    query, store = IndexQuerySpec(index=FP8), StoreIndexSpec(index=FP8)
    yield case(
        "quantize_index_query",
        query,
        lambda g, w: dict(zip(("q", "weights"), w.index_query(range(64)), strict=True)),
    )
    yield case("store_index_keys", store, storing_keys)
    yield case("store_latent", StoreLatentSpec(latent=LATENT), storing_latents)
    yield case("indexer_logits", IndexerSpec(index=FP8), scored)
    yield case("indexer_topk", IndexerTopKSpec(index=FP8, return_selected=True), scored)
    yield case("topk_select", TopKSpec(return_selected=True), selecting)
    merge = Deployment(tp=2, dcp=two_ranks()).specs()["topk_merge"]
    assert isinstance(merge, TopKMergeSpec)
    yield case("topk_merge", merge, merging(merge), ranks=2)
    attend = SparseMLASpec(num_heads=24, latent=LATENT, index_space="position")
    yield case("sparse_mla", attend, attending(attend))
    parts = MergeSpec(parts=2, num_heads=24, return_lse=True)
    yield case("merge_attn_states", parts, parted(parts))
    dsa = Deployment(tp=8).specs()["dsa_decode"]
    assert isinstance(dsa, DSASpec)
    yield case("dsa_decode", dsa, deciding(dsa))
    kda = KDASpec(num_heads=6)
    yield case("kda_gate", kda, lambda g, w: gates(w, kda, range(70)))
    yield case("kda_conv", kda, convolving(kda, 70))
    yield case("kda_prefill", kda, prefilling(kda, 132))
    yield case("kda_decode", kda, decoding(kda))
    yield case("kda_layer_decode", kda, layered(kda))
    yield case("moe_route", RouteSpec(), routing)
    experts = MoESpec(num_local=112, intermediate=96)
    yield case("moe_experts", experts, mixing(experts))


def two_ranks() -> DCP:
    """Return how keys are spread over two ranks."""
    return DCP(world=2, interleave=16)


def storing_keys(g: torch.Generator, w: Workload) -> Operands:
    """Return index keys of a stretch of the text."""
    slots = torch.randperm(256, generator=g)[:200]
    cache = stale_pages(4, formats.index(FP8).page_bytes, stride_pad=96)
    return {"k": w.index_keys(range(200)), "slots": slots, "cache": cache}


def storing_latents(g: torch.Generator, w: Workload) -> Operands:
    """Return latents of a stretch of the text."""
    latent, shared = w.latents(100, 300)
    return {
        "kv_c": latent,
        "k_pe": shared,
        "slots": torch.randperm(256, generator=g)[:200],
        "cache": stale_pages(4, 64 * formats.latent(LATENT).row_bytes, stride_pad=32),
        "k_scale": scale_of(latent) / 2,  # so that the channels that stand out saturate
    }


def case(operator: str, spec: Spec, draw: Draw, ranks: int = 0) -> Case:
    """Return one case."""
    why = "Activations of a trained encoder over real text: channels that stand out, ties, mass on few keys."

    def make(g: torch.Generator) -> Operands:
        return draw(g, text())

    return Case(f"{operator}/real-text", operator, spec, LIMITS, make, since=STANDARD, ranks=ranks, why=why)


add(cases())
