"""What a plan says about itself: lines for a person, or JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kimi_hal.dispatch.explain import Explanation

if TYPE_CHECKING:
    from kimi_hal.dispatch.planned import Plan


def strings(value: Any) -> Iterator[str]:
    """Yield every string inside JSON-ready values."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from strings(inner)


def explanation(plan: Plan) -> Explanation:
    """Return who was chosen and why not the others."""
    return Explanation(
        operator=plan.operator.name,
        spec=plan.spec.to_dict(),
        device=plan.device,
        chosen=plan.name,
        execution=plan.execution,
        why=plan.choice.why,
        candidates=plan.choice.candidates,
        failures=plan.failures,
        built=True,
    )


def never_run(plan: Plan) -> str:
    """Return why an implementation was never run, or which parts of a composition were not; else nothing."""
    of_parts = {f"{name} by {part.name}": never_run(part) for name, part in plan.built.context.parts.items()}
    told = "; ".join(f"{part}: {reason}" for part, reason in of_parts.items() if reason)
    return plan.implementation.not_run or told


def as_json(plan: Plan) -> str:
    """Return every field of the plan as a JSON text."""
    fields = {
        **explanation(plan).to_dict(),
        "limits": plan.limits.to_dict(),
        "key": plan.key,
        "version": plan.version,
        "source_hash": plan.source_hash,
        "properties": dataclasses.asdict(plan.properties),
        "numerics": list(plan.implementation.numerics),
        "conforming": plan.choice.conforming,
        "not_run": never_run(plan),
        "bytes": dataclasses.asdict(plan.sizes),
        "reads": list(plan.reads),
        "checkpoint_multiple": plan.checkpoint_multiple,
        "rank": [plan.group.rank(), plan.group.size()] if plan.group is not None else None,
        "check": plan.settings.check,
        "unshadowed": plan.unshadowed,
        "parts": {name: part.name for name, part in plan.built.context.parts.items()},
    }
    return json.dumps(fields, indent=2)


def as_text(plan: Plan) -> str:
    """Return lines for a person."""
    return "\n".join([str(explanation(plan)), *(f"  {line}" for line in _lines(plan))])


def _lines(plan: Plan) -> Iterator[str]:
    for name, part in plan.built.context.parts.items():
        yield f"{name}: {part.name}, {part.choice.why}"
    yield f"runs {plan.execution}, {', '.join(_promises(plan))}"
    sizes = {name: size for name, size in dataclasses.asdict(plan.sizes).items() if size}
    yield "bytes: " + (", ".join(f"{name} {size:,}" for name, size in sizes.items()) or "none")
    if plan.reads:
        yield f"reads {', '.join(plan.reads)}"
    if plan.checkpoint_multiple > 1:
        yield f"checkpoints at multiples of {plan.checkpoint_multiple} rows"
    if plan.settings.check != "off":
        how = f"KIMI_HAL_CHECK={plan.settings.variables()['KIMI_HAL_CHECK']}"
        yield f"{how}, not compared: {plan.unshadowed}" if plan.unshadowed else how
    yield f"version {plan.version}, source {plan.source_hash[:12]}, key {plan.key[:12]}"


def _promises(plan: Plan) -> Iterator[str]:
    properties = plan.properties
    yield f"capture {properties.capture}"
    if properties.deterministic:
        yield "deterministic"
    if properties.batch_invariant:
        named = f" ({properties.numerics_id})" if properties.numerics_id else ""
        yield f"batch-invariant{named}"
    if plan.implementation.numerics:
        yield f"rounds {', '.join(plan.implementation.numerics)}"
    if not plan.choice.conforming:
        yield "not conforming: its tie rule is not the contract's"
    if reason := never_run(plan):
        yield f"not run: {reason}"
