"""What a plan has to do with the ranks of its group: is it the right group, and do all ranks plan alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kimi_hal.errors import GroupError, PlanError
from kimi_hal.ops.operator import Operator
from kimi_hal.ops.spec import DCP, Record, Spec

if TYPE_CHECKING:
    from kimi_hal.parallel.groups import Group


def require(op: Operator, spec: Spec, group: Group | None) -> None:
    """Compare the group with what the Spec says of ranks.

    Raises:
        PlanError: an operator that communicates has no group; or the group has another size, or is on
            another rank, than the Spec says.
    """
    if group is None:
        world = spec.meets()
        if world is None:
            world = max([dcp.world for dcp in dcps(spec)] + [getattr(spec, "tp", 1)])
        if op.grouped and world > 1:
            raise PlanError(
                f"{op.name} over {world} ranks needs a group: "
                f"hal.plan({op.name!r}, …, group=hal.parallel.TorchGroup(process_group))"
            )
        return
    here = f"the group is rank {group.rank()} of {group.size()}"
    for dcp in dcps(spec):
        if (dcp.world, dcp.rank) != (group.size(), group.rank()):
            raise PlanError(f"{op.name}: dcp says rank {dcp.rank} of {dcp.world}, {here}")
    tp = getattr(spec, "tp", group.size())
    if tp != group.size():
        raise PlanError(f"{op.name}: the Spec says tp={tp}, {here}")


def dcps(spec: Record) -> Iterator[DCP]:
    """Yield every DCP in a Spec, also in the Specs inside it."""
    for field in dataclasses.fields(spec):
        value: Any = getattr(spec, field.name)
        if isinstance(value, DCP):
            yield value
        elif isinstance(value, Record):
            yield from dcps(value)


def agree(group: Group | None, text: str) -> None:
    """Compare, once, what each rank has planned; a difference is an error on all ranks.

    Raises:
        GroupError: names the ranks of each text.
    """
    if group is not None:
        from kimi_hal.parallel import groups

        groups.agree(group, text)


def fail(group: Group | None, operator: str, error: BaseException) -> None:
    """Tell the other ranks that this one cannot plan, so that they do not wait for it.

    A GroupError came from meeting them: they know. So they do of an error that a part of a composite was
    planned with: a second meeting would find nobody there.
    """
    if group is None or isinstance(error, GroupError) or getattr(error, "told", False):
        return
    error.told = True  # type: ignore[attr-defined]
    try:
        agree(group, f"no plan for {operator}: {type(error).__name__}: {error}")
    except GroupError as disagreement:
        error.add_note(str(disagreement))
