"""Planning: everything about an operator that can be decided before anything runs, decided once.

``plan(…)`` costs milliseconds and happens when a model is loaded. ``Plan.run`` is the function that the
implementation's builder returned, with nothing in between.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kimi_hal.dispatch import policy, ranks, torch_ops
from kimi_hal.dispatch.inventory import dump_plans, load_plans
from kimi_hal.dispatch.planned import Plan
from kimi_hal.dispatch.planning import UNLIMITED, Wanted, make
from kimi_hal.errors import PlanError
from kimi_hal.ops.operator import Operator, get
from kimi_hal.ops.spec import Limits, Spec

if TYPE_CHECKING:
    from kimi_hal.parallel.groups import Group

__all__ = ["UNLIMITED", "Plan", "dump_plans", "load_plans", "plan", "plan_part"]

torch_ops.register()


def plan(
    op: str | Operator,
    spec: Spec,
    limits: Limits | None = None,
    *,
    device: Any,
    group: Group | None = None,
    implementation: str | None = None,
    pair: Plan | None = None,
) -> Plan:
    """Choose and build an implementation of an operator for one Spec.

    Args:
        op: its name.
        spec: its meaning.
        limits: the sizes it must serve; ``None``: ``UNLIMITED``, for which an implementation with limits is
            not taken, and a workspace can be very large.
        device: a torch device.
        group: the ranks, for an operator that communicates; they compare what each has chosen, once.
        implementation: ``backend.name`` to take, or an error with the reasons.
        pair: for ``kda_commit``: the plan of the ``kda_verify`` whose records it reads.

    Raises:
        UnknownNameError: no such operator, backend or implementation; the nearest is named.
        SpecError: the Spec is another operator's.
        SelectionError: nothing fits; every candidate's reasons.
        PlanError: an argument of another kind, a device that torch does not know; group or pair do not go
            with the Spec.
        PluginError: the chosen implementation cannot be built.
        GroupError: on all ranks, if they have chosen differently or one of them cannot plan.
        SettingsError, FrozenError: the environment.
    """
    try:
        problems = list(_problems(op, limits, device, group, implementation, pair))
        if problems:
            raise PlanError(f"hal.plan: {'; '.join(problems)}")
        settings = policy.settings()
        wanted = Wanted(
            op=op if isinstance(op, Operator) else get(op),
            spec=spec,
            limits=UNLIMITED if limits is None else limits,
            device=str(device),
            group=group,
            implementation=implementation,
            pair=pair,
            settings=settings,
            registry=policy.registry(settings),
        )
    except Exception as error:
        if _is_group(group):
            ranks.fail(group, str(getattr(op, "name", op)), error)
        raise
    return make(wanted)


def _problems(op: Any, limits: Any, device: Any, group: Any, implementation: Any, pair: Any) -> Iterator[str]:
    """Yield each argument that is of another kind than ``plan`` takes, before any rank is asked."""
    if not isinstance(op, str | Operator):
        yield f"op must be an operator's name, got {type(op).__name__} {op!r}"
    if not isinstance(limits, Limits | None):
        yield f"limits must be Limits(max_rows=…, max_reqs=…) or None, got {type(limits).__name__} {limits!r}"
    if not isinstance(implementation, str | None):
        yield f"implementation must be text, backend.implementation, got {type(implementation).__name__}"
    if group is not None and not _is_group(group):
        yield f"group must be hal.parallel.TorchGroup(process_group) or another Group, got {type(group).__name__}"
    if not isinstance(pair, Plan | None):
        yield f"pair must be a plan, got {type(pair).__name__} {pair!r}"
    yield from _device_problems(device)


def _device_problems(device: Any) -> Iterator[str]:
    """Yield why torch can put no tensor there: it knows no such kind of device."""
    import torch

    try:
        torch.device(str(device))
    except RuntimeError as error:
        said = str(error).partition("\n")[0]
        yield f"device={device!r} is none that this torch knows: {said}"


def _is_group(group: Any) -> bool:
    return all(callable(getattr(group, name, None)) for name in ("size", "rank", "all_gather"))


def plan_part(
    backend: str, op: str | Operator, spec: Spec, limits: Limits, *, device: Any, group: Group | None = None
) -> Plan:
    """Plan a part of a composite among one backend's implementations; ``KIMI_HAL_OPS`` still decides first."""
    settings = policy.settings()
    return make(
        Wanted(
            op=op if isinstance(op, Operator) else get(op),
            spec=spec,
            limits=limits,
            device=str(device),
            group=group,
            implementation=None,
            pair=None,
            settings=dataclasses.replace(settings, backend=backend),
            registry=policy.registry(settings),
        )
    )
