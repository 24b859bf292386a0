"""Calls of an implementation at several sizes of one plan, made of the suite's cases, for compilers and graphs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

import kimi_hal as hal
from kimi_hal import ops
from kimi_hal.dispatch.plan import Plan
from kimi_hal.errors import SelectionError
from kimi_hal.ops.operator import output_shapes, torch_dtype
from kimi_hal_conformance.case import CASES, QUICK, Case, drawn
from kimi_hal_conformance.cases import load
from kimi_hal_conformance.relations.variants import taken, total

#: Rows of the calls, in order.
ROWS = (7, 2, 5, 7, 3)


def fitting(operator: str, implementation: str, device: str) -> tuple[Case, Plan]:
    """Return the first case of an operator that has enough rows and that an implementation takes, and its plan."""
    load()
    for case in CASES.values():
        if case.operator != operator or case.ranks or case.sparse or not case.runs_in(QUICK):
            continue
        if total(operator, drawn(case, 0)) < max(ROWS):
            continue
        try:
            return case, hal.plan(
                operator, case.spec, case.limits, device=device, implementation=implementation
            )
        except SelectionError:
            continue
    raise AssertionError(f"{implementation} takes no case of {operator} of {max(ROWS)} rows")


def calls(case: Case, device: str) -> Iterator[dict[str, Any]]:
    """Yield fresh operands of each size on a device; what rows do not have a part of is as it is in the case."""
    for rows in ROWS:
        some = taken(case.operator, drawn(case, 0), range(rows))
        yield {name: placed(value, device) for name, value in some.items()}


def placed(value: Any, device: str) -> Any:
    """Return a contiguous copy of an operand on a device."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.clone(memory_format=torch.contiguous_format).to(device)


def poisoned(plan: Plan, operands: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return output buffers that hold what no result is."""
    shapes = output_shapes(ops.get(plan.operator.name), plan.spec, plan.limits, operands)
    made = {
        s.keyword: torch.empty(tuple(s.shape), dtype=torch_dtype(s.dtype), device=plan.device) for s in shapes
    }
    for buffer in made.values():
        if buffer.numel():
            buffer.view(torch.uint8).fill_(0x7F)
    return made


def scratch(plan: Plan) -> dict[str, torch.Tensor]:
    """Return a workspace, where the plan has one."""
    return {"workspace": plan.new_workspace()} if plan.workspace_bytes else {}


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Tell whether tensors have the same bits, name by name."""
    pairs = [(one[n], other[n]) for n in one if isinstance(one[n], torch.Tensor) and one[n].numel()]
    return all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) for a, b in pairs
    )
