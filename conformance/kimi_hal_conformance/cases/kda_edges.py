"""Edges of the kda family: gates far out, rows of small norm, sequences around a chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from kimi_hal.ops.kda import KDASpec
from kimi_hal.ops.spec import Limits
from kimi_hal_conformance.case import INTERP, QUICK, Case, Make, Operands, add
from kimi_hal_conformance.cases.kda import (
    checkpointed,
    commit_operands,
    conv_operands,
    decode_operands,
    gate_parameters,
    prefill_operands,
    verify_operands,
)
from kimi_hal_conformance.draws import ints, normal

LIMITS = Limits(max_rows=256, max_reqs=16, rows_per_req=8, uniform=False)
BF16 = torch.bfloat16
WIDE, PLAIN = KDASpec(num_heads=2, head_dim=32), KDASpec(num_heads=2, head_dim=16)
KEPT = replace(PLAIN, checkpoints=True)


def far_gates(spec: KDASpec) -> Make:
    """Return raw gates whose exponential is beyond float32, in both directions."""

    def make(g: torch.Generator) -> Operands:
        raw = normal(g, 3, spec.num_heads, spec.head_dim, spread=3.0)
        raw[0, :, ::3], raw[1, :, ::3] = 300.0, -300.0
        beta = normal(g, 3, spec.num_heads)
        beta[0], beta[1] = 200.0, -200.0
        return {"raw_g": raw.to(BF16), "raw_beta": beta.to(BF16)} | gate_parameters(g, spec)

    return make


def broken_gates(spec: KDASpec) -> Make:
    """Return rows of gates of which some have one NaN or infinity, in a decay or in a beta."""

    def make(g: torch.Generator) -> Operands:
        raw = normal(g, 9, spec.num_heads, spec.head_dim)
        beta = normal(g, 9, spec.num_heads)
        raw[1, 0, 3], raw[3, 1, 0], raw[8, 0, 1] = torch.nan, torch.inf, -torch.inf
        beta[4, 1], beta[6, 0] = torch.nan, torch.inf
        return {"raw_g": raw.to(BF16), "raw_beta": beta.to(BF16)} | gate_parameters(g, spec)

    return make


def small_rows(make: Make) -> Make:
    """Return the operands with queries and keys so small that the norm's epsilon decides."""

    def wrapped(g: torch.Generator) -> Operands:
        operands = dict(make(g))
        size = torch.tensor([1e-4, 1.0, 0.0, 1e-3])
        for name in ("q", "k"):
            rows = operands[name].shape[0]
            factor = size.repeat(-(-rows // 4))[:rows, None, None]
            operands[name] = (operands[name] * factor).to(BF16)
        return operands

    return wrapped


def more_rows(make: Make, rows: int) -> Make:
    """Return the operands with so many rows behind the last sequence; they hold ordinary numbers."""

    def wrapped(g: torch.Generator) -> Operands:
        operands = dict(make(g))
        for name in ("x", "raw_g", "raw_beta"):
            given = operands[name]
            tail = normal(g, rows, *given.shape[1:], dtype=given.dtype)
            operands[name] = torch.cat([given, tail])
        return operands

    return wrapped


def zeros_of_both_signs(make: Make) -> Make:
    """Return the operands with zeros of both signs among the inputs and in what came before them."""

    def wrapped(g: torch.Generator) -> Operands:
        operands = dict(make(g))
        for name in ("x", "conv_state"):
            given = operands[name]
            given[..., ::3], given[..., 1::3] = -0.0, 0.0
        return operands

    return wrapped


def broken(spec: KDASpec, names: Sequence[str]) -> Make:
    """Return sequences that have one NaN in a row in their middle, each in another operand."""
    lengths = (20, 12, 17)[: len(names)]
    make = prefill_operands(spec, lengths)

    def wrapped(g: torch.Generator) -> Operands:
        operands, first = dict(make(g)), 0
        for name, length in zip(names, lengths, strict=True):
            place = (first + length // 2, 1, 5)
            operands[name][place[: operands[name].ndim]] = torch.nan
            first += length
        return operands

    return wrapped


def closed(make: Make) -> Make:
    """Return finished gates at their ends: no new value in every second row, no decay in every third."""

    def wrapped(g: torch.Generator) -> Operands:
        operands = dict(make(g))
        beta, decay = operands["raw_beta"].clone(), operands["raw_g"].clone()
        beta[::2], beta[1], decay[::3] = 0.0, 1.0, 0.0
        return operands | {"raw_beta": beta, "raw_g": decay}

    return wrapped


def saturated(make: Make) -> Make:
    """Return inputs of which some sums are far beyond where an exponential overflows, on both sides."""

    def wrapped(g: torch.Generator) -> Operands:
        operands = dict(make(g))
        return operands | {name: operands[name] * 2**8 for name in ("x", "conv_state")}

    return wrapped


def elsewhere(spec: KDASpec, accepted: Sequence[int], lens: Sequence[int] = ()) -> Make:
    """Return a commit whose results go to other slots, the last one's nowhere.

    Checkpoints go to other slots too, and that of the sequence without a result into its own.
    """
    make = commit_operands(spec, (4, 8, 3), accepted, LIMITS)

    def wrapped(g: torch.Generator) -> Operands:
        operands = dict(make(g))
        operands["out_ids"] = ints([8, 2, -1])
        if lens:
            operands["checkpoint_ids"] = torch.cat([ints([6, 5]), operands["state_ids"][2:]])
            operands["checkpoint_lens"] = ints(lens)
        if spec.num_layers > 1:
            names = ("x", "weight", "raw_g", "raw_beta", "A_log", "dt_bias", "conv_state", "state")
            further = [make(g) for _ in range(spec.num_layers - 1)]
            operands["more"] = [{name: own[name] for name in names} for own in further]
        return operands

    return wrapped


def edge(operator: str, label: str, spec: KDASpec, make: Make, fault: int = 0, since: str = INTERP) -> Case:
    """Return a case of an operator of the family."""
    return Case(f"{operator}/edges/{label}", operator, spec, LIMITS, make, since=since, fault=fault)


def far_gate_cases() -> Iterator[Case]:
    """Both gates at arguments beyond the range of exp."""
    for label, bound in (("bounded", -5.0), ("unbounded", None)):
        spec = KDASpec(num_heads=2, head_dim=32, lower_bound=bound)
        yield edge("kda_gate", f"far/{label}", spec, far_gates(spec), 9)
        yield edge("kda_gate", f"broken-rows/{label}", spec, broken_gates(spec), 19)


def small_norm_cases() -> Iterator[Case]:
    """Rows of small norm, in one step and in a chunk."""
    decode, prefill = decode_operands(WIDE, 6), prefill_operands(WIDE, (4, 0, 5))
    yield edge("kda_decode", "small-norm", WIDE, small_rows(decode))
    yield edge("kda_prefill", "small-norm", WIDE, small_rows(prefill))


def commit_cases() -> Iterator[Case]:
    """Results and checkpoints that go elsewhere, of one layer and of several."""
    layered = KDASpec(num_heads=2, head_dim=16, checkpoints=True, num_layers=2)
    stacked = KDASpec(num_heads=1, head_dim=16, num_layers=4)
    for label, spec, make in (
        ("to-other-slots", PLAIN, elsewhere(PLAIN, (2, 8, 2))),
        ("checkpoints", KEPT, elsewhere(KEPT, (2, 8, 3), (1, 8, 2))),
        ("two-layers", layered, elsewhere(layered, (3, 0, 3), (0, 0, 3))),
        ("four-layers", stacked, elsewhere(stacked, (3, 8, 0))),
    ):
        yield edge("kda_commit", label, spec, make, 10)


def odd_record_cases() -> Iterator[Case]:
    """Records of three rows that are no whole words of 4 bytes: of one sequence alone, and of several."""
    limits = Limits(max_rows=8, max_reqs=4, rows_per_req=3, uniform=False)
    spec = KDASpec(num_heads=3, head_dim=5)
    for label, rows, accepted in (("one", (3,), (2,)), ("several", (3, 1, 2), (3, 1, 0))):
        make = commit_operands(spec, rows, accepted, limits)
        yield replace(edge("kda_commit", f"odd-records/{label}", spec, make, 14), limits=limits)
    make = verify_operands(spec, (3, 1, 2), limits)
    yield replace(edge("kda_verify", "odd-records", spec, make, 14), limits=limits)


def end_cases() -> Iterator[Case]:
    """Checkpoints where a sequence has no row, and rows where there is no sequence."""
    missed = checkpointed(prefill_operands(KEPT, (5, 20, 33)), (16, 0, 48))
    yield edge("kda_prefill", "checkpoints", KEPT, missed, 10)
    behind = more_rows(verify_operands(PLAIN, (4, 2, 1), LIMITS), 3)
    yield edge("kda_verify", "rows-behind", PLAIN, behind, 3)


def finished_gate_cases() -> Iterator[Case]:
    """Gates that the caller has finished, at 0 and 1."""
    spec = KDASpec(num_heads=2, head_dim=16, gate="log")
    for operator, make in (
        ("kda_decode", decode_operands(spec, 5)),
        ("kda_prefill", prefill_operands(spec, (4, 0, 5))),
        ("kda_commit", commit_operands(spec, (4, 8, 3), (3, 8, 2), LIMITS)),
    ):
        yield edge(operator, "gates-at-their-ends", spec, closed(make), 9)


def conv_cases() -> Iterator[Case]:
    """Sums and zeros at which an activation, or a copy, goes wrong."""
    make = conv_operands(PLAIN, (1, 2, 5))
    yield edge("kda_conv", "saturated", PLAIN, saturated(make), 19)
    yield edge("kda_conv", "signed-zeros", PLAIN, zeros_of_both_signs(make), 19)


def chunk_cases() -> Iterator[Case]:
    """A NaN inside a chunk, and sequences whose last chunk is not full."""
    for label, names in (("qkv", ("q", "k", "v")), ("gates", ("raw_g", "raw_beta"))):
        yield edge("kda_prefill", f"nan-in-a-row/{label}", PLAIN, broken(PLAIN, names), 9)
    chunks = prefill_operands(WIDE, (66, 1, 64, 2))
    yield edge("kda_prefill", "around-a-chunk", WIDE, chunks, 9, QUICK)


WHY = {
    "kda_gate/edges/broken-rows": "A NaN or an infinity in one element: all others, of other rows too, stay theirs.",
    "kda_gate/edges/far": "Arguments beyond the range of exp in both directions: the limits, no NaN.",
    "kda_decode/edges/small-norm": "Rows so small that the norm's epsilon decides.",
    "kda_prefill/edges/small-norm": "Rows so small that the norm's epsilon decides.",
    "kda_prefill/edges/around-a-chunk": "Sequences that end two rows behind a chunk, on it, and after one row.",
    "kda_prefill/edges/nan-in-a-row": "A NaN reaches its row and later ones; by 0 · NaN in a product, earlier ones.",
    "kda_prefill/edges/checkpoints": "A fresh sequence's state at 0 rows is zero; one beyond the end is not stored.",
    **{
        f"kda_{name}/edges/gates-at-their-ends": "Finished gates of 0 and 1: a state decays where nothing is added."
        for name in ("decode", "prefill", "commit")
    },
    "kda_conv/edges/saturated": "SiLU of a sum far above 0 is the sum, far below 0 it is 0, never NaN.",
    "kda_conv/edges/signed-zeros": "Stored inputs keep their bits: −0 stays −0, of this call and of before it.",
    "kda_verify/edges/rows-behind": "Rows behind the last sequence give zeros, whatever they hold.",
    "kda_verify/edges/odd-records": "Records of sequences that are no whole words of 4 bytes.",
    "kda_commit/edges/odd-records/": "Records that are no whole words of 4 bytes, of one sequence and of several.",
    "kda_commit/edges/four-layers": "Both states of every layer advance, those between the first and the last too.",
    "kda_commit/edges/": "Results and checkpoints that go to other slots, or nowhere, in one layer and in two.",
}

for group in (
    far_gate_cases,
    small_norm_cases,
    commit_cases,
    odd_record_cases,
    end_cases,
    finished_gate_cases,
    conv_cases,
    chunk_cases,
):
    add(group(), WHY)
