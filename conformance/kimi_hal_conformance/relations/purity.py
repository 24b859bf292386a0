"""No call may know of another: one plan, the same addresses, new data, other sizes."""

from __future__ import annotations

from collections.abc import Iterator

from kimi_hal_conformance.oracle import Question
from kimi_hal_conformance.poison import LARGE
from kimi_hal_conformance.relations import variants
from kimi_hal_conformance.relations.ground import Ground
from kimi_hal_conformance.rig import POISON, Before, OnePlan, Rig, with_operands
from kimi_hal_conformance.scripts import call

#: What scratch and outputs hold before each of the calls: one that finds its own mark there may take it for a state.
BEFORE = (POISON, Before(0, 0), Before(None, LARGE), Before(LARGE, None), Before(None, None))
#: The same of two calls alone.
BEFORE_TWO = (POISON, Before(None, LARGE))
Round = tuple[Question, Question, Before]


def rounds(ground: Ground) -> list[Round]:
    """Return calls of sizes A, B, A, B, A, each with the call that sets its addresses; A alone where it has no half.

    Of the later ones the first has its rows in another order; the last has all but the data of the very first call.
    """
    first, other = ground.question, ground.other
    if not ground.divisible:
        return [(first, asked, held) for asked, held in zip((first, other), BEFORE_TWO, strict=True)]
    half = ground.half(first)
    later = ground.half(other)
    later = later if variants.alike(half.operands, later.operands) else half
    calls = ((first, first), (half, half), (first, other), (half, later), (first, ground.again))
    return [(*own, held) for own, held in zip(calls, BEFORE, strict=True)]


def purity(ground: Ground) -> Iterator[str]:
    """One plan, the same addresses, new data, sizes A, B, A, B, A, then another layer: no call may know of another."""
    plan, first = OnePlan.of(ground.subject), ground.question
    rigs: dict[int, Rig] = {}
    for number, (shape, question, before) in enumerate(rounds(ground), 1):
        rig = rigs.get(id(shape)) or rigs.setdefault(id(shape), Rig(shape, plan))
        after = f"call {number} of one plan, new data at the same addresses"
        yield from ground.differs(question, rig.answer(question, before), f"{after}{before.said}")
        found = rig.next_layer(question)
        if found is not None:
            yield from ground.differs(question, found, f"{after}, the second on one prepared step")
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
