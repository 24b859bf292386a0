"""The torch schemas of an operator, as text, generated from its description.

``op(operands, *, step, workspace, Spec fields…, str plan="") -> outputs`` and, where there are outputs,
``op.out(…, Tensor(a!) out, …) -> ()``. The ``.out`` form returns nothing: an operator that returns its own
argument is refused by ``opcheck`` and by ``torch.compile``. What follows the operands is keyword-only,
because optional operands have defaults and a required Spec field has none.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from dataclasses import MISSING
from typing import Any

from kimi_hal.dispatch.scalars import scalars
from kimi_hal.ops.operator import Operator

NAMESPACE = "kimi_hal"
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def functional(op: Operator) -> str:
    """Return the schema that allocates its outputs; of an operator without outputs, the only one."""
    return f"{op.name}({_arguments(op, [])}) -> {_returns(op)}"


def out(op: Operator) -> str | None:
    """Return the schema that writes the caller's outputs, or ``None`` for an operator that returns none."""
    if not op.outs:
        return None
    letters = iter(LETTERS[len(op.args) :])
    buffers = [f"Tensor({next(letters)}!) {o.keyword}" for o in op.outs]
    return f"{op.name}.out({_arguments(op, buffers)}) -> ()"


def _returns(op: Operator) -> str:
    if op.listed:
        return "Tensor[]"
    kinds = ", ".join("Tensor" for _ in op.outs)
    return kinds if len(op.outs) == 1 else f"({kinds})"


def _arguments(op: Operator, buffers: list[str]) -> str:
    positional = list(_operands(op, keyword_only=False))
    keywords = list(_operands(op, keyword_only=True))
    fields = [_field(s.type, s.name, s.default) for s in scalars(op)]
    return ", ".join([*positional, "*", *keywords, *fields, 'str plan=""', *buffers])


def _operands(op: Operator, keyword_only: bool) -> Iterator[str]:
    outputs = {o.keyword for o in op.outs}
    letters = dict(zip(op.args, LETTERS, strict=False))
    for name, parameter in op.signature.parameters.items():
        if (parameter.kind is inspect.Parameter.KEYWORD_ONLY) != keyword_only or name in outputs:
            continue
        default = "=None" if parameter.default is None else ""
        if name in op.args:
            yield f"{_tensor(op, name, letters[name])} {name}{default}"
        elif name == "step":
            yield "Tensor? step=None"
        elif name == "workspace":  # written, though nothing in it lasts
            yield "Tensor(z!)? workspace=None"
        elif isinstance(parameter.default, bool):
            yield f"bool {name}={parameter.default}"
        else:  # a size that the shapes do not tell
            yield f"SymInt? {name}{default}"


def _tensor(op: Operator, name: str, letter: str) -> str:
    arg = op.args[name]
    kind = f"Tensor({letter}!)" if arg.mutated else "Tensor"
    return kind + ("[]" if arg.many else "") + ("?" if name in op.nullable else "")


def _field(kind: str, name: str, default: Any) -> str:
    if default is MISSING:
        return f"{kind} {name}"
    return f"{kind} {name}={json.dumps(default) if isinstance(default, str) else repr(default)}"
