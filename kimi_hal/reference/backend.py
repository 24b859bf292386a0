"""The reference as a backend: every operator, on any torch device, in float32.

It is the CPU's own backend, not a fallback: ``auto`` takes it for CPU tensors when no plugin claims a device.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from kimi_hal.dispatch.contract import BuildContext
from kimi_hal.ops.operator import Operator, get, output_shapes, torch_dtype


def function(op: Operator) -> Callable[..., Any]:
    """Return the operator's reference function: ``fn(spec, *operands, dtype=…)``, outputs unrounded."""
    return getattr(importlib.import_module(f"kimi_hal.reference.{op.family}"), op.name)


def build(ctx: BuildContext) -> Callable[..., Any]:
    """Make the run function of the reference for one operator and Spec."""
    op, fn, spec = get(ctx.operator), None, ctx.spec
    fn = function(op)
    context = {"group": ctx.group} if op.grouped else {}
    keywords = [o.keyword for o in op.outs]
    inputs = [n for n in op.signature.parameters if n not in {*keywords, "step", "workspace"}]

    def run(*args: Any, **kwargs: Any) -> Any:
        bound = op.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        ctx.check(**given)
        results = fn(spec, **{name: given[name] for name in inputs}, **context)
        if not op.outs:
            return results
        results = results if isinstance(results, tuple) else (results,)
        shapes = output_shapes(op, spec, ctx.limits, given)
        outs = tuple(
            place(value, given[shape.keyword], torch_dtype(shape.dtype))
            for value, shape in zip(results, shapes, strict=True)
        )
        return outs if len(outs) > 1 else outs[0]

    run.__signature__ = op.signature  # type: ignore[attr-defined]
    return run


def place(value: Any, buffer: Any | None, dtype: Any) -> Any:
    """Round a result once to its dtype, into the caller's buffer if there is one."""
    if buffer is None:
        return value.to(dtype)
    buffer.copy_(value)
    return buffer
