"""One plan called hundreds of times: what it counts, or takes in turn out of a ring, comes round again."""

from __future__ import annotations

import time
from collections.abc import Iterator

from kimi_hal import ops
from kimi_hal_conformance.case import nbytes
from kimi_hal_conformance.relations.ground import Ground, unequal
from kimi_hal_conformance.rig import OnePlan, Rig

NAME = "often"
#: Calls of one plan: more than rings and counters of a byte have places.
CALLS = 300
#: The process's own seconds that they take at most: of a slow call there are fewer.
OWN = 4.0
#: Bytes of the operands of a call that is made so often.
SMALL = 1 << 20


def applies(ground: Ground) -> bool:
    """Tell whether a call is small, has several rows, and gives equal bits where they can be compared."""
    if ground.case.ranks or ops.get(ground.case.operator).listed or not ground.promises_bits:
        return False
    return nbytes(ground.operands) <= SMALL and ground.divisible


def problems(ground: Ground) -> Iterator[str]:
    """Make one call of one plan again and again at the same addresses: each must give the bits of the first."""
    rig, end = Rig(ground.question, OnePlan.of(ground.subject)), time.process_time() + OWN
    first = rig.answer(ground.question)
    for number in range(2, CALLS + 1):
        again = rig.answer(ground.question)
        told = list(again.problems) or [
            f"{name} has other bits than of call 1" for name in unequal(again, first, ground.question)
        ]
        yield from (f"call {number} of one plan: {problem}" for problem in told)
        if told or time.process_time() > end:
            return
