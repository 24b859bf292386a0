"""The reference as a backend: every operator, on any torch device, in float32.

It is the CPU's own backend, not a fallback: ``auto`` takes it for CPU tensors when no plugin claims a device.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kimi_hal.dispatch import signatures
from kimi_hal.dispatch.capture import tensors_of
from kimi_hal.dispatch.contract import BuildContext
from kimi_hal.ops.operator import Operator, OutputShape, get, output_shapes, torch_dtype


def function(op: Operator) -> Callable[..., Any]:
    """Return the operator's reference function: ``fn(spec, *operands, dtype=…)``, outputs unrounded."""
    fn: Callable[..., Any] = getattr(importlib.import_module(f"kimi_hal.reference.{op.family}"), op.name)
    return fn


def build(ctx: BuildContext) -> Callable[..., Any]:
    """Make the run function of the reference for one operator and Spec."""
    op = get(ctx.operator)
    call = Call.of(op, ctx)
    run = signatures.function(op, op.name, call)
    if op.tested:
        run.return_scores = test_entry(op, call)  # type: ignore[attr-defined]
    return run


def test_entry(op: Operator, call: Call) -> Callable[..., Any]:
    """Return the run function that also fills, and returns, the operator's one tested output."""
    (tested,) = op.tested

    def run(*args: Any, **keywords: Any) -> Any:
        buffer = keywords.pop(tested.keyword)
        bound = op.signature.bind(*args, **keywords)
        bound.apply_defaults()
        return (*call(dict(bound.arguments), **{tested.keyword: buffer}), buffer)

    return run


@dataclass(frozen=True)
class Call:
    """A reference function between the checks of its operands and the rounding of its results.

    Args:
        op: the operator.
        ctx: what it is built for.
        fn: the reference function.
        inputs: the operands that it takes.
        written: the outputs that it takes as well. It writes them itself, and so leaves alone the bytes of
            the caller that are nobody's; where the caller gives none, it gets one filled with −inf.
    """

    op: Operator
    ctx: BuildContext
    fn: Callable[..., Any]
    inputs: tuple[str, ...]
    written: tuple[str, ...]

    @classmethod
    def of(cls, op: Operator, ctx: BuildContext) -> Call:
        """Read off the function which outputs it writes itself."""
        fn = function(op)
        outputs = [out.keyword for out in op.outs]
        apart = {*outputs, "step", "workspace"}
        inputs = tuple(name for name in op.signature.parameters if name not in apart)
        return cls(op, ctx, fn, inputs, tuple(o for o in outputs if o in inspect.signature(fn).parameters))

    def __call__(self, given: dict[str, Any], **tested: Any) -> Any:
        """Run on operands by name; returns what the operator returns.

        No operator has a backward: what is computed of a parameter records none, and a state that is written
        carries no graph of the steps before it.
        """
        import torch

        self.ctx.check(**given)
        with torch.no_grad():
            return self._call(given, tested)

    def _call(self, given: dict[str, Any], tested: Mapping[str, Any]) -> Any:
        shapes = output_shapes(self.op, self.ctx.spec, self.ctx.limits, given)
        for shape in shapes:
            if shape.keyword in self.written and given[shape.keyword] is None:
                given[shape.keyword] = fresh(shape, next(tensors_of(given.values())).device)
        operands = {name: given[name] for name in (*self.inputs, *self.written)}
        context = {"group": self.ctx.group} if self.op.grouped else {}
        results = self.fn(self.ctx.spec, **operands, **context, **tested)
        return self._rounded(results, shapes, given) if self.op.outs else results

    def _rounded(self, results: Any, shapes: tuple[OutputShape, ...], given: Mapping[str, Any]) -> Any:
        inputs = [given[name] for name in self.inputs]
        outs = tuple(
            place(value, given[shape.keyword], torch_dtype(shape.dtype), inputs)
            for value, shape in zip(self.op.results(results), shapes, strict=True)
        )
        return outs if len(outs) > 1 else outs[0]


def fresh(shape: OutputShape, device: Any) -> Any:
    """Return a buffer whose entries are −inf until they are written."""
    import torch

    return torch.full(shape.shape, -torch.inf, dtype=torch_dtype(shape.dtype), device=device)


def place(value: Any, buffer: Any | None, dtype: Any, inputs: list[Any]) -> Any:
    """Round a result once to its dtype, into the caller's buffer if there is one.

    A result that is an input, as a gather over one rank is, is copied: an operator returns no input.
    """
    if buffer is None:
        rounded = value.to(dtype)
        home = rounded.untyped_storage().data_ptr()
        shared = any(t.untyped_storage().data_ptr() == home for t in tensors_of(inputs))
        return rounded.clone() if shared and home else rounded
    if value is not buffer:
        buffer.copy_(value)
    return buffer
