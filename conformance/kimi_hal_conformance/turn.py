"""A batch in the hands of a process: what is left of it, and what becomes of a case that was lost on the way."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec

from kimi_hal_conformance.case import get
from kimi_hal_conformance.levels import SPEED
from kimi_hal_conformance.messages import TIMING, UNUSABLE, Batch, Ended, Message, Shrunk, Timed
from kimi_hal_conformance.printable import printable
from kimi_hal_conformance.verdict import AGAINST, FAILED, Verdict

#: What is said of the input of a case whose process was lost, and of one whose process ended itself.
NOT_CUT = "the whole case: what ends its process is not cut down"
LEFT_UNUSABLE = "the whole case: it left the device unusable, and the process ended"


@dataclass
class Turn:
    """Where a process is with a batch.

    Args:
        batch: what it was told.
        mark: where in the log begins what it printed of the case in hand.
        limit: seconds in which it must say something.
        pid: its number, once it has said that; until then 0.
        held: a verdict that is not complete: a smaller part of its case is looked for, or its operator timed.
        left: cases without an answer, that in hand first.
    """

    batch: Batch
    mark: int
    limit: float
    pid: int = 0
    held: Verdict | None = None
    left: deque[str] = field(init=False)

    def __post_init__(self) -> None:
        self.left = deque(self.batch.cases)

    def hold(self, found: Verdict, limit: float) -> None:
        """Keep a verdict until what is done after its case is there, or the time for it is over."""
        self.held, self.limit = found, limit

    def completed(self, message: Message | None) -> Verdict:
        """Return the verdict that was held, with what a message says of its case; the next case is in hand then."""
        assert self.held is not None
        found = completed(self.held, message)
        self.held, self.limit = None, self.batch.limit
        return found


def completed(held: Verdict, message: Message | None) -> Verdict:
    """Return a verdict with what was done after its case: a smaller part was looked for, or a call timed."""
    if held.status == FAILED:
        return with_input(held, message)
    if isinstance(message, Timed) and message.speed:
        return msgspec.structs.replace(held, speed=message.speed)
    lost = "the process was lost while a call was timed" if message else f"a call took more than {TIMING:g} s"
    why = message.why if isinstance(message, Timed) else lost
    return msgspec.structs.replace(held, untried=held.untried | {SPEED: why})


def with_input(failed: Verdict, message: Message | None) -> Verdict:
    """Return a failed verdict with the smallest part of its case that fails, or why none is known."""
    if isinstance(message, Shrunk):
        return msgspec.structs.replace(failed, smallest=message.smallest, input=message.input)
    if message is not None and not isinstance(message, Ended):
        return failed  # it was never run
    if message is not None and message.code == UNUSABLE:
        return msgspec.structs.replace(failed, smallest=failed.case, input=LEFT_UNUSABLE)
    lost = "was lost" if message else "gave no answer in time"
    said = f"the whole case: the process that looked for a smaller one {lost}"
    return msgspec.structs.replace(failed, smallest=failed.case, input=said)


def verdict(batch: Batch, case_id: str, status: str, problem: str, output: str = "") -> Verdict:
    """Return a verdict on a case that gave none itself."""
    case = get(case_id)
    return Verdict(
        case=case.id,
        operator=case.operator,
        implementation=batch.implementation,
        status=status,
        problems=(problem,),
        seed=batch.seed,
        fault=case.fault,
        output=output,
        smallest=case.id if status in AGAINST else "",
        input=NOT_CUT if status in AGAINST else "",
    )


def plain(verdict: Verdict) -> Verdict:
    """Return a verdict in which all that its process said is printable."""
    return msgspec.structs.replace(
        verdict,
        problems=tuple(map(printable, verdict.problems)),
        output=printable(verdict.output),
        untried={name: printable(why) for name, why in verdict.untried.items()},
    )
