"""The reference as a backend: every operator, on any torch device, in float32.

It is the CPU's own backend, not a fallback: ``auto`` takes it for CPU tensors when no plugin claims a device.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from kimi_hal.dispatch.contract import BuildContext
from kimi_hal.ops.operator import Operator, OutputShape, get, output_shapes, torch_dtype


def function(op: Operator) -> Callable[..., Any]:
    """Return the operator's reference function: ``fn(spec, *operands, dtype=…)``, outputs unrounded."""
    fn: Callable[..., Any] = getattr(importlib.import_module(f"kimi_hal.reference.{op.family}"), op.name)
    return fn


def build(ctx: BuildContext) -> Callable[..., Any]:
    """Make the run function of the reference for one operator and Spec.

    A reference function that has an output as a parameter writes it itself and so leaves the rest of the
    caller's bytes alone; where the caller gives none, it gets one that is filled with −inf.
    """
    op, spec = get(ctx.operator), ctx.spec
    fn = function(op)
    context = {"group": ctx.group} if op.grouped else {}
    keywords = [o.keyword for o in op.outs]
    written = [k for k in keywords if k in inspect.signature(fn).parameters]
    inputs = [n for n in op.signature.parameters if n not in {*keywords, "step", "workspace"}]

    def call(args: tuple[Any, ...], kwargs: dict[str, Any], **tested: Any) -> Any:
        bound = op.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        ctx.check(**given)
        shapes = output_shapes(op, spec, ctx.limits, given)
        for shape in shapes:
            if shape.keyword in written and given[shape.keyword] is None:
                given[shape.keyword] = fresh(shape, given[inputs[0]].device)
        results = fn(spec, **{name: given[name] for name in [*inputs, *written]}, **context, **tested)
        if not op.outs:
            return results
        results = results if isinstance(results, tuple) else (results,)
        outs = tuple(
            place(value, given[shape.keyword], torch_dtype(shape.dtype))
            for value, shape in zip(results, shapes, strict=True)
        )
        return outs if len(outs) > 1 else outs[0]

    def run(*args: Any, **kwargs: Any) -> Any:
        return call(args, kwargs)

    def return_scores(*args: Any, all_scores_out: Any, **kwargs: Any) -> Any:
        return (*call(args, kwargs, all_scores_out=all_scores_out), all_scores_out)

    run.__signature__ = op.signature  # type: ignore[attr-defined]
    if op.tested:
        run.return_scores = return_scores  # type: ignore[attr-defined]
    return run


def fresh(shape: OutputShape, device: Any) -> Any:
    """Return a buffer whose entries are −inf until they are written."""
    import torch

    return torch.full(shape.shape, -torch.inf, dtype=torch_dtype(shape.dtype), device=device)


def place(value: Any, buffer: Any | None, dtype: Any) -> Any:
    """Round a result once to its dtype, into the caller's buffer if there is one."""
    if buffer is None:
        return value.to(dtype)
    if value is not buffer:
        buffer.copy_(value)
    return buffer
