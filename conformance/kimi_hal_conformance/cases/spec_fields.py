"""Fields of a Spec at values that are not their defaults: a constant in a kernel is right for the default alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from kimi_hal.ops.all_gather import GatherSpec
from kimi_hal.ops.indexer import IndexerSpec, IndexerTopKSpec, StoreIndexSpec
from kimi_hal.ops.kda import KDASpec
from kimi_hal.ops.moe import MoESpec
from kimi_hal.ops.sparse_mla import SparseMLASpec, StoreLatentSpec
from kimi_hal.ops.spec import DCP, Spec
from kimi_hal.ops.topk_merge import TopKMergeSpec, TopKSpec
from kimi_hal_conformance.case import INTERP, Case, Make, Operands, add
from kimi_hal_conformance.cases.all_gather import operands as gather_operands
from kimi_hal_conformance.cases.composites import LIMITS, kda_operands, moe_operands, moe_spec
from kimi_hal_conformance.cases.indexer import FP8 as INDEX
from kimi_hal_conformance.cases.indexer import LIMITS as KEYS
from kimi_hal_conformance.cases.indexer import score_operands
from kimi_hal_conformance.cases.indexer import store_operands as index_rows
from kimi_hal_conformance.cases.kda import LIMITS as KDA_LIMITS
from kimi_hal_conformance.cases.kda import (
    conv_operands,
    decode_operands,
    gate_operands,
    prefill_operands,
    verify_operands,
)
from kimi_hal_conformance.cases.kda_edges import elsewhere
from kimi_hal_conformance.cases.moe import LIMITS as EXPERT_LIMITS
from kimi_hal_conformance.cases.moe import prepare_operands
from kimi_hal_conformance.cases.sparse_mla import attention_operands
from kimi_hal_conformance.cases.sparse_mla import store_operands as latent_rows
from kimi_hal_conformance.cases.topk_merge import merge_operands, select_operands, spread, ties

LATENT = "latent.fp8.e4m3fn.tensor"


def cases() -> Iterator[Case]:
    """The operators of which a field had one value in all other cases."""
    layers = {
        "norm-eps": KDASpec(num_heads=2, head_dim=32, norm_eps=0.25),
        "no-norm": KDASpec(num_heads=2, head_dim=32, qk_norm=False, scale=0.3),
        "unbounded": KDASpec(num_heads=2, head_dim=32, lower_bound=None, norm_eps=1e-3),
    }
    for label, layer in layers.items():
        name = f"kda_layer_decode/fields/{label}"
        yield Case(name, "kda_layer_decode", layer, LIMITS, kda_operands(layer, 5), since=INTERP)
    plain = moe_spec(norm_eps=0.25)
    mixtures = {
        "norm-eps": plain,
        "route": replace(plain, route=replace(plain.route, renormalize=False, scale=2.5, ordered=True)),
        "experts": replace(
            plain, experts=replace(plain.experts, beta=1.5, linear_beta=3.0, out_dtype="float32")
        ),
    }
    for label, mixture in mixtures.items():
        name = f"moe_layer/fields/{label}"
        yield Case(name, "moe_layer", mixture, LIMITS, moe_operands(mixture, 5), since=INTERP)
    experts = MoESpec(
        num_experts=4,
        num_local=4,
        topk=3,
        hidden=64,
        intermediate=96,
        beta=1.5,
        linear_beta=3.0,
        out_dtype="float32",
    )
    experts = replace(experts, num_experts=7, expert_offset=3)
    name, make = "prepare_moe_weights/fields/experts", prepare_operands(experts)
    yield Case(name, "prepare_moe_weights", experts, EXPERT_LIMITS, make, since=INTERP)
    attention = SparseMLASpec(num_heads=3, latent="latent.fp8.e4m3fn.tensor", topk=32, softmax_scale=0.03)
    name, rows = "sparse_mla/fields/softmax-scale", attention_operands(attention, 3, 20, 100)
    yield Case(name, "sparse_mla", attention, LIMITS, rows, since=INTERP)
    yield from of_keys_and_ranks()
    yield from of_groups()
    yield from of_stores()
    yield from not_read()


def of_keys_and_ranks() -> Iterator[Case]:
    """Rounded weights of the selection, index keys that every rank holds, runs of five keys over three ranks."""
    weights = IndexerTopKSpec(index=INDEX, topk=16, weights_dtype="bfloat16", return_selected=True)
    runs = DCP(world=3, rank=2, interleave=5)
    held, lengths = replace(runs, index="replicated"), (65, 3, 200)
    of_dcp = {"weights": DCP(), "replicated": held, "runs": runs}
    for label, dcp in of_dcp.items():
        spec = replace(weights, dcp=dcp)
        make, name = score_operands(spec, lengths, 1), f"indexer_topk/fields/{label}"
        yield Case(name, "indexer_topk", spec, KEYS, make, since=INTERP)
    scored = IndexerSpec(index=INDEX, num_heads=3, dcp=runs)
    name, make = "indexer_logits/fields/runs", score_operands(scored, lengths, 1)
    yield Case(name, "indexer_logits", scored, KEYS, make, since=INTERP)
    for label, dcp in (("replicated", held), ("runs", runs)):
        select = TopKSpec(topk=16, dcp=dcp)
        make = select_operands(select, spread, (100, 6, 40), 120)
        yield Case(f"topk_select/fields/{label}", "topk_select", select, KEYS, make, since=INTERP)
        attend = SparseMLASpec(
            num_heads=3, latent=LATENT, page=24, topk=32, index_space="position", dcp=replace(dcp, rank=1)
        )
        rows = attention_operands(attend, 3, 32, 100)
        yield Case(f"sparse_mla/fields/{label}", "sparse_mla", attend, LIMITS, rows, since=INTERP)


def of_groups() -> Iterator[Case]:
    """Selections that are whole on every rank, a quota of candidates, runs of five keys over three ranks."""
    three = DCP(world=3, interleave=5)
    merges = {
        "replicated": TopKMergeSpec(dcp=replace(three, index="replicated"), topk=16),
        "quota": TopKMergeSpec(dcp=three, topk=16, protocol="compact", score="bfloat16", quota=3),
    }
    for label, merge in merges.items():
        make, name = merge_operands(merge, ties, (0, 3, 16, 150)), f"topk_merge/fields/{label}"
        yield Case(name, "topk_merge", merge, KEYS, make, since=INTERP, ranks=3)
    gather = GatherSpec(layout="token_order", dtype="float32", dcp=replace(three, index="replicated"))
    name, shards = "all_gather/fields/replicated", gather_operands(gather, 10, 23)
    yield Case(name, "all_gather", gather, KEYS, shards, since=INTERP, ranks=3)


def of_stores() -> Iterator[Case]:
    """Slots that several rows may name: here by equal rows, which leave the same bytes in any order."""
    index = StoreIndexSpec(index=INDEX, dump_slot=3)
    latent = StoreLatentSpec(latent=LATENT, page=24, dump_slot=3)
    stores: tuple[tuple[str, Spec, Make], ...] = (
        ("store_index_keys", index, dumped(index_rows(INDEX, 9), ("k",))),
        ("store_latent", latent, dumped(latent_rows(LATENT, latent.page, 9), ("kv_c", "k_pe"))),
    )
    for operator, spec, make in stores:
        yield Case(f"{operator}/fields/dump-slot", operator, spec, KEYS, make, since=INTERP)


def dumped(make: Make, rows: Sequence[str]) -> Make:
    """Return rows of which three are equal and go into slot 3, the others into slots of their own."""

    def wrapped(g: torch.Generator) -> Operands:
        operands = dict(make(g))
        operands["slots"] = torch.arange(9) * 5 + 7
        for name in rows:
            operands[name][[4, 8]] = operands[name][0].clone()
        operands["slots"][[0, 4, 8]] = 3
        return operands

    return wrapped


def not_read() -> Iterator[Case]:
    """Fields of the layer's one Spec that an operator of it does not read."""
    other: dict[str, Any] = {"norm_eps": 0.25, "num_layers": 3}
    small = KDASpec(num_heads=2, head_dim=32, **other)
    marked = replace(small, checkpoints=True)
    unmarked = replace(marked, checkpoints=False)
    calls: dict[str, tuple[KDASpec, Make]] = {
        "kda_gate": (replace(marked, gate="log"), gate_operands(small, 5)),
        "kda_conv": (small, conv_operands(small, (1, 0, 5, 2))),
        "kda_prefill": (small, prefill_operands(small, (3, 0, 17))),
        "kda_decode": (marked, decode_operands(small, 5)),
        "kda_verify": (marked, verify_operands(small, (4, 1, 3), KDA_LIMITS)),
        "kda_commit": (unmarked, elsewhere(unmarked, (2, 8, 0))),
        "kda_layer_decode": (marked, kda_operands(small, 5)),
    }
    for operator, (spec, make) in calls.items():
        yield Case(f"{operator}/fields/not-read", operator, spec, KDA_LIMITS, make, since=INTERP)


RUNS = "Runs of five keys over three ranks, and pages of 24: none is a power of two."
NOT_READ = "A field that only other operators of the layer's one Spec read: it changes nothing."
WHY = {
    "kda_layer_decode/fields/": "Another epsilon, scale, bound and norm than the model's: none is a constant.",
    "moe_layer/fields/": "Another epsilon, weighing and activation than the model's: none is a constant.",
    "prepare_moe_weights/fields/": "Bounds of the activation that are not the model's.",
    "sparse_mla/fields/": "A scale of the softmax that is not the model's.",
    "sparse_mla/fields/replicated": "That index keys are on every rank says nothing of latents: a rank has its own.",
    "indexer_topk/fields/weights": "Weights of heads in bfloat16.",
    "indexer_topk/fields/runs": RUNS,
    "indexer_logits/fields/runs": RUNS,
    "topk_select/fields/runs": RUNS,
    "sparse_mla/fields/runs": RUNS,
    "indexer_topk/fields/replicated": "Every index key on every rank: bounds and positions are global.",
    "topk_select/fields/replicated": "Every index key on every rank: bounds and positions are global.",
    "topk_merge/fields/replicated": "Every rank selected from all keys: nothing is merged, each keeps its selection.",
    "topk_merge/fields/quota": "A first message of fewer candidates than win on a rank, so that a second is needed.",
    "all_gather/fields/replicated": "Where index keys are says nothing of whose rows stand where.",
    "store_index_keys/fields/dump-slot": "Equal rows into one slot that a Spec allows several rows.",
    "store_latent/fields/dump-slot": "Equal rows into one slot that a Spec allows several rows.",
    **{
        f"kda_{name}/fields/not-read": NOT_READ
        for name in ("gate", "conv", "prefill", "decode", "verify", "commit", "layer_decode")
    },
}

add(cases(), WHY)
