"""What is tried of a case whose values are right: declared bits, relations between calls, capture."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kimi_hal import ops
from kimi_hal.dispatch.contract import Properties
from kimi_hal_conformance.calls import Called, Subject
from kimi_hal_conformance.case import Case, drawn, nbytes
from kimi_hal_conformance.levels import (
    BATCH_INVARIANT,
    CAPTURE,
    CHECKPOINT_EXACT,
    DETERMINISTIC,
    LASTING,
    SHARDS,
    of_promise,
)
from kimi_hal_conformance.oracle import Answer, Question
from kimi_hal_conformance.poison import same_bits
from kimi_hal_conformance.ranks import on_ranks, questions
from kimi_hal_conformance.relations import RELATIONS, captured, lasting, often, shards
from kimi_hal_conformance.relations import on_ranks as over_ranks
from kimi_hal_conformance.relations.captured import untried
from kimi_hal_conformance.relations.checkpoints import resumed, resumes
from kimi_hal_conformance.relations.ground import PARTLY_UNSPECIFIED, Ground, UntriedError
from kimi_hal_conformance.relations.purity import of_weights
from kimi_hal_conformance.relations.rows import rearranges, split
from kimi_hal_conformance.relations.variants import total
from kimi_hal_conformance.rig import OnePlan
from kimi_hal_conformance.scripts import call
from kimi_hal_conformance.selections import keys_of
from kimi_hal_conformance.shrink import pieces

#: Seconds after which a call is not repeated again, so that a slow one stays far within the limit of a case.
ENOUGH = 10.0
#: The process's own seconds that repeated calls of a case take, of one that relations are tried on and of any other.
#: A clock that a busy machine does not turn: as many calls are made there.
OWN_MOST, OWN = 2.0, 0.25
#: Seconds after which nothing more is begun.
LONG = 20.0
#: Bytes of operands beyond which relations, which make a call twenty times in memory of its own, are not tried in
#: passing where the host computes: the same operator of fewer heads or experts shows the same.
HEAVY = 48 << 20
#: An allowance for more cases than these (``request.RELATIONS``) is one for every case, heavy or not.
EVERY = 1 << 16
#: Repeats with which one small call is made very often, too.
PATIENT = 19
#: Rows of more calls than these are cut off and called alone although they change a pool: blocks have no more.
MANY_ROWS = 64


@dataclass(frozen=True)
class Effort:
    """How much is tried of a case that passed.

    Args:
        repeats: calls beside the first, one at least and no more than there is time for; 0: no bits are compared.
        relations: what must hold between calls, and capture.
        lasting: that results stay what they are while later calls are made (``relations/lasting.py``).
        often: that the hundredth call of a plan is like the first (``relations/often.py``).
    """

    repeats: int = 0
    relations: bool = False
    lasting: bool = False
    often: bool = False


#: Nothing is tried beyond the values.
NONE = Effort()
#: Why no bits of a second call were compared: what to do about it is not the same.
NOT_DECLARED = "deterministic is not declared"
NOT_REPEATED = "nothing was repeated; --repeats 1 compares the bits of a second call"
#: Relations that only a case of several rows or sequences has: such a case shows what relations can.
APART = {"split", "split_bits", over_ranks.NAME}


@dataclass
class Allowance:
    """What is still to be tried beyond the values, while an implementation's cases are tried in turn.

    Where any are to be tried, a case is tried too that has an operand which none before it had: what a call keeps of
    another may be any of them.

    Args:
        relations: on so many more cases that show what relations can.
        lasting: whether no case has yet shown that results last.
        often: whether no case has yet been called very often.
        shown: names of the operands of the cases that they were tried on.
    """

    relations: int
    lasting: bool = True
    often: bool = True
    shown: set[str] = field(default_factory=set)

    def effort(self, repeats: int, operands: Set[str] = frozenset(), heavy: bool = False) -> Effort:
        """Return how much the next case is to try, which has operands of these names, and maybe very large ones."""
        relations = self.relations > 0 or bool(self.shown and operands - self.shown)
        relations = relations and (not heavy or self.relations > EVERY)
        return Effort(repeats, relations, self.lasting or relations, self.often and repeats >= PATIENT)

    def spend(self, tried: Iterable[str], operands: Set[str] = frozenset()) -> None:
        """Take off what a case has tried."""
        if APART & {*tried}:
            self.relations -= 1
            self.shown |= operands
        self.lasting = self.lasting and LASTING not in tried
        self.often = self.often and often.NAME not in tried


def operand_names(case: Case, seed: int) -> Set[str]:
    """Return the names of the operands that a case gives, those of a group with its size; none that cannot be drawn."""
    if case.sparse:
        return frozenset()
    try:
        operands = drawn(case, seed)  # which are kept for whoever runs the case
        given = operands["ranks"][0] if case.ranks else operands
        of = f" of {case.ranks} ranks" if case.ranks else ""
        return {name + of for name, value in given.items() if value is not None}
    except Exception:  # whoever runs the case says why
        return frozenset()


def heavy(case: Case, subject: Subject, seed: int) -> bool:
    """Tell whether the host computes, and on operands of more than ``HEAVY`` bytes."""
    if case.sparse or torch.device(subject.device).type != "cpu":
        return False
    try:
        return nbytes(drawn(case, seed)) > HEAVY
    except Exception:  # whoever runs the case says why
        return False


@dataclass(frozen=True)
class Kept:
    """Which promises of a case were tried, and what was wrong.

    Args:
        tried: their names.
        problems: of the last one tried.
        level: that one's.
        untried: promise -> why it was not tried.
    """

    tried: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    level: int = 0
    untried: Mapping[str, str] = field(default_factory=dict)


def kept(case: Case, subject: Subject, seed: int, effort: Effort, last: Sequence[Called]) -> Kept:
    """Try what an implementation declares and the contract asks beyond the values of one call.

    Bits first: a call is repeated, and its first, middle and last row are called alone. Then that results last,
    relations between calls, and capture. The first that does not hold is the last that is tried. Of cases of ranks,
    calls are repeated and results must last.

    Args:
        case: one that passed.
        subject: who answers.
        seed: of the operands.
        effort: how much.
        last: the case's last call, of each rank.
    """
    if case.sparse:  # one call is enough where gigabytes of addresses are behind it
        effort = replace(effort, relations=False, lasting=False)
    found, end = Kept(), time.monotonic() + LONG
    missed: dict[str, str] = {}
    if effort == NONE:
        return found
    promised = last[0].promised  # ranks promise alike
    for name, told in trials(case, subject, seed, effort, last):
        if time.monotonic() > end:
            missed[name] = f"what was tried before it took more than {LONG:g} s"
            continue
        try:
            problems = tuple(dict.fromkeys(told))
        except UntriedError as error:
            missed[name] = str(error)
            continue
        found = Kept((*found.tried, name), problems, of_promise(name) if problems else 0)
        if problems:
            break
    return replace(found, untried=missed | unasked(case, effort, promised))


def trials(
    case: Case, subject: Subject, seed: int, effort: Effort, last: Sequence[Called]
) -> Iterator[tuple[str, Iterable[str]]]:
    """Yield the name of each promise, and what will yield the problems when it is asked."""
    promised = last[0].promised
    ground = Ground(case, subject, seed, promised)  # of cases without ranks
    if promised.deterministic and effort.repeats:  # without, no row has bits of its own either
        first = _joined([_of(done) for done in last], case.ranks)
        yield DETERMINISTIC, _repeated(case, subject, seed, first, effort)
        if promised.batch_invariant and not case.ranks:
            if rows := _rows(case, seed):
                yield BATCH_INVARIANT, _alone(case, subject, seed, first, rows)
            elif many_rows(ground):
                yield "split_bits", split(ground, 1)
        if not case.ranks and resumes(ground):
            yield CHECKPOINT_EXACT, resumed(ground)
    if effort.lasting and lasting.applies(case):
        yield LASTING, lasting.problems(case, subject, seed)
    if effort.often and not case.sparse and often.applies(ground):
        yield often.NAME, often.problems(ground)
    if effort.relations and over_ranks.applies(case, seed):
        yield over_ranks.NAME, over_ranks.problems(case, subject, seed)
    if not effort.relations or case.ranks:
        return
    if ops.get(case.operator).listed:
        yield "purity", of_weights(ground)
        return
    for relation in RELATIONS:
        if relation.applies(ground):
            yield relation.called(ground), relation.problems(ground)
    if shards.applies(ground):
        yield SHARDS, shards.problems(ground)
    if not untried(promised):
        yield CAPTURE, captured.problems(ground)


def many_rows(ground: Ground) -> bool:
    """Tell whether a call has more rows than a block, which write what they read and stand for themselves."""
    return rearranges(ground) and total(ground.case.operator, ground.operands) > MANY_ROWS


def unasked(case: Case, effort: Effort, promised: Properties) -> dict[str, str]:
    """Return why bits of a second call and capture were not asked for."""
    why = {}
    if not promised.deterministic:
        why[DETERMINISTIC] = NOT_DECLARED
    elif not effort.repeats:
        why[DETERMINISTIC] = NOT_REPEATED
    if case.ranks and effort.relations:
        why[CAPTURE] = "ranks of a loopback group meet on the host, which no graph holds"
    elif not case.ranks and (reason := untried(promised)):
        why[CAPTURE] = reason
    return why


def asked(case: Case, seed: int) -> Question:
    """Return the call of a case without ranks."""
    operands = drawn(case, seed)
    return Question(ops.get(case.operator), case.spec, case.limits, operands, sparse=case.sparse)


def _bits(case: Case, subject: Subject, seed: int) -> dict[str, Tensor]:
    """Return all that a call gives or changes, by name, of each rank where there are several."""
    return next(_every(case, subject, seed, [True]))


def _every(case: Case, subject: Subject, seed: int, given: Sequence[bool]) -> Iterator[dict[str, Tensor]]:
    """Yield what calls give or change, with given buffers or without.

    Those of ranks are all made before the first is looked at, by one plan.
    """
    if not case.ranks:
        yield from (_of(call(asked(case, seed), subject, own)) for own in given)
        return

    def calls(question: Question) -> list[dict[str, Tensor]]:
        one = OnePlan.of(subject)
        return [_of(call(question, one, own)) for own in given]

    of_ranks = on_ranks(questions(case, drawn(case, seed)), calls)
    yield from (_joined(found, case.ranks) for found in zip(*of_ranks, strict=True))


def _joined(found: Sequence[dict[str, Tensor]], ranks: int) -> dict[str, Tensor]:
    """Return what came out on all ranks, by names that tell these apart."""
    if not ranks:
        return found[0]
    return {f"{name} of rank {rank}": out for rank, own in enumerate(found) for name, out in own.items()}


def _of(done: Called) -> dict[str, Tensor]:
    found = done.answer or Answer({}, {})
    return {**found.outputs, **found.mutated}


def _repeated(
    case: Case, subject: Subject, seed: int, first: dict[str, Tensor], effort: Effort
) -> Iterator[str]:
    """Yield what is not the first call's of a call by a new plan, then of more by one, as long as time allows.

    Of those, two and two are made without given buffers and with them, so that one of each is of even number.
    """
    started, own = time.monotonic(), time.process_time()
    wrong = list(_differing(first, _bits(case, subject, seed), 2))
    took, own = time.monotonic() - started, time.process_time() - own
    room = OWN_MOST if effort.relations else OWN
    more = 0 if wrong else min(effort.repeats - 1, int(ENOUGH / took), int(room / max(own, 1e-6)))
    one = subject if case.ranks else OnePlan.of(subject)
    given = [bool(case.sparse) or number % 4 > 1 for number in range(more)]
    if not case.ranks:  # what is unspecified is what stood in a given buffer, and anything in a new one
        first = specified(asked(case, seed), first)
    for number, again in enumerate(_every(case, one, seed, given) if given else (), 3):
        wrong = list(_differing(first, again if case.ranks else specified(asked(case, seed), again), number))
        if wrong:
            break
    yield from wrong


def _differing(first: dict[str, Tensor], again: dict[str, Tensor], number: int) -> Iterator[str]:
    """Yield the first thing of a later call that has other bits than of the first."""
    for name, tensor in first.items():
        if name not in again or not same_bits(again[name], tensor):
            yield f"declared deterministic, but {name} of call {number} has other bits than of call 1"
            return


def _rows(case: Case, seed: int) -> dict[int, Case]:
    """Return the first, middle and last row alone, by number; none where rows may depend on each other.

    They may where a call writes a buffer that another of its rows reads.
    """
    op = ops.get(case.operator)
    if op.mutated or not all("T" in out.shape.split() for out in op.outs):
        return {}
    every = dict(enumerate(pieces(case, seed)))
    return {number: every[number] for number in sorted({0, len(every) // 2, len(every) - 1} & set(every))}


def _alone(
    case: Case, subject: Subject, seed: int, first: dict[str, Tensor], rows: dict[int, Case]
) -> Iterator[str]:
    one, first = OnePlan.of(subject), specified(asked(case, seed), first)
    for number, row in rows.items():
        alone = specified(asked(row, seed), _bits(row, one, seed))
        for out in ops.get(case.operator).outs:
            at = out.shape.split().index("T")
            if out.keyword in first and not same_bits(
                alone[out.keyword].contiguous(), first[out.keyword].narrow(at, number, 1).contiguous()
            ):
                yield f"declared batch_invariant, but row {number} of {out.keyword} has other bits alone"


def specified(question: Question, results: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return results with zeros where the contract leaves them open: the columns of scores that are no keys."""
    if question.op.name not in PARTLY_UNSPECIFIED:
        return results
    out = results["out"]
    keys = torch.arange(out.shape[1]) < keys_of(question, out.shape[1])[:, None]
    return {**results, "out": out.where(keys, 0.0)}
