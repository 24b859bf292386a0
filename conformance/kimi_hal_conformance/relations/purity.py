"""No call may know of another: one plan, the same addresses, new data, other sizes."""

from __future__ import annotations

from collections.abc import Iterator

from kimi_hal_conformance.oracle import Question
from kimi_hal_conformance.relations import variants
from kimi_hal_conformance.relations.ground import Ground
from kimi_hal_conformance.rig import OnePlan, Rig, with_operands
from kimi_hal_conformance.scripts import call


def rounds(ground: Ground) -> list[tuple[Question, Question]]:
    """Return calls of sizes A, B, A, B, A, each with the call that sets its addresses; A alone where it has no half.

    Of the later ones the first has its rows in another order; the last has all but the data of the very first call.
    """
    first, other = ground.question, ground.other
    if not ground.divisible:
        return [(first, first), (first, other)]
    half = ground.half(first)
    later = ground.half(other)
    later = later if variants.alike(half.operands, later.operands) else half
    return [(first, first), (half, half), (first, other), (half, later), (first, ground.again)]


def purity(ground: Ground) -> Iterator[str]:
    """One plan, the same addresses, new data, sizes A, B, A, B, A, then another layer: no call may know of another."""
    plan, rigs, first = OnePlan.of(ground.subject), {}, ground.question
    for number, (shape, question) in enumerate(rounds(ground), 1):
        if id(shape) not in rigs:
            rigs[id(shape)] = Rig(shape, plan)
        found = rigs[id(shape)].answer(question)
        yield from ground.differs(
            question, found, f"call {number} of one plan, new data at the same addresses"
        )
    for question in (ground.half(first), first) if ground.divisible else ():
        found = call(question, plan, given=False)
        yield from ground.differs(question, found, "one plan, another size, without given buffers")
    layer = ground.of_another_layer
    if layer is not None:
        yield from ground.differs(
            layer, Rig(layer, plan).answer(layer), "another layer's weights by one plan"
        )


def of_weights(ground: Ground) -> Iterator[str]:
    """Prepare the weights of a layer, of another and of the first again by one plan: each must have its own."""
    plan, other = OnePlan.of(ground.subject), with_operands(ground.question, ground.later)
    for number, question in enumerate((ground.question, other, ground.question), 1):
        found = call(question, plan, given=True)
        yield from ground.differs(question, found, f"call {number} of one plan, another layer's weights")
