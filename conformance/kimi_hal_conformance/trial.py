"""One call to be judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kimi_hal_conformance.oracle import Answer, Question


@dataclass(frozen=True)
class Declared:
    """What an implementation declares of its results, by which they are judged.

    Args:
        numerics: classes of rounding beyond the contract.
        writer_tie: how its cache writer breaks ties.
        tie_rule: of its selections.
    """

    numerics: tuple[str, ...] = ()
    writer_tie: str = "even"
    tie_rule: str = "contract"


PLAIN = Declared()


@dataclass(frozen=True)
class Trial:
    """One call to be judged: what came out, and the answers of which its budget is made.

    Args:
        question: the call.
        got: what came out, on the CPU.
        exact: the oracle's answer, float64.
        reference: the float32 reference's.
        inner: the oracle's with the roundings that the contract admits inside, or ``None``.
        declared: what the implementation declares.
        classes: the oracle's with the roundings of each declared numerics class, made in one way or several.
        others: by other float32 formulas of the same function, where kernels use them (``formulas.py``).
    """

    question: Question
    got: Answer
    exact: Answer
    reference: Answer
    inner: Answer | None = None
    declared: Declared = PLAIN
    classes: Mapping[str, Sequence[Answer]] = field(default_factory=dict)
    others: Sequence[Answer] = ()

    @property
    def spec(self) -> Any:
        """Return the Spec."""
        return self.question.spec

    def rounded(self, kind: str, name: str) -> dict[str, list[Tensor]]:
        """Return one of the ``outputs`` or ``mutated`` buffers as each declared class has it, in all its ways."""
        ways = {c: [getattr(a, kind) for a in answers] for c, answers in self.classes.items()}
        return {c: [way[name] for way in found if name in way] for c, found in ways.items()}
