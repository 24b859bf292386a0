"""Run one call through its plan, time it, and compare it with the float64 oracle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kimi_hal.dispatch.hookspecs import DeviceHooks
from kimi_hal.dispatch.plan import Plan, plan
from kimi_hal.ops.operator import Operator, get
from kimi_hal.reference.backend import function
from kimi_hal.step.call import Call, Steps


@dataclass(frozen=True)
class Row:
    """What one call did.

    Args:
        operator: its name.
        implementation: full name of what ran.
        execution: how it ran.
        seconds: device time of one call.
        bytes: useful bytes.
        error: relative error against the oracle, ``‖got − exact‖ / ‖exact‖``, the worst over outputs and
            states; for discrete results the share of entries that differ.
        discrete: every result is discrete.
    """

    operator: str
    implementation: str
    execution: str
    seconds: float
    bytes: int
    error: float
    discrete: bool


def run(steps: Steps, device: str, hooks: DeviceHooks) -> Iterator[Row]:
    """Run a layer's calls in order, each with the results of those before it."""
    results: Any = None
    while True:
        try:
            call = steps.send(results)
        except StopIteration:
            return
        row, results = measure(call, device, hooks)
        yield row


def measure(call: Call, device: str, hooks: DeviceHooks) -> tuple[Row, tuple[Any, ...]]:
    """Run one call once and time it; the oracle computes on copies made before."""
    op = get(call.operator)
    found = plan(call.operator, call.spec, call.limits, device=device)
    operands = dict(call.operands)
    before = {name: _copy(value) for name, value in operands.items()}
    if isinstance(operands.get("weights"), Mapping):
        operands["weights"] = list(found.weights(**operands["weights"]))
    results, seconds = timed(found, op, operands, hooks)
    error, discrete = compare(op, call, before, operands, results)
    row = Row(call.operator, found.name, found.execution, seconds, call.bytes(results), error, discrete)
    return row, results


def timed(
    found: Plan, op: Operator, operands: Mapping[str, Any], hooks: DeviceHooks
) -> tuple[tuple[Any, ...], float]:
    """Return the results of one call and its device seconds.

    A call that only reads runs once before, so that compilation is not timed; one that advances a state or a
    cache runs once alone.
    """
    extra = scratch(found, op, operands)
    kept: list[Any] = []
    if not op.mutated:
        found.run(**operands, **extra)
    seconds = hooks.time(lambda: kept.append(found.run(**operands, **extra)))
    return op.results(kept[-1]), seconds


def scratch(found: Plan, op: Operator, operands: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the workspace and the filled step buffer that the plan asks for."""
    extra = {}
    if found.workspace_bytes and "workspace" in op.signature.parameters:
        extra["workspace"] = found.new_workspace()
    if found.step_bytes and "step" in op.signature.parameters:
        extra["step"] = found.new_step()
        names = ("row_req", "row_len", "block_table", "cu_seqlens", "state_ids")
        found.prepare(**{n: operands[n] for n in names if n in operands}, step=extra["step"])
    return extra


def compare(
    op: Operator, call: Call, before: Mapping[str, Any], after: Mapping[str, Any], results: tuple[Any, ...]
) -> tuple[float, bool]:
    """Return the worst error of outputs and mutated buffers against the oracle, and whether all are discrete."""
    exact = dict(before)
    if isinstance(exact.get("weights"), Mapping):
        reference = plan(
            call.operator, call.spec, call.limits, device="cpu", implementation="reference.torch"
        )
        exact["weights"] = list(reference.weights(**exact["weights"]))
    for name in op.mutated:
        exact[name] = exact[name].double() if exact[name].is_floating_point() else exact[name]
    answers = op.results(function(op)(call.spec, **exact, dtype=torch.float64))
    pairs = [*zip(results, answers, strict=True), *((after[n], exact[n]) for n in op.mutated)]
    pairs = [(got.cpu(), wanted.cpu()) for got, wanted in pairs if got.numel()]
    return max((difference(*pair) for pair in pairs), default=0.0), all(is_discrete(got) for got, _ in pairs)


def is_discrete(tensor: Tensor) -> bool:
    """Tell whether a result is compared entry by entry: integers, and packed one-byte numbers."""
    return not tensor.is_floating_point() or tensor.element_size() == 1


def difference(got: Tensor, exact: Tensor) -> float:
    """Return the relative error of floating point, or the share of discrete entries that differ."""
    if is_discrete(got):
        same = got.view(torch.uint8) == exact.to(got.dtype).view(torch.uint8)
        return 1.0 - float(same.float().mean())
    finite = torch.isfinite(exact)
    error, scale = (got.double() - exact)[finite].norm(), exact[finite].norm()
    return float(error / scale) if scale else float(error)


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return value.clone() if isinstance(value, Tensor) else value
