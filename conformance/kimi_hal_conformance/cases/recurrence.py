"""Kimi Delta Attention at its edges: life of a slot, ends of sequences, padding between rows, far gates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from kimi_hal.ops.kda import KDASpec
from kimi_hal.ops.spec import Limits
from kimi_hal_conformance.case import FULL, INTERP, QUICK, STANDARD, Case, Make, Operands, add
from kimi_hal_conformance.cases.composites import kda_operands as layer_operands
from kimi_hal_conformance.cases.kda import (
    SLOTS,
    commit_operands,
    conv_operands,
    decode_operands,
    gate_operands,
    prefill_operands,
    verify_operands,
)
from kimi_hal_conformance.draws import column, normal

LIMITS = Limits(max_rows=256, max_reqs=64, rows_per_req=8, uniform=False)
LONG = Limits(max_rows=1 << 17, max_reqs=4096, rows_per_req=1, uniform=False)
SMALL = KDASpec(num_heads=2, head_dim=16)
ODD = KDASpec(num_heads=3, head_dim=60)
#: Operands of a row, whatever the operator.
OF_ROWS = ("x", "q", "k", "v", "raw_g", "raw_beta", "out_gate")


def between_nan(make: Make, every: int = 2, first: int = 1) -> Make:
    """Return one-token rows of which some are padding and NaN, so that a read past a row's end shows.

    Args:
        make: gives the rows.
        every: one row of so many is padding.
        first: the first that is.
    """

    def wrapped(g: torch.Generator) -> Operands:
        operands = dict(make(g))
        rows = operands["state_ids"].shape[0]
        padding = torch.arange(rows) % every == first
        operands["state_ids"] = column(torch.where(padding, -1, torch.arange(rows) % SLOTS).tolist())
        for name in OF_ROWS:
            if name in operands:
                operands[name] = operands[name].clone()
                operands[name][padding] = math.nan
        return operands

    return wrapped


def padded_sequences(make: Make, live: Sequence[bool]) -> Make:
    """Return sequences of which some are padding, every row of these NaN, and NaN behind the last."""

    def wrapped(g: torch.Generator) -> Operands:
        operands = dict(make(g))
        ends = operands["cu_seqlens"].tolist()
        rows = torch.zeros(operands["x" if "x" in operands else "q"].shape[0], dtype=torch.bool)
        for n, used in enumerate(live):
            rows[ends[n] : ends[n + 1]] = used
        operands["state_ids"] = column([4 * n % SLOTS if used else -1 for n, used in enumerate(live)])
        for name in OF_ROWS:
            if name in operands:
                operands[name] = operands[name].clone()
                operands[name][~rows] = math.nan
        return operands

    return wrapped


def broken_slots(make: Make) -> Make:
    """Return the operands with NaN in every slot that no sequence continues from."""

    def wrapped(g: torch.Generator) -> Operands:
        operands = dict(make(g))
        ids = operands["state_ids"].tolist()
        starts = operands.get("has_initial_state")
        used = [slot for n, slot in enumerate(ids) if starts is None or bool(starts[n])]
        foreign = [slot for slot in range(SLOTS) if slot not in used]
        for name in ("state", "conv_state"):
            if name in operands:
                operands[name][foreign] = math.nan
        return operands

    return wrapped


def ramp(spec: KDASpec) -> Make:
    """Return one token over a state that is an upper triangular ramp: read transposed it is another."""

    def make(g: torch.Generator) -> Operands:
        operands = dict(decode_operands(spec, 1)(g))
        size = spec.head_dim
        operands["state"].copy_(torch.arange(1.0, size * size + 1).view(size, size).triu() / size)
        return operands

    return make


def of_gate(make: Make, value: float) -> Make:
    """Return the operands with one finished decay in every channel of every row."""

    def wrapped(g: torch.Generator) -> Operands:
        operands = dict(make(g))
        operands["raw_g"] = torch.full_like(operands["raw_g"], value)
        return operands

    return wrapped


def known_gate(spec: KDASpec) -> Make:
    """Return arguments whose gates are known: 90, ±100, 0, around the bend of softplus at 20."""

    def make(g: torch.Generator) -> Operands:
        values = torch.tensor([90.0, -90.0, 0.0, 19.875, 20.0, 20.125, -20.0, 1e-3])
        raw = values.repeat(spec.head_dim // 8).expand(4, spec.num_heads, -1).contiguous()
        beta = torch.tensor([100.0, -100.0, 0.0, 3e38])[:, None].expand(4, spec.num_heads)
        return {
            "raw_g": raw.bfloat16(),
            "raw_beta": beta.bfloat16(),
            "A_log": torch.zeros(spec.num_heads),
            "dt_bias": torch.zeros(spec.num_heads * spec.head_dim),
        }

    return make


def padding_cases() -> Iterator[Case]:
    """Classes 3 and 14: rows and sequences between which there is padding."""
    for label, spec in (("d16", SMALL), ("d60", ODD)):
        for operator, operands in (("kda_decode", decode_operands), ("kda_layer_decode", layer_operands)):
            make = between_nan(operands(spec, 7))
            yield case(f"{operator}/padding-between/{label}", spec, make, 14)
        for operator, operands in (("kda_decode", decode_operands), ("kda_layer_decode", layer_operands)):
            make = between_nan(operands(spec, 5), every=3, first=0)
            yield case(f"{operator}/padding-first/{label}", spec, make, 3)
        lengths = (1, 3, 0, 6)
        for operator, make in (
            ("kda_prefill", prefill_operands(spec, lengths, tail=3)),
            ("kda_conv", conv_operands(spec, lengths, tail=3)),
            ("kda_verify", verify_operands(spec, lengths, LIMITS)),
        ):
            make = padded_sequences(make, (True, False, True, True))
            yield case(f"{operator}/padding-between/{label}", spec, make, 3)


def slot_cases() -> Iterator[Case]:
    """Classes 10 and 13: states in slots that hold NaN, and a state that is not symmetric."""
    tiny = KDASpec(num_heads=1, head_dim=4)
    yield case("kda_decode/ramp-state", tiny, ramp(tiny), 13)
    for operator, make in (
        ("kda_prefill", prefill_operands(SMALL, (5, 3, 2, 1))),
        ("kda_conv", conv_operands(SMALL, (5, 3, 2, 1))),
    ):
        yield case(f"{operator}/broken-fresh-slots", SMALL, broken_slots(make), 10)
    for operator, make in (
        ("kda_decode", decode_operands(SMALL, 3)),
        ("kda_verify", verify_operands(SMALL, (2, 8, 1), LIMITS)),
        ("kda_layer_decode", layer_operands(SMALL, 3)),
    ):
        yield case(f"{operator}/broken-slots", SMALL, broken_slots(make), 10)


def length_cases() -> Iterator[Case]:
    """Class 12: sequences of no row, of one, and of many in one call."""
    for label, cuts in {
        "empty-between": (0, 3, 0, 2),
        "ones-then-long": (1, 1, 64),
        "decodes-then-prefill": (1, 1, 5),
        "prefill-then-decodes": (5, 1, 1),
        "all-empty": (0, 0, 0),
    }.items():
        yield case(f"kda_prefill/{label}", SMALL, prefill_operands(SMALL, cuts), 12)
        yield case(f"kda_conv/{label}", SMALL, conv_operands(SMALL, cuts), 12)
    yield case("kda_prefill/end-before-the-rows", SMALL, prefill_operands(SMALL, (7,), tail=1), 12)
    yield case("kda_conv/end-before-the-rows", SMALL, conv_operands(SMALL, (7,), tail=1), 12)


def gate_cases() -> Iterator[Case]:
    """Classes 9, 17 and 19: the same decay in every step, chunks of the model's heads, gates that are known."""
    log = KDASpec(num_heads=2, head_dim=16, gate="log")
    for value in (-5.0, 0.0, -1e-6):
        slow = of_gate(prefill_operands(log, (66, 1)), value)
        yield case(f"kda_prefill/gate-of{value:g}", log, slow, 9)
    model = KDASpec(num_heads=1, gate="log")
    slow = of_gate(prefill_operands(model, (65,)), -5.0)
    yield case("kda_prefill/gate-of-5/d128", model, slow, 9, QUICK)
    wide = KDASpec(num_heads=1)
    yield case("kda_prefill/chunks-of-d128", wide, prefill_operands(wide, (63, 64, 66, 1)), 9, QUICK)
    for label, bound in (("bounded", -5.0), ("unbounded", None)):
        gate = KDASpec(num_heads=3, head_dim=16, lower_bound=bound)
        yield case(f"kda_gate/known/{label}", gate, known_gate(gate), 19)
        odd = KDASpec(num_heads=5, head_dim=60, lower_bound=bound)
        yield case(f"kda_gate/rows-70/{label}", odd, gate_operands(odd, 70), 17)


def speculation() -> Iterator[Case]:
    """Drafts of every number, none accepted, all accepted, padding among them."""
    for rows in (1, 2, 7, 8):
        yield case(f"kda_verify/drafts-of-{rows}", SMALL, verify_operands(SMALL, (rows, rows), LIMITS), 9)
    counts = {
        "none": (0, 0, 0),
        "all": (4, 8, 3),
        "first": (1, 1, 1),
        "padding": (-1, 8, -(2**31)),
    }
    for label, accepted in counts.items():
        yield case(
            f"kda_commit/accepts-{label}", SMALL, commit_operands(SMALL, (4, 8, 3), accepted, LIMITS), 10
        )
    yield case("kda_commit/d60", ODD, commit_operands(ODD, (4, 8, 3), (2, 5, 3), LIMITS), 14)


def long_sequences() -> Iterator[Case]:
    """What only length or number shows: many chunks, more than 65,536 rows, more than 65,535 sequences and heads."""
    yield case("kda_prefill/rows-1500", SMALL, prefill_operands(SMALL, (1500,)), 9, STANDARD, LONG)
    yield case("kda_conv/rows-65537", SMALL, conv_operands(SMALL, (65_537,)), 9, FULL, LONG)
    tiny = KDASpec(num_heads=1, head_dim=8)
    yield case("kda_prefill/rows-65537", tiny, prefill_operands(tiny, (65_537,)), 9, FULL, LONG)
    heads = KDASpec(num_heads=32, head_dim=8)
    yield case("kda_prefill/sequences-2048", heads, many_sequences(heads, 2048), 17, FULL, LONG)
    yield case("kda_decode/rows-2048", heads, many_rows(heads, 2048), 17, STANDARD, LONG)


def many_rows(spec: KDASpec, rows: int) -> Make:
    """Return so many rows, each with a slot of its own."""

    def make(g: torch.Generator) -> Operands:
        given = dict(decode_operands(spec, rows)(g))
        given["state"] = normal(g, rows, spec.num_heads, spec.head_dim, spec.head_dim, spread=0.1)
        return given | {"state_ids": torch.randperm(rows, generator=g).int()}

    return make


def many_sequences(spec: KDASpec, count: int) -> Make:
    """Return so many sequences of one row, each with a slot of its own."""

    def make(g: torch.Generator) -> Operands:
        given = dict(many_rows(spec, count)(g))
        return given | {"cu_seqlens": torch.arange(count + 1, dtype=torch.int32)}

    return make


def case(
    label: str, spec: KDASpec, make: Make, fault: int, since: str = INTERP, limits: Limits = LIMITS
) -> Case:
    """Return a case; its operator stands before the first slash."""
    operator, _, rest = label.partition("/")
    return Case(f"{operator}/edges/{rest}", operator, spec, limits, make, since=since, fault=fault)


REASONS = {
    "padding-between": "Padding rows full of NaN between live ones: a read past a row's end shows.",
    "padding-first": "The first row is padding full of NaN: what it holds reaches no other row.",
    "broken-fresh-slots": "A new request in a slot that holds NaN starts from zero.",
    "broken-slots": "Slots of other requests hold NaN: no row may read them.",
    "empty-between": "Empty sequences pass their state through bit for bit.",
    "ones-then-long": "Sequences of one row before a long one.",
    "decodes-then-prefill": "Decodes and a prefill in one call.",
    "prefill-then-decodes": "A prefill and decodes in one call.",
    "all-empty": "Only empty sequences: no bit changes.",
    "end-before-the-rows": "Sequences that end before the rows do: the last row is padding, zeros.",
    "gate-of": "The same decay in every step: its cumulative sum must not be exponentiated with the wrong sign.",
    "chunks-of-d128": "The model's head size around a chunk of 64.",
    "known": "Arguments of 90, 20, 0 and ±100, whose gates are known.",
    "rows-": "More rows than one block, one chunk or 16 bits hold.",
    "sequences-": "More sequences times heads than a grid's second axis has.",
    "drafts-of": "As many drafts as the plan allows, and fewer.",
    "accepts": "No draft accepted, one, all, and padding.",
    "d60": "A head size that is no power of two.",
    "ramp-state": "A triangular state: read transposed, it gives another answer.",
}
OPERATORS = ("conv", "gate", "prefill", "decode", "verify", "commit", "layer_decode")
WHY = {f"kda_{name}/edges/{label}": why for name in OPERATORS for label, why in REASONS.items()}

for group in (padding_cases, slot_cases, length_cases, gate_cases, speculation, long_sequences):
    add(group(), WHY)
