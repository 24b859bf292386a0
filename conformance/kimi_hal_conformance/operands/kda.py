"""Small operands for any Spec of the kda family."""

from __future__ import annotations

from dataclasses import replace

import torch

from kimi_hal.ops.kda import KDASpec
from kimi_hal.ops.spec import Limits
from kimi_hal_conformance.case import Make, Operands
from kimi_hal_conformance.cases import kda as cases
from kimi_hal_conformance.draws import ints
from kimi_hal_conformance.operands.recipe import Recipe

#: Rows of the sequences of a prefill, and of a verify; and how many of the latter are accepted.
PREFILL, DRAFTS, ACCEPTED = (5, 0, 18), (4, 1, 3), (2, 1, -1)
LIMITS = Limits(max_rows=64, max_reqs=16, rows_per_req=4, uniform=False)
#: What differs from layer to layer of a commit.
OF_LAYER = ("x", "weight", "raw_g", "raw_beta", "A_log", "dt_bias", "conv_state", "state")


def checkpointed(spec: KDASpec, make: Make, offsets: tuple[int, ...]) -> Make:
    """Return operands that store checkpoints where the Spec asks for them."""
    return cases.checkpointed(make, offsets) if spec.checkpoints else make


def conv(spec: KDASpec, rows: int) -> Make:
    """Return raw inputs of ragged sequences."""
    return checkpointed(spec, cases.conv_operands(spec, (1, 0, 5, 2)[:rows], tail=2), (1, 0, 3, -1)[:rows])


def gate(spec: KDASpec, rows: int) -> Make:
    """Return raw gates with arguments far out on both sides, also where the Spec says that others take logs."""
    spec = replace(spec, gate="raw")
    if spec.head_dim >= 4:
        return cases.gate_operands(spec, rows)

    def make(g: torch.Generator) -> Operands:
        operands = cases.rows_of(g, spec, rows)
        return {name: operands[name] for name in ("raw_g", "raw_beta", "A_log", "dt_bias")}

    return make


def prefill(spec: KDASpec, rows: int) -> Make:
    """Return ragged sequences, one of them empty."""
    return checkpointed(spec, cases.prefill_operands(spec, PREFILL[:rows], tail=2), (3, -1, 18)[:rows])


def decode(spec: KDASpec, rows: int) -> Make:
    """Return one token a row, some of them padding."""
    return cases.decode_operands(spec, rows)


def verify(spec: KDASpec, rows: int) -> Make:
    """Return drafts of several requests."""
    return cases.verify_operands(spec, DRAFTS[:rows], LIMITS)


def commit(spec: KDASpec, rows: int) -> Make:
    """Return the drafts of every layer and how many rows were accepted."""
    base = cases.commit_operands(spec, DRAFTS[:rows], ACCEPTED[:rows], LIMITS)

    def make(g: torch.Generator) -> Operands:
        operands = dict(base(g))
        if spec.checkpoints:
            operands["checkpoint_ids"] = ints([8, 2, 5][:rows])
            operands["checkpoint_lens"] = ints([1, 0, 0][:rows])
        further = [base(g) for _ in range(spec.num_layers - 1)]
        if further:
            operands["more"] = [{name: own[name] for name in OF_LAYER} for own in further]
        return operands

    return make


def state_bytes(spec: KDASpec, rows: int) -> int:
    """Return the bytes of the pools, with copies in float64, and of a step over them."""
    pool = cases.SLOTS * spec.num_heads * spec.head_dim**2 * 4
    return 8 * pool + 64 * rows * spec.channels


def row_bytes(spec: KDASpec, rows: int) -> int:
    """Return the bytes of rows and convolution states."""
    return 256 * rows * spec.channels


def commit_bytes(spec: KDASpec, rows: int) -> int:
    """Return the bytes of every layer's pools; a layer's calls count for a MiB."""
    return spec.num_layers * (2 * state_bytes(spec, rows) + (4 << 20))


SMALL = {"num_heads": 2, "head_dim": 20, "num_layers": 1}
RECIPES = {
    "kda_conv": Recipe(conv, row_bytes, small=SMALL, rows=4, total=lambda n: sum((1, 0, 5, 2)[:n]) + 2),
    "kda_gate": Recipe(gate, row_bytes, small=SMALL, rows=4),
    "kda_prefill": Recipe(prefill, state_bytes, small=SMALL, total=lambda n: sum(PREFILL[:n]) + 2),
    "kda_decode": Recipe(decode, state_bytes, small=SMALL, rows=5),
    "kda_verify": Recipe(verify, state_bytes, small=SMALL, rows_per_req=4, total=lambda n: sum(DRAFTS[:n])),
    "kda_commit": Recipe(commit, commit_bytes, small=SMALL, rows_per_req=4, total=lambda n: sum(DRAFTS[:n])),
}
