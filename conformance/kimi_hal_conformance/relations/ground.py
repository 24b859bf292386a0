"""One case of one implementation, and how its calls are compared: what every relation stands on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kimi_hal import ops
from kimi_hal.dispatch.contract import Properties
from kimi_hal_conformance.calls import Called, Subject
from kimi_hal_conformance.case import Case, Checkpoint, Operands, drawn, generator
from kimi_hal_conformance.judges import OPAQUE
from kimi_hal_conformance.judging import objections
from kimi_hal_conformance.oracle import Question
from kimi_hal_conformance.poison import same_bits
from kimi_hal_conformance.relations import variants
from kimi_hal_conformance.rig import SCORES, with_operands
from kimi_hal_conformance.scripts import call

#: Their outputs hold what the contract leaves unspecified beside what it specifies: bits say nothing.
PARTLY_UNSPECIFIED = ("indexer_logits",)


class UntriedError(Exception):
    """A promise cannot be tried here, and this is the reason."""


@dataclass(frozen=True)
class Ground:
    """One case of one implementation, on which relations are tried.

    Args:
        case: one that passed, without ranks.
        subject: who answers.
        seed: of the operands.
        promised: what the implementation declares for the case's Spec.
    """

    case: Case
    subject: Subject
    seed: int
    promised: Properties

    @cached_property
    def question(self) -> Question:
        """Return the case's own call."""
        operands = drawn(self.case, self.seed)
        return Question(ops.get(self.case.operator), self.case.spec, self.case.limits, operands)

    @property
    def operands(self) -> Mapping[str, Any]:
        """Return the case's own operands."""
        return self.question.operands

    @cached_property
    def first(self) -> Called:
        """Return what the case's own call gives."""
        return call(self.question, self.subject, given=True)

    @cached_property
    def later(self) -> Operands:
        """Return operands that are drawn from another seed, weights among them."""
        return self.case.make(generator(self.case, self.seed + 1))

    @cached_property
    def again(self) -> Question:
        """Return the same call of new data, its rows in their places: of another seed where it has the same shapes."""
        new = variants.with_weights_of(self.operands, self.later)
        new = variants.rescaled(self.operands, new if variants.alike(self.operands, new) else self.operands)
        return with_operands(self.question, new)

    @cached_property
    def other(self) -> Question:
        """Return the same call of new data, last row first."""
        return self.turned(self.again)

    @cached_property
    def of_another_layer(self) -> Question | None:
        """Return the same call with other weights, as a layer makes it that shares the plan; ``None`` without any."""
        weights = {n: new for n, new in self.later.items() if isinstance(new, Checkpoint)}
        return with_operands(self.question, {**self.operands, **weights}) if weights else None

    @property
    def divisible(self) -> bool:
        """Tell whether the call has rows or sequences that can be taken apart."""
        return variants.divisible(self.case.operator, self.operands)

    @property
    def promises_bits(self) -> bool:
        """Tell whether equal calls are to give equal bits, and all of their bits are specified."""
        return self.promised.deterministic and self.case.operator not in PARTLY_UNSPECIFIED

    def turned(self, question: Question) -> Question:
        """Return a call with its last row or sequence first, where it can be taken apart."""
        if not variants.divisible(question.op.name, question.operands):
            return question
        return with_operands(question, variants.backwards(question.op.name, question.operands))

    def half(self, question: Question) -> Question:
        """Return the first half of a call's rows or sequences."""
        numbers = range(variants.count(question.op.name, question.operands) // 2)
        return with_operands(question, variants.taken(question.op.name, question.operands, numbers))

    def differs(self, question: Question, got: Called, after: str) -> Iterator[str]:
        """Yield how a call at used addresses differs from the same call of a new plan in new memory."""
        if got.answer is None or got.problems:
            yield from (f"{after}: {problem}" for problem in got.problems)
            return
        if not self.promises_bits:
            yield from (f"{after}: {problem}" for problem in objections(question, got))
            return
        new = call(question, self.subject, given=True)
        yield from (
            f"{after}: {name} has other bits than in new memory" for name in unequal(got, new, question)
        )


def unequal(got: Called, wanted: Called, question: Question) -> Iterator[str]:
    """Yield the names of outputs and changed buffers whose bits differ."""
    opaque = OPAQUE.get(question.op.name, ())
    if got.answer is None or wanted.answer is None:
        yield "the answer"
        return
    for kind in ("outputs", "mutated"):
        mine, theirs = getattr(got.answer, kind), getattr(wanted.answer, kind)
        for name, tensor in mine.items():
            if name not in (*opaque, SCORES) and not same_bits(
                tensor.contiguous(), theirs[name].contiguous()
            ):
                yield name


def invariant(ground: Ground) -> bool:
    """Tell whether bits of a row are declared and can be compared."""
    return ground.promised.batch_invariant and ground.case.operator not in PARTLY_UNSPECIFIED
