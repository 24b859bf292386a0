"""Fields of a Spec at values that are not their defaults: a constant in a kernel is right for the default alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kimi_hal.ops.kda import KDASpec
from kimi_hal.ops.moe import MoESpec
from kimi_hal.ops.sparse_mla import SparseMLASpec
from kimi_hal_conformance.case import INTERP, Case, add
from kimi_hal_conformance.cases.composites import LIMITS, kda_operands, moe_operands, moe_spec
from kimi_hal_conformance.cases.moe import LIMITS as EXPERT_LIMITS
from kimi_hal_conformance.cases.moe import prepare_operands
from kimi_hal_conformance.cases.sparse_mla import attention_operands


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
    name, make = "prepare_moe_weights/fields/experts", prepare_operands(experts)
    yield Case(name, "prepare_moe_weights", experts, EXPERT_LIMITS, make, since=INTERP)
    attention = SparseMLASpec(num_heads=3, latent="latent.fp8.e4m3fn.tensor", topk=32, softmax_scale=0.03)
    name, rows = "sparse_mla/fields/softmax-scale", attention_operands(attention, 3, 20, 100)
    yield Case(name, "sparse_mla", attention, LIMITS, rows, since=INTERP)


WHY = {
    "kda_layer_decode/fields/": "Another epsilon, scale, bound and norm than the model's: none is a constant.",
    "moe_layer/fields/": "Another epsilon, weighing and activation than the model's: none is a constant.",
    "prepare_moe_weights/fields/": "Bounds of the activation that are not the model's.",
    "sparse_mla/fields/": "A scale of the softmax that is not the model's.",
}

add(cases(), WHY)
