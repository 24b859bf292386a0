"""Operands on which a rounding that no contract admits costs more than the rounding of the result."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from kimi_hal.ops.composites import MoELayerSpec
from kimi_hal.ops.kda import KDASpec
from kimi_hal.ops.spec import Limits
from kimi_hal_conformance.case import INTERP, Case, Make, Operands, add
from kimi_hal_conformance.cases.composites import LIMITS, kda_operands, moe_operands, moe_spec
from kimi_hal_conformance.cases.kda import (
    commit_operands,
    conv_operands,
    decode_operands,
    gate_operands,
    prefill_operands,
    verify_operands,
)
from kimi_hal_conformance.cases.kda_edges import LIMITS as STATE_LIMITS

#: How much larger than the rest what cancels is: more than bfloat16 tells apart.
LARGE = 512.0
#: A float32 sum of which loses bits that bfloat16 still shows.
HUGE = 2.0**14
#: Rows of more than four chunks of 64.
LATE = Limits(max_rows=320, max_reqs=16)


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


def halfway_gates(spec: KDASpec) -> Make:
    """Return gates whose sigmoids are all close to halfway between two numbers of bfloat16, next to powers of two."""
    made = kda_operands(spec, 6)

    def make(g: torch.Generator) -> Operands:
        operands = dict(made(g))
        halfway = torch.tensor([(1 + 2.0**-8) * 2.0**-k for k in (1, 2, 3, 5)], dtype=torch.float64)
        gates = torch.logit(halfway * (1 - 1e-5)).float().repeat(spec.head_dim // 4)
        operands["out_gate"] = gates.expand(operands["out_gate"].shape).contiguous()
        return operands

    return make


def far_decays(make: Make) -> Make:
    """Return the operands with finished decays down to −30 in a step, as gates without a bound give."""

    def wrapped(g: torch.Generator) -> Operands:
        operands = dict(make(g))
        operands["raw_g"] = -30.0 * torch.rand(operands["raw_g"].shape, generator=g)
        return operands

    return wrapped


def slow_decay(make: Make) -> Make:
    """Return the operands with a decay of a third of a per cent a step, which bfloat16 makes a larger one."""

    def wrapped(g: torch.Generator) -> Operands:
        operands = dict(make(g))
        operands["raw_g"] = torch.full_like(operands["raw_g"], math.log1p(-(2.0**-8) * 0.8))
        return operands

    return wrapped


def open_gates(spec: KDASpec) -> Make:
    """Return arguments of softplus between −8 and −6: 1 + e^x keeps few digits of e^x, all that g is."""
    made = gate_operands(spec, 4)

    def make(g: torch.Generator) -> Operands:
        operands = dict(made(g))
        raw = -8.0 + 2.0 * torch.rand(operands["raw_g"].shape, generator=g)
        return operands | {
            "raw_g": raw.bfloat16(),
            "A_log": torch.zeros(spec.num_heads),
            "dt_bias": torch.zeros(spec.num_heads * spec.head_dim),
        }

    return make


def closed_arguments(spec: KDASpec) -> Make:
    """Return arguments of sigmoids between −30 and −20: half of 1 + tanh is 0 there, or a multiple of 2^−25."""
    made = gate_operands(spec, 4)

    def make(g: torch.Generator) -> Operands:
        operands = dict(made(g))
        for name in ("raw_g", "raw_beta"):
            operands[name] = (-30.0 + 10.0 * torch.rand(operands[name].shape, generator=g)).bfloat16()
        return operands | {
            "A_log": torch.zeros(spec.num_heads),
            "dt_bias": torch.zeros(spec.num_heads * spec.head_dim),
        }

    return make


def routed_by(make: Make, spec: MoELayerSpec, name: str) -> Make:
    """Return a layer whose choice of experts hangs on bits of the gate, or of the bias, that bfloat16 does not have.

    Experts differ by odd multiples of 2^−13, in an order of the draw: by more than float32 errs.
    """

    def wrapped(g: torch.Generator) -> Operands:
        operands = dict(make(g))
        weights = operands["weights"]
        step = 1.0 + (2 * torch.randperm(spec.route.num_experts, generator=g) + 1) * 2.0**-13
        weights["gate"], weights["bias"] = weights["gate"] * 0.0, weights["bias"] * 0.0
        if name == "bias":
            weights["bias"] = step
        else:
            weights["gate"][:, 0] = step
            operands["x"] = operands["x"].clone()
            operands["x"][:, 0] = 2.0
        return operands

    return wrapped


def opposed_ranks(make: Make, size: float = LARGE) -> Make:
    """Return a layer whose first and last rank add large sums that are each other's negative."""

    def wrapped(g: torch.Generator) -> Operands:
        operands = dict(make(g))
        first, *_, last = (own["weights"] for own in operands["ranks"])
        negated(first, last, size)
        return operands

    return wrapped


def negated(first: dict[str, Any], last: dict[str, Any], size: float) -> None:
    """Make one rank's shared experts large, and another's the same with the other sign."""
    first["shared_w2"] = first["shared_w2"] * size
    last["shared_w13"], last["shared_w2"] = first["shared_w13"].clone(), -first["shared_w2"]


def cases() -> Iterator[Case]:
    """A convolution, gates, decays, a gated norm, a router, a sum over ranks."""
    for layout in ("width_channel", "channel_width"):
        conv = KDASpec(num_heads=2, head_dim=16, conv_layout=layout)
        name = f"kda_conv/edges/cancelling-taps/{layout}"
        yield Case(name, "kda_conv", conv, LIMITS, cancelling_taps(conv), since=INTERP)
    yield from decays()
    layer = KDASpec(num_heads=2, head_dim=32)
    gates = {"closed-gates": closed_gates(layer), "halfway-gates": halfway_gates(layer)}
    for label, make in gates.items():
        name = f"kda_layer_decode/edges/{label}"
        yield Case(name, "kda_layer_decode", layer, LIMITS, make, since=INTERP)
    mixture = moe_spec()
    for name in ("gate", "bias"):
        make = routed_by(moe_operands(mixture, 5), mixture, name)
        yield Case(f"moe_layer/edges/float32-{name}", "moe_layer", mixture, LIMITS, make, since=INTERP)
    ranks = tuple(moe_spec(ranks=3, rank=rank) for rank in range(3))
    for label, size in (("opposed-ranks", LARGE), ("opposed-by-far", HUGE)):
        make = opposed_ranks(moe_operands(ranks[0], 5), size)
        name = f"moe_layer/edges/{label}"
        yield Case(name, "moe_layer", ranks[0], LIMITS, make, since=INTERP, ranks=3, rank_specs=ranks)


def decays() -> Iterator[Case]:
    """Softplus where it is tiny, decays beyond every bound, and one that many rows share."""
    unbounded = KDASpec(num_heads=2, head_dim=16, lower_bound=None)
    yield Case("kda_gate/edges/open", "kda_gate", unbounded, LIMITS, open_gates(unbounded), since=INTERP)
    log = replace(unbounded, gate="log")
    bounded = replace(unbounded, lower_bound=-5.0)
    make = closed_arguments(bounded)
    yield Case("kda_gate/edges/closed", "kda_gate", bounded, LIMITS, make, since=INTERP)
    far = {
        "kda_decode": decode_operands(log, 3),
        "kda_prefill": prefill_operands(log, (5, 1, 20)),
        "kda_verify": verify_operands(log, (3, 8, 1), STATE_LIMITS),
        "kda_commit": commit_operands(log, (3, 8, 1), (2, 8, 1), STATE_LIMITS),
        "kda_layer_decode": kda_operands(log, 3),
    }
    for operator, make in far.items():
        name = f"{operator}/edges/far-decays"
        yield Case(name, operator, log, STATE_LIMITS, far_decays(make), since=INTERP, fault=9)
    slow = KDASpec(num_heads=1, head_dim=8, gate="log")
    make = slow_decay(prefill_operands(slow, (270,), resume=False))
    yield Case("kda_prefill/edges/slow-decay", "kda_prefill", slow, LATE, make, since=INTERP, fault=9)


OPERATORS = ("decode", "prefill", "verify", "commit", "layer_decode")
WHY = {
    "kda_conv/edges/cancelling-taps": "Float32 taps that cancel but for bits that bfloat16 does not have.",
    "kda_gate/edges/open": "Softplus of −8 to −6: ln of a rounded 1 + e^x has lost what g is made of.",
    "kda_gate/edges/closed": "Sigmoids of −30 to −20, every number of a call: made of 1 + tanh they are 0.",
    "kda_prefill/edges/slow-decay": "One slow decay over 270 rows: rounded to bfloat16 it is another, late rows too.",
    "kda_layer_decode/edges/closed-gates": "Float32 gates far below 0: rounding one costs a sigmoid several per cent.",
    "kda_layer_decode/edges/halfway-gates": "Sigmoids halfway between two bfloat16 numbers: rounding them is no noise.",
    "moe_layer/edges/float32-": "Experts that differ in bits of a float32 gate or bias that bfloat16 does not have.",
    "moe_layer/edges/opposed-ranks": "Two ranks' large sums cancel: a sum of ranks in bfloat16 loses the third's.",
    "moe_layer/edges/opposed-by-far": "Two ranks' huge sums cancel: another order on another rank gives other bits.",
} | {
    f"kda_{name}/edges/far-decays": "Finished decays far below −5, as gates without a bound give: none is clamped."
    for name in OPERATORS
}

add(cases(), WHY)
