"""Call an implementation as an engine would: once into given buffers between canaries, once without.

What a call returns is looked at before anyone compares values: the number of results, their kinds, whether
they are the buffers that were given, or memory of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kimi_hal.dispatch.hookspecs import DeviceHooks
from kimi_hal.dispatch.plan import Plan, plan
from kimi_hal.ops import get
from kimi_hal.ops.operator import OutputShape, output_shapes, torch_dtype
from kimi_hal_conformance.case import Checkpoint
from kimi_hal_conformance.oracle import OF_COMMIT, Answer, Question, buffers, layers
from kimi_hal_conformance.poison import Room, same_bits
from kimi_hal_conformance.step import metadata


class FormError(Exception):
    """What a call returned is not of the contract's form."""


@dataclass(frozen=True)
class Subject:
    """Who is on trial, and where."""

    implementation: str
    device: str
    hooks: DeviceHooks

    def plan(
        self, operator: str, question: Question, implementation: str = "", pair: Plan | None = None
    ) -> Plan:
        """Plan an operator for a question's Spec and Limits, on this implementation unless another is named."""
        return plan(
            operator,
            question.spec,
            limits=question.limits,
            device=self.device,
            group=question.group,
            implementation=implementation or self.implementation,
            pair=pair,
        )


@dataclass(frozen=True)
class Called:
    """What came out of one call: the answer on the CPU, and what was wrong beside the values.

    ``answer`` is ``None`` where the results are not of the kind that can be compared.
    """

    answer: Answer | None
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Stage:
    """One call in preparation: the question, who answers, in which room, with given buffers or without."""

    question: Question
    subject: Subject
    room: Room
    given: bool


def call(question: Question, subject: Subject, given: bool) -> Called:
    """Plan, place the operands, call, and look at everything but values.

    Args:
        question: the call.
        subject: who answers it.
        given: outputs are given as buffers that hold what no result is.
    """
    stage = Stage(question, subject, Room(subject.hooks), given)
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


def invoke(stage: Stage, found: Plan, placed: Mapping[str, Any]) -> Called:
    """Call a plan on placed operands; workspace and step hold NaN bytes before."""
    op, room = found.operator, stage.room
    shapes = output_shapes(op, found.spec, found.limits, placed)
    outs = {s.keyword: room.output(s.keyword, tuple(s.shape), s.dtype) for s in shapes} if stage.given else {}
    results = found.run(**placed, **outs, **_scratch(stage, found, placed))
    stage.subject.hooks.synchronize()
    try:
        results = _several(results, [shape.keyword for shape in shapes])
    except FormError as error:
        return Called(None, (str(error),))
    problems = list(_result_problems(results, shapes, outs, placed, torch.device(stage.subject.device)))
    if problems:
        return Called(None, tuple(problems))
    named = dict(zip((s.keyword for s in shapes), results, strict=True))
    mutated = buffers(op.mutated, placed)
    return Called(Answer(_on_host(named), _on_host(mutated)), ())


def _scratch(stage: Stage, found: Plan, placed: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return workspace and step of the plan's sizes, where the operator has them; the step is prepared."""
    parameters = found.operator.signature.parameters
    sizes = {"workspace": found.workspace_bytes, "step": found.step_bytes}
    made = {
        name: stage.room.scratch(name, size) for name, size in sizes.items() if size and name in parameters
    }
    if "step" in made:
        known = {
            n: placed[n] if n in placed else stage.room.operand(n, v)
            for n, v in metadata(stage.question).items()
        }
        found.prepare(**known, step=made["step"])
    return made


def _several(results: Any, names: Sequence[str]) -> tuple[Any, ...]:
    """Return the results one by one, if they are as many as the outputs and in the contract's form.

    Raises:
        FormError: they are not; says what was returned and what was expected.
    """
    if not names and results is None:
        return ()
    if len(names) == 1 and not isinstance(results, tuple | list):
        return (results,)
    if len(names) > 1 and isinstance(results, tuple) and len(results) == len(names):
        return results
    listed = f" ({', '.join(names)})" if names else ""
    wanted = ("nothing", "one tensor")[len(names)] if len(names) < 2 else f"a tuple of {len(names)}"
    raise FormError(f"the call returned {_form(results)}, expected {wanted}{listed}")


def _form(results: Any) -> str:
    if results is None:
        return "nothing"
    kind = type(results).__name__
    return f"a {kind} of {len(results)}" if isinstance(results, tuple | list) else f"a {kind}"


def _on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def _result_problems(
    results: tuple[Any, ...],
    shapes: tuple[OutputShape, ...],
    outs: Mapping[str, Tensor],
    placed: Mapping[str, Any],
    device: torch.device,
) -> Iterator[str]:
    """Yield what is wrong with the kinds of the results."""
    inputs = {n: t for n, t in buffers(tuple(placed), placed).items() if isinstance(t, Tensor)}
    for shape, result in zip(shapes, results, strict=True):
        if not isinstance(result, Tensor):
            yield f"{shape.keyword} is a {type(result).__name__}, not a tensor"
        elif shape.keyword in outs:
            if result is not outs[shape.keyword]:
                yield f"{shape.keyword} was given, but another tensor was returned"
        else:
            yield from _fresh_problems(shape, result, inputs, device)


def _fresh_problems(
    shape: OutputShape, result: Tensor, inputs: Mapping[str, Tensor], device: torch.device
) -> Iterator[str]:
    """Yield what is wrong with a result for which no buffer was given."""
    wanted = (torch_dtype(shape.dtype), tuple(shape.shape), device.type)
    found = (result.dtype, tuple(result.shape), result.device.type)
    if found != wanted:
        yield f"without {shape.keyword}=, it is {_kind(*found)}, expected {_kind(*wanted)}"
    for name, tensor in inputs.items():
        if tensor.numel() and result.numel() and _storage(tensor) == _storage(result):
            yield f"without {shape.keyword}=, it shares memory with {name}"


def _kind(dtype: torch.dtype, shape: tuple[int, ...], device: str) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)} on {device}"


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


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
    results = entry(**placed, **_scratch(stage, found, placed), all_scores_out=scores)
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
            if _storage(tensor) == _storage(source):
                yield f"weights[{i}] shares memory with {name}, which was not donated"


def _reader(found: Plan) -> str:
    """Return the full name of the ``moe_experts`` that takes what this implementation prepares."""
    from kimi_hal.dispatch import policy

    backend, tag = found.choice.backend.name, found.implementation.weights_format
    readers = policy.registry(found.settings).get(backend).of(get("moe_experts").name)
    return next((f"{backend}.{i.name}" for i in readers if i.weights_format == tag), "")


SCRIPTS: Mapping[str, Callable[[Stage], Called]] = {
    "indexer_topk": _topk,
    "kda_commit": _commit,
    "kda_verify": _verify,
    "prepare_moe_weights": _prepare,
}
