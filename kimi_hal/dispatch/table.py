"""The plans of this process, by key: what a compiled graph looks up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kimi_hal.errors import PlanError

if TYPE_CHECKING:
    from kimi_hal.dispatch.plan import Plan


class PlanTable:
    """Plans by key, and below it by device: one meaning may be planned on several devices."""

    def __init__(self) -> None:
        self._plans: dict[str, dict[str, Plan]] = {}
        self._lock = threading.Lock()

    def add(self, plan: Plan) -> None:
        """Keep a plan; a later one of the same key and device takes its place."""
        with self._lock:
            self._plans.setdefault(plan.key, {})[plan.device] = plan

    def find(self, key: str, device: str) -> Plan:
        """Return the plan of a key for tensors on a device (``"cuda:1"``).

        Raises:
            PlanError: there is none; says how to make it.
        """
        on = self._plans.get(key, {})
        plan = on.get(device) or on.get(device.partition(":")[0])
        if plan is None:
            raise PlanError(self._missing(key, device, on))
        return plan

    def only(self, key: str) -> Plan | None:
        """Return the plan of a key if there is just one; it checks itself where its operands are."""
        on = self._plans.get(key)
        return next(iter(on.values())) if on is not None and len(on) == 1 else None

    def any(self, key: str) -> Plan | None:
        """Return a plan of a key on whatever device, or ``None``: for shapes."""
        return next(iter(self._plans.get(key, {}).values()), None)

    def clear(self) -> None:
        """Forget all plans: for tests."""
        with self._lock:
            self._plans.clear()

    def __iter__(self) -> Iterator[Plan]:
        with self._lock:
            return iter([plan for on in self._plans.values() for plan in on.values()])

    def __len__(self) -> int:
        return sum(len(on) for on in self._plans.values())

    @staticmethod
    def _missing(key: str, device: str, on: dict[str, Plan]) -> str:
        if on:
            return f"plan {key[:12]} is for {' and '.join(sorted(on))}, the operands are on {device}"
        return (
            f"no plan {key[:12]} in this process: a graph compiled elsewhere needs the same hal.plan(…) calls, "
            f"or hal.load_plans(hal.dump_plans() of that process), before it runs"
        )


PLANS = PlanTable()
