"""Edges of the composites: padding rows whose operands are NaN."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kimi_hal.ops.kda import KDASpec
from kimi_hal_conformance.case import INTERP, Case, Make, Operands, add
from kimi_hal_conformance.cases.composites import LIMITS, kda_operands


def broken_padding(spec: KDASpec) -> Make:
    """Return rows of which the last two are padding and hold NaN in every operand."""
    make = kda_operands(spec, 5)

    def wrapped(g: torch.Generator) -> Operands:
        operands = dict(make(g))
        for name in ("x", "raw_g", "raw_beta", "out_gate"):
            operands[name][-2:] = torch.nan
        return operands

    return wrapped


def cases() -> Iterator[Case]:
    """Both gates."""
    for gate in ("raw", "log"):
        spec = KDASpec(num_heads=2, head_dim=32, gate=gate)
        name = f"kda_layer_decode/edges/broken-padding/{gate}"
        yield Case(name, "kda_layer_decode", spec, LIMITS, broken_padding(spec), since=INTERP, fault=3)


WHY = {
    "kda_layer_decode/edges/broken-padding": "Padding rows whose every operand is NaN give zeros.",
}

add(cases(), WHY)
