"""Capture and replay: what is declared capturable goes into a graph of the device, and answers for new data there.

Two graphs of one plan, of sizes A and B, are captured on calls that hold nothing but padding, as an engine does
before its first request; then replayed A, B, A, B, A. What was decided on the host in between is not in a graph.
"""

from __future__ import annotations

from collections.abc import Iterator

from kimi_hal.dispatch.contract import Properties
from kimi_hal_conformance.oracle import Question
from kimi_hal_conformance.raised import described
from kimi_hal_conformance.relations import variants
from kimi_hal_conformance.relations.ground import Ground, UntriedError
from kimi_hal_conformance.relations.purity import rounds
from kimi_hal_conformance.rig import OnePlan, Rig, with_operands

#: Why a whole call was not captured, by what is declared.
UNDECLARED = "capture is not declared"
PIECEWISE = "capture is declared piecewise: the call runs between the graphs, not in one"
NO_GRAPHS = "the device has no graphs"
#: What is wrong with a replay that calls Python again.
NOT_CAPTURED = "it made the call anew: the device hooks captured nothing"


def untried(promised: Properties) -> str:
    """Return why a case's call is not to be captured, or an empty string."""
    return {"none": UNDECLARED, "piecewise": PIECEWISE}.get(promised.capture, "")


def problems(ground: Ground) -> Iterator[str]:
    """Capture at two sizes, replay on new data, and compare with calls of a new plan in new memory.

    Raises:
        UntriedError: the device has no graphs; nothing was learnt.
    """
    plan = OnePlan.of(ground.subject)
    calls = rounds(ground)
    rigs: dict[int, Rig] = {}
    for shape, _, _ in calls:
        if id(shape) not in rigs:
            rig = rigs[id(shape)] = Rig(shape, plan)
            told = list(_capture(rig, [question for other, question, _ in calls if other is shape][-1]))
            yield from told
            if told:
                return
    for number, (shape, question, before) in enumerate(calls, 1):
        found = rigs[id(shape)].answer(question, before)
        yield from ground.differs(question, found, f"replay {number} of {len(calls)}{before.said}")


def _capture(rig: Rig, later: Question) -> Iterator[str]:
    """Capture a call that holds nothing but padding, or later data where nothing marks that; yield what it broke."""
    name = rig.question.op.name
    padded = variants.padded(name, later.operands, range(variants.count(name, later.operands)))
    rig.fill(later if padded is None else with_operands(later, padded))
    launches = 0

    def launch() -> None:
        nonlocal launches
        launches += 1
        rig.launch()

    try:
        replay = rig.subject.hooks.capture(launch)
    except Exception as error:
        yield f"capture raised {described(error)}"
        return
    if replay is None:
        raise UntriedError(NO_GRAPHS)
    captured = launches
    rig.subject.hooks.synchronize()
    yield from (f"in capture: {problem}" for problem in rig.wrong)
    if padded is not None:
        yield from (
            f"capture of nothing but padding: {problem}" for problem in rig.room.problems(("records",))
        )

    def replayed() -> None:
        replay()
        if launches != captured:
            rig.wrong = (NOT_CAPTURED,)

    rig.run = replayed
