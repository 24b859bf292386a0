"""Call an implementation as an engine would: operands between canaries, into given buffers or without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kimi_hal.dispatch.contract import Properties
from kimi_hal.dispatch.hookspecs import DeviceHooks
from kimi_hal.dispatch.plan import Plan, plan
from kimi_hal.ops.operator import OutputShape, output_shapes, torch_dtype
from kimi_hal_conformance.apart import apart
from kimi_hal_conformance.forms import FormError, problems, results_of
from kimi_hal_conformance.oracle import Answer, Question, buffers
from kimi_hal_conformance.poison import Room, poison
from kimi_hal_conformance.step import metadata
from kimi_hal_conformance.surroundings import end_copies
from kimi_hal_conformance.trial import PLAIN, Declared


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

    ``answer`` is ``None`` where the results are not of the kind that can be compared. ``declared`` is what the
    plan that answered declares of them, ``promised`` what that of the operator on trial promises. ``held`` are the
    results themselves, where no buffers were given: as long as they are held, their memory is no one else's.
    """

    answer: Answer | None
    problems: tuple[str, ...]
    declared: Declared = PLAIN
    promised: Properties = field(default_factory=Properties)
    held: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Stage:
    """One call in preparation: the question, who answers, in which room, with given buffers or without."""

    question: Question
    subject: Subject
    room: Room
    given: bool


def invoke(stage: Stage, found: Plan, placed: Mapping[str, Any]) -> Called:
    """Call a plan on placed operands; workspace and step hold NaN bytes before."""
    op, room = found.operator, stage.room
    shapes = output_shapes(op, found.spec, found.limits, placed)
    outs = given_buffers(room, found, shapes) if stage.given else {}
    if not (stage.given or room.sparse):
        spoil(shapes, stage.subject.device)
    results = found.run(**placed, **outs, **scratch(stage, found, placed))
    end_copies()
    stage.subject.hooks.synchronize()
    try:
        results = results_of(results, [shape.keyword for shape in shapes])
    except FormError as error:
        return Called(None, (str(error),))
    wrong = tuple(problems(results, shapes, outs, placed, torch.device(stage.subject.device)))
    if wrong:
        return Called(None, wrong)
    named = dict(zip((s.keyword for s in shapes), results, strict=True))
    mutated = {n: stage.room.as_given(t) for n, t in buffers(op.mutated, placed).items()}
    held = {} if stage.given else named
    return Called(Answer(_on_host(named), _on_host(mutated)), (), declared(found), found.properties, held)


def given_buffers(room: Room, found: Plan, shapes: Sequence[OutputShape]) -> dict[str, Tensor]:
    """Return buffers for the outputs, with gaps between rows wherever the contract and the kernel admit them."""
    needs = found.choice.capability.tensors
    return {
        s.keyword: room.output(s.keyword, tuple(s.shape), s.dtype, apart(s, needs.get(s.keyword)))
        for s in shapes
    }


def spoil(shapes: Sequence[OutputShape], device: str) -> None:
    """Leave poison in the memory that an allocator hands out next for results of these shapes.

    An earlier call's right results may be in it: a call that leaves a part of its own unwritten would look right.
    """
    spoilt = [torch.empty(tuple(s.shape), dtype=torch_dtype(s.dtype), device=device) for s in shapes]
    for buffer in spoilt:
        poison(buffer)


def declared(found: Plan) -> Declared:
    """Return what a plan declares of its results."""
    properties = found.properties
    return Declared(found.implementation.numerics, properties.writer_tie, properties.tie_rule)


def scratch(stage: Stage, found: Plan, placed: Mapping[str, Any]) -> dict[str, Tensor]:
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
        stage.room.original("step")  # is every layer's to read
    return made


def _on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
