"""Relations between calls: what must hold of other data, orders, cuts and histories if it holds of one call.

None knows the operator's formula. Each is tried on any case of an operator that has what the relation is about;
what the calls give is compared in bits where the implementation declares that, and else held to the oracle.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kimi_hal import ops
from kimi_hal.dispatch.contract import Properties
from kimi_hal_conformance import variants
from kimi_hal_conformance.calls import Called, Subject
from kimi_hal_conformance.case import Case, drawn, generator
from kimi_hal_conformance.in_place import in_place, sharing
from kimi_hal_conformance.judges import OPAQUE
from kimi_hal_conformance.judging import objections
from kimi_hal_conformance.oracle import Answer, Question
from kimi_hal_conformance.poison import same_bits
from kimi_hal_conformance.rig import SCORES, OnePlan, Rig, with_operands
from kimi_hal_conformance.scripts import call
from kimi_hal_conformance.shrink import places

#: Their outputs hold what the contract leaves unspecified beside what it specifies: bits say nothing.
PARTLY_UNSPECIFIED = ("indexer_logits",)
#: Operands that name slots of a state.
SLOTS = ("state_ids", "out_ids", "checkpoint_ids")
#: Pools of states, a slot a row.
POOLS = ("state", "conv_state", "states", "conv_states")


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
    def other(self) -> Question:
        """Return the same call of new data: drawn from another seed where it has the same shapes, last row first."""
        later = self.case.make(generator(self.case, self.seed + 1))
        new = variants.with_weights_of(self.operands, later)
        return self.turned(
            with_operands(self.question, new if variants.alike(self.operands, new) else self.operands)
        )

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


# --- purity ---------------------------------------------------------------------------------------------


def rounds(ground: Ground) -> list[tuple[Question, Question]]:
    """Return calls of sizes A, B, A, B, each with the call that sets its addresses; A alone where it has no half."""
    first, other = ground.question, ground.other
    if not ground.divisible:
        return [(first, first), (first, other)]
    half = ground.half(first)
    later = ground.half(other)
    later = later if variants.alike(half.operands, later.operands) else half
    return [(first, first), (half, half), (first, other), (half, later)]


def purity(ground: Ground) -> Iterator[str]:
    """One plan, the same addresses, new data, sizes A, B, A, B: no call may know of another."""
    plan, rigs = OnePlan.of(ground.subject), {}
    for number, (shape, question) in enumerate(rounds(ground), 1):
        if id(shape) not in rigs:
            rigs[id(shape)] = Rig(shape, plan)
        found = rigs[id(shape)].answer(question)
        yield from ground.differs(
            question, found, f"call {number} of one plan, new data at the same addresses"
        )


# --- padding --------------------------------------------------------------------------------------------


def padding(ground: Ground) -> Iterator[str]:
    """Mark every second row as padding, then all: it touches no cache and no state, and the rest stays right."""
    number = variants.count(ground.case.operator, ground.operands)
    rig = Rig(ground.question, OnePlan.of(ground.subject))
    for what, rows in (("every second row", range(1, number, 2)), ("every row", range(number))):
        operands = variants.padded(ground.case.operator, ground.operands, rows)
        if operands is None:
            continue
        question, live = with_operands(ground.question, operands), sorted({*range(number)} - {*rows})
        found = rig.answer(question)
        told = [*objections(question, found), *disturbed(question, found, live)]
        yield from (f"{what} is padding: {problem}" for problem in told)


def pads(ground: Ground) -> bool:
    """Tell whether the operator marks padding in operands, and the case has rows."""
    numbers = range(variants.count(ground.case.operator, ground.operands))
    return variants.padded(ground.case.operator, ground.operands, numbers) is not None


def disturbed(question: Question, got: Called, live: list[int]) -> Iterator[str]:
    """Yield the slots of pools that changed although no live row or sequence names them."""
    if got.answer is None:
        return
    named = [
        question.operands[n][live].flatten() for n in SLOTS if isinstance(question.operands.get(n), Tensor)
    ]
    for name, tensor in got.answer.mutated.items():
        base, _, layer = name.partition("[")
        if base not in POOLS or layer not in ("", "0]"):
            continue
        before = question.operands[base if base in question.operands else base.removesuffix("s")]
        used = torch.cat(named).tolist() if named else []
        idle = [slot for slot in range(tensor.shape[0]) if slot not in used]
        if not same_bits(tensor[idle].contiguous(), before[idle].contiguous()):
            yield f"a slot of {name} changed that no row names"


# --- permutation and split ------------------------------------------------------------------------------


def permutation(ground: Ground) -> Iterator[str]:
    """Last row or sequence first, last request first: every row's result goes with it."""
    question = ground.turned(ground.question)
    found = Rig(question, OnePlan.of(ground.subject)).answer(question)
    numbers = variants.order(variants.count(ground.case.operator, ground.operands))
    rows = variants.rows_of(ground.case.operator, ground.operands, numbers, tail=True)
    yield from _held(ground, question, found, rows, "the rows backwards")


def split(ground: Ground) -> Iterator[str]:
    """Half of the rows or sequences in one call, the rest in another: together they are the one call."""
    number, name = variants.count(ground.case.operator, ground.operands), ground.case.operator
    whole = with_operands(ground.question, variants.taken(name, ground.operands, range(number)))
    plan, parts, done = OnePlan.of(ground.subject), (range(number // 2), range(number // 2, number)), whole
    found: list[Called] = []
    for part in parts:
        question = with_operands(whole, variants.taken(name, done.operands, part))
        found.append(Rig(question, plan).answer(question))
        if found[-1].answer is None:
            yield from (f"the rows in two calls: {problem}" for problem in found[-1].problems)
            return
        done = with_operands(whole, carried(done.operands, found[-1]))
    rows = variants.rows_of(name, ground.operands, range(number))
    yield from _held(ground, whole, together(whole, found), rows, "the rows in two calls")


def carried(operands: Mapping[str, Any], after: Called) -> dict[str, Any]:
    """Return operands with the pools and caches as a call has left them."""
    kept = dict(operands)
    assert after.answer is not None
    for name, tensor in after.answer.mutated.items():
        base = name.partition("[")[0]
        base = base if base in kept else base.removesuffix("s")
        if base in kept:
            kept[base] = tensor
    return kept


def together(question: Question, parts: list[Called]) -> Called:
    """Return the results of calls over parts of the rows as those of one call."""
    answers = [part.answer for part in parts if part.answer is not None]
    at = rows_at(question)
    outputs = {
        name: torch.cat([a.outputs[name] for a in answers], dim=at[name]) for name in answers[0].outputs
    }
    problems = tuple(p for part in parts for p in part.problems)
    return Called(Answer(outputs, answers[-1].mutated), problems, parts[-1].declared)


def rows_at(question: Question) -> dict[str, int]:
    """Return which dimension of each output has the rows."""
    return {SCORES: 0, **{out.keyword: out.shape.split().index("T") for out in question.op.outs}}


def _held(ground: Ground, question: Question, got: Called, rows: list[int], how: str) -> Iterator[str]:
    """Hold a rearranged call to the bits of the case's own rows if they are declared, else to the oracle."""
    if got.answer is None or got.problems:
        yield from (f"{how}: {problem}" for problem in got.problems)
    elif not invariant(ground):
        yield from (f"{how}: {problem}" for problem in objections(question, got))
    else:
        wanted = in_order(ground.question, ground.first, rows)
        names = unequal(got, wanted, question)
        yield from (f"declared batch_invariant, but with {how} {name} has other bits" for name in names)


def invariant(ground: Ground) -> bool:
    """Tell whether bits of a row are declared and can be compared."""
    return ground.promised.batch_invariant and ground.case.operator not in PARTLY_UNSPECIFIED


def in_order(question: Question, found: Called, rows: list[int]) -> Called:
    """Return results with their rows in another order."""
    assert found.answer is not None
    index = torch.tensor(rows, dtype=torch.int64)
    at = rows_at(question)
    outputs = {name: out.index_select(at[name], index) for name, out in found.answer.outputs.items()}
    return Called(Answer(outputs, found.answer.mutated), found.problems, found.declared)


def rearranges(ground: Ground) -> bool:
    """Tell whether the call has rows that stand for themselves."""
    return ground.divisible and all("T" in out.shape.split() for out in ground.question.op.outs)


# --- histories of a state -------------------------------------------------------------------------------


def chunks(ground: Ground) -> Iterator[str]:
    """Cut every sequence in two and go on from the state that the first part left: together they are the one call."""
    operands, name = ground.operands, ground.case.operator
    number = variants.count(name, operands)
    whole = with_operands(ground.question, variants.taken(name, operands, range(number)))
    ends, lengths = operands["cu_seqlens"].tolist(), operands["cu_seqlens"].diff()
    places = torch.arange(1, number + 1)
    cuts = torch.minimum((lengths * places // (number + 1)).clamp(min=1), lengths)
    plan = OnePlan.of(ground.subject)
    parts = [[*range(a, a + c)] for a, c in zip(ends, cuts.tolist(), strict=False)]
    rest = [[*range(a + c, b)] for a, b, c in zip(ends, ends[1:], cuts.tolist(), strict=False)]
    before = with_operands(whole, _of_rows(name, operands, parts))
    first = Rig(before, plan).answer(before)
    if first.answer is None:
        yield from (f"in two chunks: {problem}" for problem in first.problems)
        return
    going_on = {"has_initial_state": torch.ones(number, dtype=torch.bool)}
    after = with_operands(whole, carried(_of_rows(name, operands, rest), first) | going_on)
    joined = together(whole, [first, Rig(after, plan).answer(after)])
    if joined.answer is not None:
        joined = in_order(whole, joined, _back(parts + rest))
    yield from (f"in two chunks: {problem}" for problem in objections(whole, joined))


def _of_rows(name: str, operands: Mapping[str, Any], rows: list[list[int]]) -> dict[str, Any]:
    """Return the operands of some rows of every sequence."""
    kept = dict(operands)
    chosen = [row for own in rows for row in own]
    for arg in (n for n, at in places(name).items() if "T" in at):
        if isinstance(operands.get(arg), Tensor):
            kept[arg] = operands[arg][chosen]
    kept["cu_seqlens"] = variants.ends_of(torch.tensor([len(own) for own in rows], dtype=torch.int32))
    return kept


def _back(rows: list[list[int]]) -> list[int]:
    """Return where each row of the whole call stands in the parts."""
    order = [row for own in rows for row in own]
    return torch.tensor(order, dtype=torch.int64).argsort().tolist()


def continues(ground: Ground) -> bool:
    """Tell whether sequences can be gone on with, and no checkpoint is stored on the way."""
    ours = ground.case.operator in ("kda_conv", "kda_prefill")
    return (
        ours and ground.operands.get("checkpoint_ids") is None and int(ground.operands["cu_seqlens"][-1]) > 0
    )


def steps(ground: Ground) -> Iterator[str]:
    """Decode three tokens of every row one after another: together they are one prefill of three-token sequences."""
    tokens = [ground.operands, ground.other.operands, ground.operands]
    plan, state = OnePlan.of(ground.subject), ground.operands["state"]
    found: list[Called] = []
    for own in tokens:
        question = with_operands(ground.question, {**own, **_standing(ground), "state": state})
        found.append(Rig(question, plan).answer(question))
        if (answer := found[-1].answer) is None:
            yield from (f"token by token: {problem}" for problem in found[-1].problems)
            return
        state = answer.mutated["state"]
    whole, rows = _prefill(ground, tokens), ground.operands["q"].shape[0]
    by_token = torch.arange(len(tokens) * rows).view(len(tokens), rows).T.flatten().tolist()
    joined = in_order(whole, together(whole, found), by_token)
    yield from (f"token by token: {problem}" for problem in objections(whole, joined))


def _standing(ground: Ground) -> dict[str, Any]:
    """Return what is a sequence's, and not a token's own."""
    return {name: ground.operands[name] for name in ("state_ids", "A_log", "dt_bias")}


def _prefill(ground: Ground, tokens: list[Mapping[str, Any]]) -> Question:
    """Return the call of ``kda_prefill`` over sequences that hold one row of each of these tokens."""
    rows = ground.operands["q"].shape[0]
    names = ("q", "k", "v", "raw_g", "raw_beta")
    per_token = {name: torch.stack([own[name] for own in tokens], dim=1).flatten(0, 1) for name in names}
    ends = torch.arange(rows + 1, dtype=torch.int32) * len(tokens)
    operands = per_token | _standing(ground) | {"state": ground.operands["state"], "cu_seqlens": ends}
    return dataclasses.replace(ground.question, op=ops.get("kda_prefill"), operands=operands)


def reuse(ground: Ground) -> Iterator[str]:
    """Give every slot to another sequence that starts anew, over whatever the last one left: NaN here."""
    rig = Rig(ground.question, OnePlan.of(ground.subject))
    left = rig.answer(ground.question)
    pool = next(n for n in ("state", "conv_state") if n in ground.operands)
    state = ground.operands[pool].clone()
    ids = ground.operands["state_ids"]
    slots = ids[(ids >= 0) & (ids < state.shape[0])].unique().long()
    state[slots] = float("nan")
    new = {pool: state, "has_initial_state": torch.zeros(ids.numel(), dtype=torch.bool)}
    question = with_operands(ground.other, {**ground.other.operands, **new})
    told = [*left.problems, *objections(question, rig.answer(question))]
    yield from (f"a slot is used again: {problem}" for problem in told)


def starts_anew(ground: Ground) -> bool:
    """Tell whether the call says which sequences start anew, and stores no checkpoint."""
    given = ground.operands
    return given.get("has_initial_state") is not None and given.get("checkpoint_ids") is None


# --- all of them ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Relation:
    """One relation.

    Args:
        name: of it, as the report says it.
        applies: tells whether a case has what it is about.
        problems: tries it.
        bits: it compares the bits of rows where those are declared, and is then named ``<name>_bits``.
    """

    name: str
    applies: Callable[[Ground], bool]
    problems: Callable[[Ground], Iterator[str]]
    bits: bool = False

    def called(self, ground: Ground) -> str:
        """Return its name for a case."""
        return f"{self.name}_bits" if self.bits and invariant(ground) else self.name


RELATIONS = (
    Relation("purity", lambda ground: True, purity),
    Relation("padding", pads, padding),
    Relation("permutation", rearranges, permutation, bits=True),
    Relation("split", rearranges, split, bits=True),
    Relation("chunks", continues, chunks),
    Relation("steps", lambda ground: ground.case.operator == "kda_decode", steps),
    Relation("reuse", starts_anew, reuse),
    Relation("in_place", lambda ground: bool(sharing(ground)), in_place),
)
