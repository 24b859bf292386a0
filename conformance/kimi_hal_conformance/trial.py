"""One call to be judged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kimi_hal_conformance.oracle import Answer, Question


@dataclass(frozen=True)
class Trial:
    """One call to be judged: what came out, and the answers of which its budget is made.

    Args:
        question: the call.
        got: what came out, on the CPU.
        exact: the oracle's answer, float64.
        reference: the float32 reference's.
        inner: the oracle's with the roundings that the contract admits inside, or ``None``.
    """

    question: Question
    got: Answer
    exact: Answer
    reference: Answer
    inner: Answer | None = None

    @property
    def spec(self) -> Any:
        """Return the Spec."""
        return self.question.spec
