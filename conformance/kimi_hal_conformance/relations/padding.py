"""Padding touches no cache and no state, and what is beside it stays right."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kimi_hal_conformance.calls import Called
from kimi_hal_conformance.judging import objections
from kimi_hal_conformance.oracle import Question
from kimi_hal_conformance.poison import same_bits
from kimi_hal_conformance.relations import variants
from kimi_hal_conformance.relations.ground import Ground
from kimi_hal_conformance.rig import OnePlan, Rig, with_operands

#: Operands that name slots of a state.
SLOTS = ("state_ids", "out_ids", "checkpoint_ids")
#: Pools of states, a slot a row.
POOLS = ("state", "conv_state", "states", "conv_states")


def padding(ground: Ground) -> Iterator[str]:
    """Mark every second row as padding, then all: it touches no cache and no state, and the rest stays right."""
    number = variants.count(ground.case.operator, ground.operands)
    rig = Rig(ground.question, OnePlan.of(ground.subject))
    for what, rows in (("every second row", range(1, number, 2)), ("every row", range(number))):
        operands = variants.padded(ground.case.operator, ground.operands, rows)
        if operands is None:
            continue
        question, live = with_operands(ground.question, operands), sorted({*range(number)} - {*rows})
        found = rig.answer(question)
        told = [*objections(question, found), *disturbed(question, found, live)]
        yield from (f"{what} is padding: {problem}" for problem in told)


def pads(ground: Ground) -> bool:
    """Tell whether the operator marks padding in operands, and the case has rows."""
    numbers = range(variants.count(ground.case.operator, ground.operands))
    return variants.padded(ground.case.operator, ground.operands, numbers) is not None


def disturbed(question: Question, got: Called, live: list[int]) -> Iterator[str]:
    """Yield the slots of pools that changed although no live row or sequence names them."""
    if got.answer is None:
        return
    named = [
        question.operands[n][live].flatten() for n in SLOTS if isinstance(question.operands.get(n), Tensor)
    ]
    for name, tensor in got.answer.mutated.items():
        base, _, layer = name.partition("[")
        if base not in POOLS or layer not in ("", "0]"):
            continue
        before = question.operands[base if base in question.operands else base.removesuffix("s")]
        used = torch.cat(named).tolist() if named else []
        idle = [slot for slot in range(tensor.shape[0]) if slot not in used]
        if not same_bits(tensor[idle].contiguous(), before[idle].contiguous()):
            yield f"a slot of {name} changed that no row names"
