"""Plans written down and made again, so that a graph compiled in one process can run in another."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
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


#: Fields of an entry and what JSON holds them as.
FIELDS: dict[str, tuple[type, ...]] = {
    "operator": (str,),
    "spec": (dict,),
    "limits": (dict,),
    "device": (str,),
    "implementation": (str,),
    "grouped": (bool,),
    "pair": (str, type(None)),
    "key": (str,),
}


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
        PlanError: the file cannot be read, or this is not what ``dump_plans`` returns; or a plan would get
            another key, since its implementation's source has changed: what was compiled with it must be
            compiled again.
        SelectionError, PluginError: the implementation does not fit here, or is not installed.
    """
    return [_again(entry, device, group) for entry in _entries(source)]


def _entries(source: Any) -> list[dict[str, Any]]:
    """Return the entries of a text or file, each with its fields."""
    text = source if isinstance(source, str) and source.lstrip().startswith("[") else _text(source)
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"load_plans: not the text of dump_plans: {error}") from error
    if not isinstance(entries, list):
        raise PlanError(
            f"load_plans: not the text of dump_plans: a list of plans, got {type(entries).__name__}"
        )
    for i, entry in enumerate(entries):
        problems = list(_field_problems(entry))
        if problems:
            raise PlanError(f"load_plans: entry {i} is not one of dump_plans: {'; '.join(problems)}")
    return entries


def _text(source: Any) -> str:
    try:
        return Path(source).read_text(encoding="utf-8")
    except (OSError, ValueError, TypeError) as error:
        said = getattr(error, "strerror", None) or error
        shown = repr(source) if len(repr(source)) < 100 else f"{repr(source)[:96]}…"
        raise PlanError(
            f"load_plans: {shown} is neither the text of dump_plans nor its file: {said}"
        ) from error


def _field_problems(entry: Any) -> Iterator[str]:
    if not isinstance(entry, dict):
        yield f"an object of fields, got {type(entry).__name__}"
        return
    for name, kinds in FIELDS.items():
        if name not in entry:
            yield f"{name} is missing"
        elif not isinstance(entry[name], kinds):
            yield f"{name} is {entry[name]!r}"


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
