"""An output in the memory of an input, where the operator lets the two share it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from kimi_hal.ops.operator import Out
from kimi_hal_conformance.arranged import arrange
from kimi_hal_conformance.calls import Called, Stage, invoke
from kimi_hal_conformance.judging import objections
from kimi_hal_conformance.poison import Room, same_bits

if TYPE_CHECKING:
    from kimi_hal_conformance.relations.ground import Ground


class SharedRoom(Room):
    """A room in which one output is the first part of an operand, and still holds its values."""

    shared: Out

    def output(
        self, name: str, shape: tuple[int, ...], dtype: str, strides: tuple[int, ...] | None = None
    ) -> Tensor:
        """Return the operand's first part, or a buffer of the output's own."""
        if name == self.shared.keyword:
            return self.buffers[self.shared.alias][0]
        return super().output(name, shape, dtype, strides)


def sharing(ground: Ground) -> list[Out]:
    """Return the outputs that may share memory with an operand."""
    return [out for out in ground.question.op.outs if out.alias]


def in_place(ground: Ground) -> Iterator[str]:
    """Let an output stand in the part that it may share memory with: nothing of it may be lost on the way."""
    for out in sharing(ground):
        room = SharedRoom(ground.subject.hooks)
        room.shared = out
        how = f"{out.keyword} in {out.alias}[0]"
        yield from (f"{how}: {problem}" for problem in objections(ground.question, called(ground, room)))
        rest = room.buffers[out.alias][1:].cpu()
        if not same_bits(rest.contiguous(), room.originals[out.alias][1:].contiguous()):
            yield f"{how}: another part was modified"


def called(ground: Ground, room: SharedRoom) -> Called:
    """Make the case's own call in a room."""
    stage = Stage(ground.question, ground.subject, room, given=True)
    ready = arrange(stage)
    found = invoke(stage, ready.plan, ready.placed)
    around = room.problems((*ground.question.op.mutated, room.shared.alias))
    return dataclasses.replace(found, problems=(*found.problems, *around))
