"""How each operator is called: most once, some together with the operator that belongs to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from kimi_hal.dispatch import policy
from kimi_hal.dispatch.plan import Plan
from kimi_hal_conformance.arranged import OF_BOTH, arrange
from kimi_hal_conformance.calls import Called, Stage, Subject, invoke, scratch
from kimi_hal_conformance.forms import storage
from kimi_hal_conformance.oracle import Answer, Question
from kimi_hal_conformance.poison import Room, same_bits


def call(question: Question, subject: Subject, given: bool) -> Called:
    """Plan, place the operands, call, and look at everything but values.

    Args:
        question: the call.
        subject: who answers it.
        given: outputs are given as buffers that hold what no result is.
    """
    stage = Stage(question, subject, Room(subject.hooks, question.sparse), given)
    found = SCRIPTS.get(question.op.name, _plain)(stage)
    subject.hooks.synchronize()
    around = stage.room.problems(question.op.mutated)
    return dataclasses.replace(found, problems=(*found.problems, *around))


def _plain(stage: Stage) -> Called:
    """Plan and call once."""
    ready = arrange(stage)
    return invoke(stage, ready.plan, ready.placed)


def _topk(stage: Stage) -> Called:
    """Call ``indexer_topk``, then its test entry, which also writes all scores and must select alike."""
    question, room = stage.question, stage.room
    ready = arrange(stage)
    found, placed = ready.plan, ready.placed
    plain = invoke(stage, found, placed)
    if plain.answer is None:
        return plain
    entry = getattr(found.run, "return_scores", None)
    if entry is None:
        return Called(None, ("the run function carries no return_scores, the test entry of indexer_topk",))
    spec: Any = question.spec
    width = question.operands["block_table"].shape[1] * spec.page
    scores = room.output("all_scores_out", (placed["row_len"].shape[0], width), spec.score)
    results = entry(**placed, **scratch(stage, found, placed), all_scores_out=scores)
    stage.subject.hooks.synchronize()
    if not isinstance(results, tuple) or len(results) != 3 or results[2] is not scores:
        return Called(None, ("return_scores did not return (indices, scores, all_scores_out)",))
    problems = [
        f"{name} differs with return_scores"
        for name, result in zip(("out", "scores_out"), results, strict=False)
        if not same_bits(result.cpu(), plain.answer.outputs[name])
    ]
    outputs = {**plain.answer.outputs, "all_scores_out": scores.cpu()}
    return dataclasses.replace(plain, answer=Answer(outputs, plain.answer.mutated), problems=tuple(problems))


def _commit(stage: Stage) -> Called:
    """Call the ``kda_verify`` of every layer, then ``kda_commit`` of what was accepted in all of them."""
    room, ready = stage.room, arrange(stage)
    ready.lead()
    stage.subject.hooks.synchronize()
    untouched = tuple(room.problems(("records",)))
    for number in range(len(ready.before)):  # the commit's own to change
        for name in OF_BOTH:
            room.originals.pop(f"{name}[{number}]")
        records = f"records[{number}]"  # the verify's result, and from here on an input like any other
        room.originals[records] = room.buffers[records].clone()
    found = invoke(stage, ready.plan, ready.placed)
    problems = (*(f"kda_verify: {p}" for p in untouched), *found.problems)
    return dataclasses.replace(found, problems=problems)


def _prepare(stage: Stage) -> Called:
    """Call ``prepare_moe_weights``, then ``moe_experts`` of the same backend on what it returned."""
    question, room, subject = stage.question, stage.room, stage.subject
    found = subject.plan("prepare_moe_weights", question)
    placed = {name: room.operand(name, question.operands[name]) for name in question.op.args}
    prepared = found.run(**placed)
    subject.hooks.synchronize()
    if problems := list(_weights_problems(prepared, placed)):
        return Called(None, tuple(problems))
    reader = _reader(found)
    if not reader:
        tag = found.implementation.weights_format
        return Called(None, (f"no moe_experts of {found.choice.backend.name} takes weights_format={tag!r}",))
    use = question.use()
    operands = {name: value for name, value in use.operands.items() if name != "weights"}
    operands = {name: room.operand(name, value) for name, value in operands.items()}
    used = dataclasses.replace(stage, question=use)
    done = invoke(
        used, subject.plan("moe_experts", use, implementation=reader), operands | {"weights": prepared}
    )
    held = {} if stage.given else {f"weights[{i}]": tensor for i, tensor in enumerate(prepared)}
    return dataclasses.replace(done, promised=found.properties, held=held)


def _weights_problems(prepared: Any, placed: Mapping[str, Tensor]) -> Iterator[str]:
    if not isinstance(prepared, list) or not prepared or not all(isinstance(t, Tensor) for t in prepared):
        yield "the call did not return a list of tensors"
        return
    for i, tensor in enumerate(prepared):
        for name, source in placed.items():
            if storage(tensor) == storage(source):
                yield f"weights[{i}] shares memory with {name}, which was not donated"


def _reader(found: Plan) -> str:
    """Return the full name of the ``moe_experts`` that takes what this implementation prepares."""
    backend, tag = found.choice.backend.name, found.implementation.weights_format
    readers = policy.registry(found.settings).get(backend).of("moe_experts")
    return next((f"{backend}.{i.name}" for i in readers if i.weights_format == tag), "")


SCRIPTS: Mapping[str, Callable[[Stage], Called]] = {
    "indexer_topk": _topk,
    "kda_commit": _commit,
    "prepare_moe_weights": _prepare,
}
