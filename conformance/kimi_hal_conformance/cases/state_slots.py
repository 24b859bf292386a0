"""Slots that are not there, calls without a sequence, and a checkpoint in the slot from which its own row starts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from kimi_hal.ops.kda import KDASpec
from kimi_hal_conformance.case import INTERP, Case, Make, Operands, add
from kimi_hal_conformance.cases.composites import kda_operands
from kimi_hal_conformance.cases.kda import (
    SLOTS,
    checkpointed,
    commit_operands,
    conv_operands,
    decode_operands,
    prefill_operands,
    verify_operands,
)
from kimi_hal_conformance.cases.kda_edges import LIMITS, elsewhere, more_rows
from kimi_hal_conformance.draws import ints

SPEC = KDASpec(num_heads=2, head_dim=16)
KEPT = replace(SPEC, checkpoints=True)
#: Behind the last slot, and as far as an index goes.
NOWHERE = (SLOTS, 2**31 - 1)


def beyond(make: Make, *names: str) -> Make:
    """Return the operands with the slots of the first and the last sequence, by name, behind the pool's end."""

    def wrapped(g: torch.Generator) -> Operands:
        operands = dict(make(g))
        for name in names:
            slots = operands[name].clone()
            slots[[0, -1]] = ints(NOWHERE)
            operands[name] = slots
        return operands

    return wrapped


def at_the_ends(make: Make) -> Make:
    """Return three sequences, the first in the last slot and the last in the first."""

    def wrapped(g: torch.Generator) -> Operands:
        return {**make(g), "state_ids": ints([SLOTS - 1, 4, 0])}

    return wrapped


def into_own_slot(spec: KDASpec) -> Make:
    """Return a commit whose results go to other slots, and each row's checkpoint into the one it starts from."""
    make = elsewhere(spec, (2, 8, 3), (1, 0, 2))

    def wrapped(g: torch.Generator) -> Operands:
        operands = dict(make(g))
        return operands | {"out_ids": ints([8, 2, 5]), "checkpoint_ids": operands["state_ids"].clone()}

    return wrapped


def cases() -> Iterator[Case]:
    """Every operator over states."""
    lengths = (3, 2, 4)
    called = {
        "kda_conv": conv_operands(SPEC, lengths),
        "kda_prefill": prefill_operands(SPEC, lengths),
        "kda_decode": decode_operands(SPEC, 3),
        "kda_verify": verify_operands(SPEC, lengths, LIMITS),
        "kda_commit": commit_operands(SPEC, lengths, (2, 2, 3), LIMITS),
        "kda_layer_decode": kda_operands(SPEC, 3),
    }
    for operator, make in called.items():
        yield case(f"{operator}/edges/no-such-slot", SPEC, beyond(make, "state_ids"), 3)
    stored = {"kda_conv": conv_operands(KEPT, lengths), "kda_prefill": prefill_operands(KEPT, lengths)}
    for operator, make in stored.items():
        make = beyond(checkpointed(make, (2, 1, 4)), "checkpoint_ids")
        yield case(f"{operator}/edges/no-such-checkpoint", KEPT, make, 3)
    other = elsewhere(KEPT, (2, 8, 3), (1, 8, 2))
    for name in ("out_ids", "checkpoint_ids"):
        yield case(f"kda_commit/edges/no-such-slot-of-{name}", KEPT, beyond(other, name), 3)
    yield case("kda_commit/edges/checkpoint-in-own-slot", KEPT, into_own_slot(KEPT), 10)
    for operator, make in called.items():
        yield case(f"{operator}/edges/first-and-last-slot", SPEC, at_the_ends(make), 3)
    late = elsewhere(KEPT, (2, 8, 3), (3, 9, 4))
    yield case("kda_commit/edges/checkpoint-beyond-accepted", KEPT, late, 10)
    crowded = commit_operands(SPEC, (8, 8, 8), (9, 2**31 - 1, 8), LIMITS)
    yield case("kda_commit/edges/more-than-room", SPEC, crowded, 10)
    empty = {
        "kda_conv": conv_operands(SPEC, (), tail=3),
        "kda_prefill": prefill_operands(SPEC, (), tail=3),
        "kda_verify": more_rows(verify_operands(SPEC, (), LIMITS), 3),
        "kda_commit": commit_operands(SPEC, (), (), LIMITS),
    }
    for operator, make in empty.items():
        yield case(f"{operator}/edges/no-sequence", SPEC, make, 12)


def case(name: str, spec: KDASpec, make: Make, fault: int) -> Case:
    """Return a case; its operator stands before the first slash."""
    return Case(name, name.partition("/")[0], spec, LIMITS, make, since=INTERP, fault=fault)


REASONS = {
    "no-such-slot": "A slot behind the pool's end is no slot: zeros, and no state changes, the last one's least.",
    "no-such-checkpoint": "A checkpoint's slot behind the pool's end is no slot: nothing is stored.",
    "checkpoint-in-own-slot": "A checkpoint overwrites the slot from which its row's result still has to start.",
    "first-and-last-slot": "The pool's first slot and its last are slots like any other.",
    "checkpoint-beyond-accepted": "A checkpoint behind the accepted rows is not stored.",
    "more-than-room": "More accepted rows than a record has room for count as that many.",
    "no-sequence": "Rows but no sequence: zeros, and no state changes.",
}
OPERATORS = ("conv", "prefill", "decode", "verify", "commit", "layer_decode")
WHY = {f"kda_{name}/edges/{label}": why for name in OPERATORS for label, why in REASONS.items()}

add(cases(), WHY)
