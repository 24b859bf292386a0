"""Operands on which a rounding that no contract admits costs more than the rounding of the result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from kimi_hal.ops.kda import KDASpec
from kimi_hal_conformance.case import INTERP, Case, Make, Operands, add
from kimi_hal_conformance.cases.composites import LIMITS, kda_operands, moe_operands, moe_spec
from kimi_hal_conformance.cases.kda import conv_operands

#: How much larger than the rest what cancels is: more than bfloat16 tells apart.
LARGE = 512.0


def cancelling_taps(spec: KDASpec) -> Make:
    """Return float32 taps of which two cancel but for their last bits, and inputs that stay the same for four rows."""
    made = conv_operands(spec, (9, 5))

    def make(g: torch.Generator) -> Operands:
        operands = dict(made(g))
        taps = torch.zeros(spec.channels, spec.conv_width)
        taps[:, -2] = -1.0
        taps[:, -1] = 1.0 + (1 + torch.arange(spec.channels) % 5) * 2.0**-11
        level = 1.0 + (torch.arange(spec.channels) % 7) * 0.125
        operands["x"] = level.expand(operands["x"].shape).bfloat16()
        operands["conv_state"] = operands["conv_state"].clone()
        steady = level[None] if spec.conv_layout == "width_channel" else level[:, None]
        operands["conv_state"].copy_(steady.expand(operands["conv_state"].shape))
        return operands | {"weight": taps, "has_initial_state": torch.tensor([True, True])}

    return make


def closed_gates(spec: KDASpec) -> Make:
    """Return float32 gates between −17 and −16, which bfloat16 holds to an eighth: e to a half of that is 6 %."""
    made = kda_operands(spec, 6)

    def make(g: torch.Generator) -> Operands:
        operands = dict(made(g))
        shape = operands["out_gate"].shape
        operands["out_gate"] = -16.0 - torch.rand(shape, generator=g)
        return operands

    return make


def opposed_ranks(make: Make) -> Make:
    """Return a layer whose first and last rank add large sums that are each other's negative."""

    def wrapped(g: torch.Generator) -> Operands:
        operands = dict(make(g))
        first, *_, last = (own["weights"] for own in operands["ranks"])
        negated(first, last)
        return operands

    return wrapped


def negated(first: dict[str, Any], last: dict[str, Any]) -> None:
    """Make one rank's shared experts large, and another's the same with the other sign."""
    first["shared_w2"] = first["shared_w2"] * LARGE
    last["shared_w13"], last["shared_w2"] = first["shared_w13"].clone(), -first["shared_w2"]


def cases() -> Iterator[Case]:
    """A convolution, a gated norm, a sum over ranks."""
    for layout in ("width_channel", "channel_width"):
        conv = KDASpec(num_heads=2, head_dim=16, conv_layout=layout)
        name = f"kda_conv/edges/cancelling-taps/{layout}"
        yield Case(name, "kda_conv", conv, LIMITS, cancelling_taps(conv), since=INTERP)
    layer = KDASpec(num_heads=2, head_dim=32)
    name = "kda_layer_decode/edges/closed-gates"
    yield Case(name, "kda_layer_decode", layer, LIMITS, closed_gates(layer), since=INTERP)
    ranks = tuple(moe_spec(ranks=3, rank=rank) for rank in range(3))
    make = opposed_ranks(moe_operands(ranks[0], 5))
    name = "moe_layer/edges/opposed-ranks"
    yield Case(name, "moe_layer", ranks[0], LIMITS, make, since=INTERP, ranks=3, rank_specs=ranks)


WHY = {
    "kda_conv/edges/cancelling-taps": "Float32 taps that cancel but for bits that bfloat16 does not have.",
    "kda_layer_decode/edges/closed-gates": "Float32 gates far below 0: rounding one costs a sigmoid several per cent.",
    "moe_layer/edges/opposed-ranks": "Two ranks' large sums cancel: a sum of ranks in bfloat16 loses the third's.",
}

add(cases(), WHY)
