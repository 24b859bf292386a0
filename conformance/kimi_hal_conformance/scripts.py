"""How each operator is called: most once, some together with the operator that belongs to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from kimi_hal.dispatch import policy
from kimi_hal.dispatch.plan import Plan
from kimi_hal_conformance.calls import Called, Stage, Subject, invoke, scratch
from kimi_hal_conformance.case import Checkpoint
from kimi_hal_conformance.forms import storage
from kimi_hal_conformance.oracle import OF_COMMIT, Answer, Question, layers
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
    return Called(found.answer, (*found.problems, *around))


def _plain(stage: Stage) -> Called:
    """Plan and call once."""
    question = stage.question
    found = stage.subject.plan(question.op.name, question)
    placed = {name: stage.room.operand(name, _own(found, value)) for name, value in question.operands.items()}
    return invoke(stage, found, placed)


def _own(found: Plan, value: Any) -> Any:
    """Return what the implementation makes of a checkpoint, whose tensors are on the plan's device."""
    if not isinstance(value, Checkpoint):
        return value
    return list(found.weights(**{name: tensor.to(found.device) for name, tensor in value.items()}))


def _topk(stage: Stage) -> Called:
    """Call ``indexer_topk``, then its test entry, which also writes all scores and must select alike."""
    question, room = stage.question, stage.room
    found = stage.subject.plan("indexer_topk", question)
    placed = {name: room.operand(name, value) for name, value in question.operands.items()}
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
    return Called(Answer(outputs, plain.answer.mutated), tuple(problems))


def _verify(stage: Stage) -> Called:
    """Call ``kda_verify`` with a records buffer of the plan's own size."""
    question, room = stage.question, stage.room
    found = stage.subject.plan("kda_verify", question)
    placed = {name: room.operand(name, value) for name, value in question.operands.items()}
    placed["records"] = _records(stage, found)
    return invoke(stage, found, placed)


def _records(stage: Stage, verify: Plan, name: str = "records") -> Tensor:
    rows = stage.question.limits.max_reqs
    return stage.room.scratch(name, rows * verify.records_bytes).view(rows, verify.records_bytes)


def _commit(stage: Stage) -> Called:
    """Call the ``kda_verify`` of every layer, then ``kda_commit`` of what was accepted in all of them."""
    question, room, subject = stage.question, stage.room, stage.subject
    verify = subject.plan("kda_verify", question)
    verified = [_verify_layer(stage, verify, i, own) for i, own in enumerate(layers(question.operands))]
    subject.hooks.synchronize()
    untouched = tuple(room.problems(("records",)))
    for i in range(len(verified)):  # the commit's own to change
        for name in ("conv_state", "state"):
            room.originals.pop(f"{name}[{i}]")
    names = {"conv_states": "conv_state", "states": "state", "records": "records"}
    lists: dict[str, Any] = {many: [own[one] for own in verified] for many, one in names.items()}
    for many, one in (("A_logs", "A_log"), ("dt_biases", "dt_bias")):
        lists[many] = None if verified[0][one] is None else [own[one] for own in verified]
    rest = {n: room.operand(n, v) for n, v in question.operands.items() if n in OF_COMMIT and n != "more"}
    commit = subject.plan("kda_commit", question, pair=verify)
    found = invoke(stage, commit, lists | {"state_ids": verified[0]["state_ids"]} | rest)
    return Called(found.answer, (*(f"kda_verify: {p}" for p in untouched), *found.problems))


def _verify_layer(stage: Stage, verify: Plan, number: int, operands: Mapping[str, Any]) -> dict[str, Any]:
    """Call one layer's ``kda_verify`` and return its operands, records among them."""
    placed = {name: stage.room.operand(f"{name}[{number}]", value) for name, value in operands.items()}
    placed["records"] = _records(stage, verify, f"records[{number}]")
    verify.run(**placed)
    return placed


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
    return invoke(
        used, subject.plan("moe_experts", use, implementation=reader), operands | {"weights": prepared}
    )


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
    "kda_verify": _verify,
    "prepare_moe_weights": _prepare,
}
