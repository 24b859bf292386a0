"""Promises in bits: a call that is repeated, and a row that is called alone, where that is declared."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from kimi_hal import ops
from kimi_hal.dispatch.contract import Properties
from kimi_hal_conformance.calls import Subject
from kimi_hal_conformance.case import Case, generator
from kimi_hal_conformance.oracle import Answer, Question
from kimi_hal_conformance.poison import same_bits
from kimi_hal_conformance.scripts import call
from kimi_hal_conformance.shrink import BEFORE, pieces

#: Their outputs hold what the contract leaves unspecified beside what it specifies: no row is compared.
PARTLY_UNSPECIFIED = ("indexer_logits",)
#: Seconds after which a call is not repeated again, so that a slow one stays far within the limit of a case.
ENOUGH = 10.0
DETERMINISTIC, BATCH_INVARIANT = "deterministic", "batch_invariant"


@dataclass(frozen=True)
class Kept:
    """Which promises of a case were tried, and what was wrong."""

    tried: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def kept(case: Case, subject: Subject, seed: int, repeats: int) -> Kept:
    """Call a case again, and its first, middle and last row alone; compare bits with the first call.

    Cases of ranks are not tried.

    Args:
        case: one that passed.
        subject: who answers.
        seed: of the operands.
        repeats: calls beside the first, fewer after ``ENOUGH`` seconds and one at least; 0: nothing is tried.
    """
    if not repeats or case.ranks:
        return Kept()
    promised = properties(asked(case, seed), subject)
    if not promised.deterministic:  # then no row has bits of its own either
        return Kept()
    first = _bits(case, subject, seed)
    tried: tuple[str, ...] = (DETERMINISTIC,)
    problems = list(_repeated(case, subject, seed, first, repeats))
    if promised.batch_invariant and not problems and (rows := _rows(case, seed)):
        tried = (DETERMINISTIC, BATCH_INVARIANT)
        problems += _alone(case, subject, seed, first, rows)
    return Kept(tried, tuple(dict.fromkeys(problems)))


def asked(case: Case, seed: int) -> Question:
    """Return the call of a case without ranks."""
    operands = case.make(generator(case, seed))
    return Question(ops.get(case.operator), case.spec, case.limits, operands, sparse=case.sparse)


def properties(question: Question, subject: Subject) -> Properties:
    """Return what an implementation promises for a call."""
    name = question.op.name
    pair = subject.plan(BEFORE[name], question) if name in BEFORE else None
    return subject.plan(name, question, pair=pair).properties


def _bits(case: Case, subject: Subject, seed: int) -> dict[str, Tensor]:
    """Return all that a call gives or changes, by name."""
    done = call(asked(case, seed), subject, given=True)
    found = done.answer or Answer({}, {})
    return {**found.outputs, **found.mutated}


def _repeated(
    case: Case, subject: Subject, seed: int, first: dict[str, Tensor], repeats: int
) -> Iterator[str]:
    end = time.monotonic() + ENOUGH
    for number in range(repeats):
        if number and time.monotonic() > end:
            return
        again = _bits(case, subject, seed)
        for name, tensor in first.items():
            if name not in again or not same_bits(again[name], tensor):
                yield f"declared deterministic, but {name} of call {number + 2} has other bits than of call 1"
                return


def _rows(case: Case, seed: int) -> dict[int, Case]:
    """Return the first, middle and last row alone, by number; none where rows may depend on each other.

    They may where a call writes a buffer that another of its rows reads.
    """
    op = ops.get(case.operator)
    if op.mutated or op.name in PARTLY_UNSPECIFIED or not all("T" in out.shape.split() for out in op.outs):
        return {}
    every = dict(enumerate(pieces(case, seed)))
    return {number: every[number] for number in sorted({0, len(every) // 2, len(every) - 1} & set(every))}


def _alone(
    case: Case, subject: Subject, seed: int, first: dict[str, Tensor], rows: dict[int, Case]
) -> Iterator[str]:
    for number, row in rows.items():
        alone = _bits(row, subject, seed)
        for out in ops.get(case.operator).outs:
            at = out.shape.split().index("T")
            if out.keyword in first and not same_bits(
                alone[out.keyword].contiguous(), first[out.keyword].narrow(at, number, 1).contiguous()
            ):
                yield f"declared batch_invariant, but row {number} of {out.keyword} has other bits alone"
