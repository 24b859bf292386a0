"""Operands that may have one of two dtypes, in every combination: what one has says nothing of another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product

import torch

from kimi_hal import ops
from kimi_hal_conformance.case import CASES, INTERP, Case, Make, Operands, add
from kimi_hal_conformance.claims.layout import as_dtype

#: A small case of each operator that has such operands, and whether they get bits that only the wider dtype holds:
#: not where others were drawn so that no rounding decides.
BASES: Mapping[str, tuple[str, bool]] = {
    "quantize_index_query": ("quantize_index_query/index.fp8.e4m3fn.pow2.page64/rows5", True),
    "store_index_keys": ("store_index_keys/index.mxfp4.page64/rows100", True),
    "store_latent": ("store_latent/latent.fp8.e4m3fn.tensor/page64/rows33", True),
    "kda_conv": ("kda_conv/odd/ragged", True),
    "kda_verify": ("kda_verify/odd/drafts", False),
    "kda_layer_decode": ("kda_layer_decode/log-gate/rows6", True),
    "dsa_decode": ("dsa_decode/one-rank", False),
}


def several(operator: str) -> dict[str, tuple[str, ...]]:
    """Return the operands of an operator that may have several dtypes."""
    return {name: arg.dtype for name, arg in ops.get(operator).args.items() if isinstance(arg.dtype, tuple)}


def of_dtypes(make: Make, dtypes: Mapping[str, str], wider: bool) -> Make:
    """Return the operands in these dtypes."""

    def wrapped(g: torch.Generator) -> Operands:
        operands = dict(make(g))
        for name, dtype in dtypes.items():
            kind = getattr(torch, dtype)
            operands[name] = as_dtype(g, operands[name], kind) if wider else operands[name].to(kind)
        return operands

    return wrapped


def cases() -> Iterator[Case]:
    """Every combination of every operator."""
    for operator, (base, wider) in BASES.items():
        like, names = CASES[base], several(operator)
        for chosen in product(*names.values()):
            dtypes = dict(zip(names, chosen, strict=True))
            label = ".".join(f"{name}-{dtype}" for name, dtype in dtypes.items())
            make = of_dtypes(like.make, dtypes, wider)
            yield replace(like, id=f"{operator}/dtypes/{label}", make=make, since=INTERP, fault=0, why="")


WHY = {
    f"{operator}/dtypes/": "Every combination of the dtypes that operands may have: one says nothing of another."
    for operator in BASES
}

add(cases(), WHY)
