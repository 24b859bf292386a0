"""Fields of the Specs inside a composite at other values than the model's: each part is planned with its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from kimi_hal.ops.composites import DSASpec
from kimi_hal.ops.moe import MoESpec, RouteSpec
from kimi_hal.ops.spec import DCP
from kimi_hal_conformance.case import INTERP, QUICK, Case, add
from kimi_hal_conformance.cases.composites import LIMITS, dsa_operands, dsa_spec, moe_operands, moe_spec

LENGTHS = (200, 1, 77)


def of_dsa(spec: DSASpec, **parts: Mapping[str, Any]) -> DSASpec:
    """Return the Spec with other fields of its parts."""
    return replace(spec, **{name: replace(getattr(spec, name), **fields) for name, fields in parts.items()})


def dsa_cases() -> Iterator[Case]:
    """Fields of the index query, of the selection and of attention, then of the merge over three ranks."""
    one, bf16 = dsa_spec(1), {"weights_dtype": "bfloat16", "num_heads": 5}
    page = replace(one.attn, page=24, num_heads=3)
    specs = {
        "index-query": of_dsa(one, query={**bf16, "hadamard": True, "weight_scale": 0.75}, indexer=bf16),
        "selection": of_dsa(
            one, indexer={"score": "bfloat16", "topk": 40, "ordered": False}, attn={"topk": 40}
        ),
        "attention": replace(
            one, attn=replace(page, softmax_scale=0.2, out_dtype="float32", return_lse=False)
        ),
        "fp8-query": of_dsa(one, attn={"q_dtype": "float8_e4m3fn"}),
    }
    for label, spec in specs.items():
        make = dsa_operands(spec, LENGTHS, False)
        yield Case(f"dsa_decode/fields/{label}", "dsa_decode", spec, LIMITS, make, since=INTERP)
    runs = DCP(world=3, interleave=5)
    scored = {"score": "bfloat16", "topk": 40, "dcp": runs}
    merge = {**scored, "protocol": "compact", "quota": 7, "ordered": True}
    spec = of_dsa(
        dsa_spec(2),
        indexer=scored,
        attn={"topk": 40, "dcp": runs, "num_heads": 9, "out_dtype": "float32"},
        merge=merge,
    )
    make = dsa_operands(spec, LENGTHS, True)
    yield Case("dsa_decode/fields/merge", "dsa_decode", spec, LIMITS, make, since=QUICK, ranks=3)


def moe_cases() -> Iterator[Case]:
    """A router with groups and an epsilon, and other widths."""
    route = RouteSpec(num_experts=18, topk=5, groups=6, topk_groups=3, denom_eps=0.5)
    experts = MoESpec(num_experts=18, num_local=18, topk=5, hidden=96, intermediate=160)
    spec = replace(moe_spec(), route=route, experts=experts, model_dim=160)
    yield Case("moe_layer/fields/groups", "moe_layer", spec, LIMITS, moe_operands(spec, 7), since=INTERP)


WHY = {
    "dsa_decode/fields/": "Each part is planned with its own fields, at other values than the model's.",
    "moe_layer/fields/groups": "A router with groups and an epsilon in its denominator, and other widths.",
}

add(dsa_cases(), WHY)
add(moe_cases(), WHY)
