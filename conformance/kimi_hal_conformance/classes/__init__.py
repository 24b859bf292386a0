"""What each numerics class that an implementation may declare costs: the oracle with its roundings made once.

A class is a unit of the budget (``budget.py``), like the roundings that an operator's contract admits. One rounding
can by luck cost little where few entries share it, so some classes are made in several ways that a kernel might
choose between; the costliest counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kimi_hal_conformance.classes import attention, experts, recurrence, scores, sums
from kimi_hal_conformance.oracle import Answer, Question

#: The ways in which a class may be made in one operator.
Derivation = Callable[[Question], Sequence[Answer]]
#: Class -> operator -> its cost. An operator that is not named has nothing that the class rounds.
DERIVATIONS: Mapping[str, Mapping[str, Derivation]] = {
    "attn.k=bf16": attention.KEYS,
    "attn.p=bf16": attention.of(attention.BF16),
    "attn.p=fp8": attention.of(attention.FP8),
    "attn.q=fp8_block": attention.QUERIES,
    "attn.dots=fp8_sum": attention.PRODUCTS,
    "kda.state=bf16": recurrence.of(recurrence.rounded_state),
    "kda.chunk=bf16": recurrence.of(recurrence.rounded_chunks),
    "logits=bf16": scores.DERIVED,
    "logits=fp8_sum": sums.DERIVED,
    "moe.act=mxfp8": experts.of(experts.mxfp8),
    "moe.act=fp8_block": experts.of(experts.fp8_block),
    "moe.act=fp8_tensor": experts.of(experts.fp8_tensor),
}


def derived(question: Question, numerics: Sequence[str]) -> dict[str, Sequence[Answer]]:
    """Return the answers with each declared class's roundings made, by class."""
    found = {name: DERIVATIONS[name].get(question.op.name) for name in numerics}
    return {name: derive(question) for name, derive in found.items() if derive is not None}
