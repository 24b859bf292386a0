"""Experts whose groups stand under the two scale codes that are no ordinary power of two: 0 and 255."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from kimi_hal.ops.moe import MoESpec
from kimi_hal_conformance.case import INTERP, QUICK, Case, Make, Operands, add
from kimi_hal_conformance.cases.mixture import BASE, LIMITS, ONE, routed
from kimi_hal_conformance.cases.moe import checkpoint
from kimi_hal_conformance.draws import normal

SPEC = replace(BASE, activation="swiglu", num_experts=4, num_local=4)
SMALLEST, NAN = 0, 255
#: What brings a number under 2^−127 back.
BACK = 2.0**122
#: One expert a row; the last wants two.
WANTED = ([0, -1, -1], [1, -1, -1], [2, -1, -1], [3, -1, -1], [0, 1, -1], [0, 3, -1])


def smallest(spec: MoESpec, matrix: str) -> Make:
    """Return experts of which one matrix stands under 2^−127 altogether, and what brings its products back."""

    def make(g: torch.Generator) -> Operands:
        weights = checkpoint(g, spec)
        weights["w13"], weights["w2"] = (
            torch.randint(0, 256, weights[name].shape, generator=g, dtype=torch.uint8)
            for name in ("w13", "w2")
        )
        weights["w13_scale"][:], weights["w2_scale"][:] = 124, 124
        weights[f"{matrix}_scale"][:] = SMALLEST
        given = routed(g, spec, [[0, 1, -1], [2, 3, -1], [3, 0, -1]], weights)
        if matrix == "w13":
            given["x"] = (normal(g, *given["x"].shape) * BACK).bfloat16()
        else:
            given["topk_weights"] = given["topk_weights"] * BACK
        return given

    return make


def broken_groups(spec: MoESpec) -> Make:
    """Return experts of which one has a NaN group in w13 and another one in a single row of w2.

    The first group's elements, the rows and what its result meets in w2 are never 0, nor of both signs where they add
    up: an infinite scale would stay infinite.
    """

    def make(g: torch.Generator) -> Operands:
        weights = checkpoint(g, spec)
        weights["w13"][1, 5, :16] = ONE
        weights["w13_scale"][1, 5, 0] = NAN
        weights["w2"][1] |= 0x11
        weights["w2_scale"][3, 7, 1] = NAN
        given = routed(g, spec, WANTED, weights)
        return given | {"x": given["x"].abs()}

    return make


def cases() -> Iterator[Case]:
    """Both codes, in ``moe_experts`` and through ``prepare_moe_weights``."""
    made = {
        "smallest-scale/w13": smallest(SPEC, "w13"),
        "smallest-scale/w2": smallest(SPEC, "w2"),
        "nan-scale": broken_groups(SPEC),
    }
    for label, make in made.items():
        since = INTERP if label == "nan-scale" else QUICK
        name = f"moe_experts/edges/{label}"
        yield Case(name, "moe_experts", SPEC, LIMITS, make, since=since, fault=20)
        name = f"prepare_moe_weights/edges/{label}"
        yield Case(name, "prepare_moe_weights", SPEC, LIMITS, unprepared(make), since=since, fault=20)


def unprepared(make: Make) -> Make:
    """Return the operands of ``prepare_moe_weights`` beside those of the call that tells what was made of them."""

    def wrapped(g: torch.Generator) -> Operands:
        given = dict(make(g))
        return {**given, **given.pop("weights")}

    return wrapped


REASONS = {
    "smallest-scale": "Scale code 0 is the subnormal 2^−127, neither 0 nor 1: rows or weights of 2^122 bring it back.",
    "nan-scale": "Scale code 255 is NaN, in every row that wants its expert and in no other.",
}
OPERATORS = ("moe_experts", "prepare_moe_weights")
WHY = {f"{name}/edges/{label}": why for name in OPERATORS for label, why in REASONS.items()}

add(cases(), WHY)
