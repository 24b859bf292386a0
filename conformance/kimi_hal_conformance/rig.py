"""A call that stays where it is: planned and placed once, then made again for other data at the same addresses.

That is how an engine makes every call of a step, and all that a graph can do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kimi_hal.dispatch.plan import Plan
from kimi_hal.ops.operator import output_shapes
from kimi_hal_conformance.arranged import OF_BOTH, Arranged, arrange, named
from kimi_hal_conformance.calls import Called, Stage, Subject, declared
from kimi_hal_conformance.case import Checkpoint
from kimi_hal_conformance.forms import FormError, problems, results_of
from kimi_hal_conformance.oracle import Answer, Question, buffers
from kimi_hal_conformance.poison import FILL, GUARD, LARGE, Room, cover, poison
from kimi_hal_conformance.step import metadata
from kimi_hal_conformance.surroundings import end_copies

#: The output of the test entry of a fused selection.
SCORES = "all_scores_out"


@dataclass(frozen=True)
class OnePlan(Subject):
    """A subject that plans a call once, whatever sizes it has within its Limits."""

    plans: dict[tuple[str, str], Plan] = field(default_factory=dict)

    @classmethod
    def of(cls, subject: Subject) -> OnePlan:
        """Return the same implementation without a plan yet."""
        return cls(subject.implementation, subject.device, subject.hooks)

    def plan(
        self, operator: str, question: Question, implementation: str = "", pair: Plan | None = None
    ) -> Plan:
        """Return the plan of an operator, made at the first call."""
        key = (operator, implementation)
        if key not in self.plans:
            self.plans[key] = super().plan(operator, question, implementation, pair)
        return self.plans[key]


@dataclass(frozen=True)
class Before:
    """What memory of no meaning holds before a call.

    Args:
        scratch: every byte of workspace, step and records; ``None``: what the call before left there.
        outputs: every byte of the outputs, ``FILL``: what no result is; ``None``: what the call before left there.
    """

    scratch: int | None = FILL
    outputs: int | None = FILL

    @property
    def said(self) -> str:
        """Return what stands behind a call's name; nothing where all of it is poison."""
        if self == POISON:
            return ""
        told = {FILL: "poison", 0: "zeros", LARGE: "large numbers", None: "what the call before left"}
        return f", over {told[self.scratch]} in its scratch and {told[self.outputs]} in its outputs"


#: A new buffer's, as a checking allocator hands it out.
POISON = Before()


class Rig:
    """One call with all of its buffers, between canaries.

    Args:
        question: the call; its operands set every shape.
        subject: who answers.
    """

    def __init__(self, question: Question, subject: Subject) -> None:
        self.question, self.subject = question, subject
        self.room = Room(subject.hooks)
        self.ready: Arranged = arrange(Stage(question, subject, self.room, True))
        plan = self.ready.plan
        self.shapes = output_shapes(plan.operator, plan.spec, plan.limits, self.ready.placed)
        self.outs = {s.keyword: self.room.output(s.keyword, tuple(s.shape), s.dtype) for s in self.shapes}
        sizes = {"workspace": plan.workspace_bytes, "step": plan.step_bytes}
        parameters = plan.operator.signature.parameters
        self.scratch = {n: self.room.scratch(n, s) for n, s in sizes.items() if s and n in parameters}
        records = [b for name, b in self.room.buffers.items() if name.partition("[")[0] == "records"]
        self.rooms_own = (*self.scratch.values(), *records)
        self.known = self._known(question) if "step" in self.scratch else {}
        self.wrong: tuple[str, ...] = ()
        self.run = self.launch

    def launch(self) -> None:
        """Make the call, and note what is wrong with the kind of its results."""
        results = self.ready.plan.run(**self.ready.placed, **self.outs, **self.scratch)
        end_copies()
        try:
            results = results_of(results, [shape.keyword for shape in self.shapes])
        except FormError as error:
            self.wrong = (str(error),)
            return
        device = torch.device(self.subject.device)
        self.wrong = tuple(problems(results, self.shapes, self.outs, self.ready.placed, device))

    def fill(self, question: Question, before: Before = POISON) -> None:
        """Put another call's data where this one's is; poison everything else, then lead up to the call.

        Weights stay: they are where they are as long as a model is loaded.
        """
        self._place(question, before)
        if before.scratch is not None:
            for buffer in self.rooms_own:
                buffer.fill_(before.scratch)
        if "step" in self.scratch:
            self.ready.plan.prepare(**self.known, step=self.scratch["step"])
            self.room.original("step")
        self.ready.lead()
        self.subject.hooks.synchronize()

    def answer(self, question: Question, before: Before = POISON) -> Called:
        """Return what comes out for other data, and what was wrong beside the values."""
        self.fill(question, before)
        self.run()
        return self.collected()

    def next_layer(self, question: Question) -> Called | None:
        """Return what the last call's data give on the step that was prepared for it; ``None`` without a step."""
        if "step" not in self.scratch:
            return None
        self._place(question, POISON)
        self.ready.lead()
        self.subject.hooks.synchronize()
        self.run()
        return self.collected()

    def _place(self, question: Question, before: Before) -> None:
        """Put a call's operands, and what its ``prepare`` takes, where they stay, and fill the outputs."""
        for name, value in named(question):
            if not isinstance(value, Checkpoint):
                self.room.refill(name, value)
        for name, value in metadata(question).items():
            if name in self.known:
                self.room.refill(name, value)
        for buffer in self.outs.values():
            if before.outputs == FILL:
                poison(buffer)
            elif before.outputs is not None:
                cover(buffer, before.outputs)

    def collected(self) -> Called:
        """Return what the call has left, on the CPU."""
        self.subject.hooks.synchronize()
        if self.wrong:
            return Called(None, self.wrong)
        outputs = _on_host(self.outs) | self._scores()
        mutated = buffers(self.question.op.mutated, self.ready.placed)
        of_both = OF_BOTH if self.question.op.name == "kda_commit" else ()
        around = tuple(self.room.problems((*self.question.op.mutated, "records", *of_both)))
        return Called(Answer(outputs, _on_host(mutated)), around, declared(self.ready.plan))

    def _scores(self) -> dict[str, Tensor]:
        """Return the scores of a fused selection, to which it is held: those of its test entry, on the same data."""
        entry = getattr(self.ready.plan.run, "return_scores", None)
        if entry is None:
            return {}
        spec: Any = self.question.spec
        placed = self.ready.placed
        shape = (placed["row_len"].shape[0], placed["block_table"].shape[1] * spec.page)
        buffer = poison(self.subject.hooks.empty(shape, spec.score, guard=GUARD))
        entry(**placed, **self.scratch, all_scores_out=buffer)
        self.subject.hooks.synchronize()
        return _on_host({SCORES: buffer})

    def _known(self, question: Question) -> dict[str, Any]:
        placed = self.ready.placed
        return {
            n: placed[n] if n in placed else self.room.operand(n, v) for n, v in metadata(question).items()
        }


def with_operands(question: Question, operands: Mapping[str, Any]) -> Question:
    """Return the same call of other operands."""
    return dataclasses.replace(question, operands=operands)


def _on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies that the next call does not change."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
