"""Plans written down and made again, so that a graph compiled in one process can run in another."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimi_hal.dispatch import policy
from kimi_hal.dispatch.planned import Plan
from kimi_hal.dispatch.planning import Wanted, make
from kimi_hal.dispatch.table import PLANS
from kimi_hal.errors import PlanError
from kimi_hal.ops.operator import get
from kimi_hal.ops.spec import Limits

if TYPE_CHECKING:
    import os

    from kimi_hal.parallel.groups import Group


def dump_plans() -> str:
    """Return the plans of this process as a JSON text for ``load_plans``."""
    return json.dumps([_entry(plan) for plan in PLANS], indent=2)


def load_plans(
    source: str | os.PathLike[str], *, device: Any = None, group: Group | None = None
) -> list[Plan]:
    """Make plans again, each with the implementation that it had, and keep them under their keys.

    Args:
        source: the text of ``dump_plans``, or a file that holds it.
        device: where to make them; ``None``: where they were.
        group: the ranks, for plans that had some.

    Raises:
        PlanError: a plan would get another key, since its implementation's source has changed: what was
            compiled with it must be compiled again.
        SelectionError, PluginError: the implementation does not fit here, or is not installed.
    """
    text = source if isinstance(source, str) and source.lstrip().startswith("[") else Path(source).read_text()
    return [_again(entry, device, group) for entry in json.loads(text)]


def _entry(plan: Plan) -> dict[str, Any]:
    return {
        "operator": plan.operator.name,
        "spec": plan.spec.to_dict(),
        "limits": plan.limits.to_dict(),
        "device": plan.device,
        "implementation": plan.name,
        "grouped": plan.group is not None,
        "pair": plan.pair.key if plan.pair is not None else None,
        "key": plan.key,
    }


def _again(entry: Mapping[str, Any], device: Any, group: Group | None) -> Plan:
    op = get(entry["operator"])
    settings = policy.settings()
    on = str(device or entry["device"])
    wanted = Wanted(
        op=op,
        spec=op.spec_type.from_dict(entry["spec"]),
        limits=Limits.from_dict(entry["limits"]),
        device=on,
        group=group if entry["grouped"] else None,
        implementation=entry["implementation"],
        pair=PLANS.find(entry["pair"], on) if entry["pair"] else None,
        settings=settings,
        registry=policy.registry(settings),
    )
    if entry["grouped"] and group is None:
        raise PlanError(f"the plan of {op.name} has a group: load_plans(…, group=…)")
    made = make(wanted)
    if made.key != entry["key"]:
        raise PlanError(
            f"{made.name} for {op.name} has key {made.key[:12]}, it was {entry['key'][:12]}: its source or "
            f"version, or the rank, is another; compile again what was compiled with it"
        )
    return made
