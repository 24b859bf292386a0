"""What an implementation could claim: what it refuses, and what stands one step outside of its claims, tried.

It is planned in its own process as if it claimed everything. What passes could be claimed; what does not, or ends
the process, speaks against nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from kimi_hal.dispatch.contract import Implementation
from kimi_hal.dispatch.matching import Target
from kimi_hal_conformance.claims.made import Made
from kimi_hal_conformance.claims.told import undeclared
from kimi_hal_conformance.messages import Batch
from kimi_hal_conformance.runner import Outcome
from kimi_hal_conformance.verdict import PASSED, REFUSED, CouldBe, Verdict


@dataclass(frozen=True)
class Attempt:
    """What is tried of one implementation.

    Args:
        batch: what its process is told.
        operator: the abstract operator.
        refusals: case -> what refused it; nothing for what a walk made.
        made: the combinations that a walk made.
    """

    batch: Batch
    operator: str
    refusals: Mapping[str, tuple[str, ...]]
    made: tuple[Made, ...]

    @classmethod
    def of(
        cls,
        batch: Batch,
        implementation: Implementation,
        where: Target,
        profile: str,
        verdicts: Sequence[Verdict],
    ) -> Attempt:
        """Take the cases that a run's verdicts refuse, and a walk around what is declared."""
        key = implementation.operator, batch.implementation
        refused = {
            v.case: tuple(p for p in v.problems if p.startswith(f"{batch.implementation}: "))
            for v in verdicts
            if v.status == REFUSED and (v.operator, v.implementation) == key
        }
        made = undeclared(implementation, where, profile)
        tried = msgspec.structs.replace(
            batch,
            cases=(*refused, *(one.id for one in made)),
            made=made,
            undeclared=True,
            repeats=0,
        )
        return cls(tried, implementation.operator, refused, made)

    def told(self, verdicts: Sequence[Verdict]) -> Iterator[CouldBe]:
        """Yield what passed."""
        specs = {one.id: one.differs for one in self.made}
        for verdict in verdicts:
            if verdict.status == PASSED:
                yield CouldBe(
                    case=verdict.case,
                    operator=self.operator,
                    implementation=self.batch.implementation,
                    refusals=self.refusals.get(verdict.case, ()),
                    spec=specs.get(verdict.case, ""),
                )


def passed(attempts: Sequence[Attempt], run: Callable[[Sequence[Batch]], Outcome]) -> list[CouldBe]:
    """Run the attempts and return what passed.

    Raises:
        KeyboardInterrupt: that was interrupted.
    """
    tried = [attempt for attempt in attempts if attempt.batch.cases]
    if not tried:
        return []
    outcome = run([attempt.batch for attempt in tried])
    if outcome.interrupted:
        raise KeyboardInterrupt
    return [
        could
        for attempt, verdicts in zip(tried, outcome.verdicts, strict=True)
        for could in attempt.told(verdicts)
    ]
