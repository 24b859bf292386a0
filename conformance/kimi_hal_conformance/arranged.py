"""One call made ready: its plan and its operands where they will stay, with the calls that must come before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kimi_hal.dispatch.plan import Plan
from kimi_hal.ops.operator import OutputShape
from kimi_hal_conformance.apart import apart, spread
from kimi_hal_conformance.calls import Stage
from kimi_hal_conformance.case import Checkpoint
from kimi_hal_conformance.oracle import OF_COMMIT, Question, layers
from kimi_hal_conformance.poison import FILL
from kimi_hal_conformance.sparse import CannotTryError

#: The operands of ``kda_verify`` that ``kda_commit`` changes.
OF_BOTH = ("conv_state", "state")


@dataclass(frozen=True)
class Arranged:
    """A call that is ready to be made, again and again.

    Args:
        plan: whose.
        placed: its operands, in the room.
        before: plans and operands of the calls that fill what it reads.
    """

    plan: Plan
    placed: Mapping[str, Any]
    before: tuple[tuple[Plan, Mapping[str, Any]], ...] = ()

    def lead(self) -> None:
        """Make the calls before it."""
        for plan, placed in self.before:
            plan.run(**placed)


def arrange(stage: Stage) -> Arranged:
    """Plan a call and place its operands; nothing has run yet."""
    return ARRANGERS.get(stage.question.op.name, _plain)(stage)


def named(question: Question) -> Iterator[tuple[str, Any]]:
    """Yield each operand by the name that it has in its room."""
    if question.op.name != "kda_commit":
        yield from question.operands.items()
        return
    for number, own in enumerate(layers(question.operands)):
        yield from ((f"{name}[{number}]", value) for name, value in own.items())
    yield from ((n, v) for n, v in question.operands.items() if n in OF_COMMIT and n != "more")


def _plain(stage: Stage) -> Arranged:
    """Place the operands under their own names."""
    question = stage.question
    found = stage.subject.plan(question.op.name, question)
    _can_store(found, question.operands)
    placed = {name: _put(stage, found, name, _own(found, value)) for name, value in question.operands.items()}
    return Arranged(found, placed)


def _can_store(found: Plan, operands: Mapping[str, Any]) -> None:
    """Refuse to try a call whose checkpoints are not where the plan says that it can store them.

    Raises:
        CannotTryError: an offset is no multiple of the plan's.
    """
    if operands.get("checkpoint_offsets") is None:
        return
    offsets, stored = operands["checkpoint_offsets"], operands["checkpoint_ids"] >= 0
    between = offsets[stored & (offsets % found.checkpoint_multiple != 0)].tolist()
    if between:
        raise CannotTryError(
            f"it stores states after {', '.join(map(str, between))} rows; the plan can only at multiples of "
            f"{found.checkpoint_multiple}"
        )


def _put(stage: Stage, found: Plan, name: str, value: Any, label: str = "") -> Any:
    """Place an operand; for given buffers with the strides that it may have, else with those of the case.

    Args:
        stage: the call.
        found: the plan that will read it.
        name: of the operand in that plan's operator.
        value: the operand.
        label: its name in the room, where that is another.
    """
    label = label or name
    if stage.given and label not in stage.room.sparse:
        value = spread(found.operator.args.get(name), found.choice.capability.tensors.get(name), value)
    return stage.room.operand(label, value)


def _own(found: Plan, value: Any) -> Any:
    """Return what the implementation makes of a checkpoint, whose tensors are its own, on the plan's device."""
    if not isinstance(value, Checkpoint):
        return value
    return list(found.weights(**{name: tensor.to(found.device, copy=True) for name, tensor in value.items()}))


def _verify(stage: Stage) -> Arranged:
    """Add a records buffer of the plan's own size."""
    found = _plain(stage)
    return Arranged(found.plan, {**found.placed, "records": _records(stage, found.plan)})


def _records(stage: Stage, verify: Plan, name: str = "records") -> Tensor:
    """Return a records buffer full of NaN bytes; for given buffers with gaps between its rows."""
    shape = OutputShape("records", (stage.question.limits.max_reqs, verify.records_bytes), "uint8")
    strides = apart(shape, verify.choice.capability.tensors.get("records")) if stage.given else None
    return stage.room.output(name, tuple(shape.shape), shape.dtype, strides).fill_(FILL)


def _commit(stage: Stage) -> Arranged:
    """Put the ``kda_verify`` of every layer before the ``kda_commit`` of what was accepted in all of them."""
    question = stage.question
    verify = stage.subject.plan("kda_verify", question)
    verified = [_verify_layer(stage, verify, i, own) for i, own in enumerate(layers(question.operands))]
    names = {"conv_states": "conv_state", "states": "state", "records": "records"}
    lists: dict[str, Any] = {many: [own[one] for own in verified] for many, one in names.items()}
    for many, one in (("A_logs", "A_log"), ("dt_biases", "dt_bias")):
        lists[many] = None if verified[0][one] is None else [own[one] for own in verified]
    commit = stage.subject.plan("kda_commit", question, pair=verify)
    given = question.operands
    rest = {n: _put(stage, commit, n, v) for n, v in given.items() if n in OF_COMMIT and n != "more"}
    placed = lists | {"state_ids": verified[0]["state_ids"]} | rest
    return Arranged(commit, placed, tuple((verify, own) for own in verified))


def _verify_layer(stage: Stage, verify: Plan, number: int, operands: Mapping[str, Any]) -> dict[str, Any]:
    """Return the placed operands of one layer's ``kda_verify``, records among them."""
    placed = {name: _put(stage, verify, name, value, f"{name}[{number}]") for name, value in operands.items()}
    return placed | {"records": _records(stage, verify, f"records[{number}]")}


ARRANGERS: Mapping[str, Callable[[Stage], Arranged]] = {"kda_commit": _commit, "kda_verify": _verify}
