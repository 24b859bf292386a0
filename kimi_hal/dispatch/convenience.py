"""``hal.ops.sparse_mla(tensors…, num_heads=12, latent="…")``: Spec fields by name, plans made once and kept.

For notebooks and tests: it reads the environment, allocates workspace and grows its plan's Limits when a
call is larger than those before it. An engine plans at load and calls ``Plan.run``.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

from kimi_hal.dispatch import policy, signatures
from kimi_hal.dispatch.capture import tensors_of
from kimi_hal.dispatch.planned import Plan
from kimi_hal.dispatch.scalars import field_argument
from kimi_hal.errors import ContractError, SpecError, unknown
from kimi_hal.ops import check
from kimi_hal.ops.operator import Operator, bind_dims, output_shapes, torch_dtype
from kimi_hal.ops.spec import Limits, Spec
from kimi_hal.settings import Settings

#: Speculated rows of a request, at most: 7 drafts and the token before them.
ROWS_PER_REQ = 8

_KEPT: dict[tuple[str, Spec, str, Settings], Plan] = {}


def call(op: Operator, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """Run an operator on tensors, its Spec given by fields.

    Raises:
        UnknownNameError: a keyword that is neither an operand nor a field; the nearest is named.
        SpecError: a field is missing or wrong.
        ContractError: operands that break the contract.
    """
    fields = {field_argument(op, f.name): f.name for f in dataclasses.fields(op.spec_type)}
    operands = {n: v for n, v in keywords.items() if n in op.signature.parameters}
    given = {n: v for n, v in keywords.items() if n not in operands}
    for name in given:
        if name not in fields:
            raise unknown(f"argument of {op.name}", name, [*op.signature.parameters, *fields])
    return run(op, _spec(op, {fields[n]: v for n, v in given.items()}), args, operands)


def _spec(op: Operator, fields: dict[str, Any]) -> Spec:
    required = [f.name for f in dataclasses.fields(op.spec_type) if f.default is dataclasses.MISSING]
    missing = [field_argument(op, name) for name in required if name not in fields]
    if missing:
        raise SpecError(
            f"{op.name} needs {', '.join(missing)} by name; {op.spec_type.__name__} has no default"
        )
    return op.spec_type(**fields)


def run(op: Operator, spec: Spec, args: tuple[Any, ...], operands: Mapping[str, Any]) -> Any:
    """Run an operator under a Spec with a kept plan."""
    given = signatures.bound(op, args, operands)
    if next(tensors_of(given.values()), None) is None:
        raise ContractError(op.name, ["it has no tensor among its arguments"])
    reasons = check.problems(op, spec, given)  # before sizes are read off what may be no tensor
    if reasons:
        raise ContractError(op.name, reasons)
    plan = kept(op, spec, given)
    _buffers(op, plan, given)
    return signatures.apply(op, plan.run, given)


def kept(op: Operator, spec: Spec, given: Mapping[str, Any]) -> Plan:
    """Return the plan of these operands' device, made anew when the call is larger than its Limits."""
    from kimi_hal.dispatch.plan import plan

    tensor = next(tensors_of(given.values()))
    where = (op.name, spec, str(tensor.device), policy.settings())
    found = _KEPT.get(where)
    needed = _limits(op, spec, given, found.limits if found else None)
    if found is None or found.limits != needed:
        found = _KEPT[where] = plan(op, spec, needed, device=tensor.device)
    return found


def _limits(op: Operator, spec: Spec, given: Mapping[str, Any], before: Limits | None) -> Limits:
    bound = bind_dims(op, spec, given).bound
    rows = max(bound.get("T", 0), before.max_rows if before else 1)
    reqs = max(bound.get("N", 0), bound.get("R", 0), before.max_reqs if before else 1)
    rows, reqs = _power(rows), _power(reqs)
    return Limits(max_rows=rows, max_reqs=reqs, rows_per_req=ROWS_PER_REQ, uniform=False)


def _power(size: int) -> int:
    """Return the next power of two, so that a growing call plans anew only so often."""
    return 1 << max(0, int(size) - 1).bit_length()


def _buffers(op: Operator, plan: Plan, given: dict[str, Any]) -> None:
    """Allocate what a caller of ``Plan.run`` would bring along."""
    if plan.workspace_bytes and given.get("workspace", plan) is None:
        given["workspace"] = plan.new_workspace()
    if plan.step_bytes and given.get("step", plan) is None:
        given["step"] = _step(plan, given)
    if op.sizes is not None and op.outs:  # a width that Limits would decide is what the operands need
        device = next(tensors_of(given.values())).device
        for shape in output_shapes(op, plan.spec, None, given):
            if given[shape.keyword] is None:
                given[shape.keyword] = _fresh(shape.shape, shape.dtype, device)


def _step(plan: Plan, given: Mapping[str, Any]) -> Any | None:
    """Prepare a step from this call's own operands, where they are all that ``prepare`` needs."""
    wanted = inspect.signature(plan.prepare).parameters
    needed = [n for n, p in wanted.items() if p.default is p.empty and n != "step"]
    if any(given.get(name) is None for name in needed):
        return None
    step = plan.new_step()
    plan.prepare(**{name: given[name] for name in wanted if name in given and name != "step"}, step=step)
    return step


def _fresh(shape: tuple[Any, ...], dtype: str, device: Any) -> Any:
    """Return a buffer for an output; scores that nobody writes are −inf, as behind a row's keys."""
    import torch

    kind = torch_dtype(dtype)
    fresh = torch.empty(shape, dtype=kind, device=device)
    return fresh.fill_(-torch.inf) if kind in (torch.float32, torch.bfloat16) else fresh


def forget() -> None:
    """Forget the kept plans: for tests."""
    _KEPT.clear()
