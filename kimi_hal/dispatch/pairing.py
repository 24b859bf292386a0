"""Records between two operators: only the commit that knows a verify's layout may read what that one wrote.

An implementation names its layout by ``Implementation.records``. A commit is planned with ``pair=`` the
verify's plan. Without it, the verify plans of this process with the same Spec, rows a request and device
stand for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kimi_hal.dispatch.loader import Registry, candidates, find
from kimi_hal.errors import PlanError
from kimi_hal.ops.operator import Operator
from kimi_hal.ops.spec import Limits, Spec

if TYPE_CHECKING:
    from kimi_hal.dispatch.plan import Plan

#: Operator that reads records -> operator that writes them.
WRITER = {"kda_commit": "kda_verify"}

#: Spec fields in which a verify and its commit may differ: neither reads them in both.
FREE = frozenset({"num_layers", "checkpoints", "norm_eps", "numerics"})


def writer(
    op: Operator, spec: Spec, limits: Limits, device: str, pair: Plan | None, plans: Iterable[Plan]
) -> Plan | None:
    """Return the plan whose records this one will read, or ``None`` where nothing says.

    Raises:
        PlanError: a pair for an operator that reads no records, of another operator or Spec; or without a
            pair, several verify plans with different layouts.
    """
    wanted = WRITER.get(op.name)
    if wanted is None:
        if pair is not None:
            readers = ", ".join(sorted(WRITER))
            raise PlanError(f"pair= is for what reads another plan's records ({readers}), not {op.name}")
        return None
    if pair is None:
        return _implied(op, spec, limits, device, wanted, plans)
    if pair.operator.name != wanted:
        raise PlanError(f"the pair of {op.name} is a plan of {wanted}, got one of {pair.operator.name}")
    differing = sorted(n for n, value in _fields(spec).items() if _fields(pair.spec)[n] != value)
    if differing:
        listed = ", ".join(f"{n} {_fields(spec)[n]!r} and {_fields(pair.spec)[n]!r}" for n in differing)
        raise PlanError(f"{op.name} and its pair must have one Spec; they differ in {listed}")
    return pair


def _implied(
    op: Operator, spec: Spec, limits: Limits, device: str, wanted: str, plans: Iterable[Plan]
) -> Plan | None:
    """Return a plan of this process whose records have the same meaning and length."""
    same = [
        p
        for p in plans
        if (p.operator.name, p.device, p.limits.rows_per_req) == (wanted, device, limits.rows_per_req)
        and _fields(p.spec) == _fields(spec)
    ]
    layouts = {p.implementation.records for p in same}
    if len(layouts) > 1:
        names = " and ".join(sorted({p.name for p in same}))
        raise PlanError(
            f"{op.name} could read the records of {names}: say which, pair=<the plan of {wanted}>"
        )
    return same[-1] if same else None


def reader(op: Operator, source: Plan, registry: Registry, named: str | None) -> str:
    """Return the full name of an implementation that reads what ``source`` writes.

    Args:
        op: the operator that reads.
        source: the plan that writes.
        registry: the loaded backends.
        named: what the caller or ``KIMI_HAL_OPS`` asks for, or ``None``.

    Raises:
        PlanError: what is asked for reads another layout, or the writer's backend has nothing that reads it but
            what was never run, which is to be named.
    """
    tag = source.implementation.records
    if named is not None:
        _, implementation = find(registry, op.name, named)
        if implementation.records != tag:
            raise PlanError(
                f"{named} reads records {implementation.records!r}, its pair {source.name} writes {tag!r}"
            )
        return named
    backend = source.name.partition(".")[0]
    readers = [i for i in candidates(registry.get(backend), op.name) if i.records == tag]
    if not readers:
        raise PlanError(f"{backend} has no {op.name} that reads {tag!r}, which {source.name} writes")
    run = [i.name for i in readers if not i.not_run]
    if not run:
        full_name, why = f"{backend}.{readers[0].name}", readers[0].not_run
        raise PlanError(
            f"{full_name} reads {tag!r}, which {source.name} writes, but it was not run: {why}; "
            f"name it: KIMI_HAL_OPS={op.name}={full_name}"
        )
    return f"{backend}.{run[0]}"


def check_sizes(op: Operator, source: Plan, records_bytes: int) -> None:
    """Refuse a reader whose records have another length: it was planned for other rows a request.

    Raises:
        PlanError: names both.
    """
    if source.records_bytes != records_bytes:
        raise PlanError(
            f"{op.name} reads records of {records_bytes} bytes, its pair {source.name} writes "
            f"{source.records_bytes}: plan both with the same Limits.rows_per_req"
        )


def _fields(spec: Spec) -> dict[str, object]:
    return {name: value for name, value in spec.to_dict().items() if name not in FREE}
