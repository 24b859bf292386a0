"""Each operator as ``torch.ops.kimi_hal.<name>``: one node of a graph that ``torch.compile`` never looks into.

Two overloads: the functional one, and ``.out`` where there are outputs. Both take the Spec's fields as
scalars (``scalars.py``) and ``plan``, a plan's key; where it is empty, the plan is found by the fields and
the operands' device, as in the convenience form.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from kimi_hal.dispatch import convenience, schema
from kimi_hal.dispatch.capture import tensors_of
from kimi_hal.dispatch.scalars import flatten, spec_of
from kimi_hal.dispatch.table import PLANS
from kimi_hal.errors import ContractError
from kimi_hal.ops import written
from kimi_hal.ops.operator import OPERATORS, Operator, output_shapes, torch_dtype

if TYPE_CHECKING:
    from kimi_hal.dispatch.planned import Plan

#: Strides are honoured or refused (rule 7), so a compiler must hand over what the graph was traced with.
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)

#: torch declares no types here.
libraries: Any = torch.library

_library: Any = None


def register() -> None:
    """Define and implement every operator; a second call changes nothing."""
    global _library
    if _library is None:
        _library = libraries.Library(schema.NAMESPACE, "DEF")
        for op in OPERATORS.values():
            _define(_library, op, op.name, schema.functional(op), kernel(op))
            out = schema.out(op)
            if out is not None:
                _define(_library, op, f"{op.name}.out", out, out_kernel(op))


def _define(library: Any, op: Operator, name: str, text: str, call: Callable[..., Any]) -> None:
    library.define(text, tags=TAGS)
    library.impl(name, call, "CompositeExplicitAutograd")
    library.impl(name, autograd(op, name), "Autograd", with_keyset=True)
    torch.library.register_fake(f"{schema.NAMESPACE}::{name}", fake(op, name), lib=library)


def kernel(op: Operator) -> Callable[..., Any]:
    """Return the function behind the functional overload."""
    parameters = op.signature.parameters.values()
    named = tuple(p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY)

    def call(*args: Any, plan: str = "", **keywords: Any) -> Any:
        operands = {n: keywords[n] for n in named if n in keywords}
        if "workspace" in operands and not operands["workspace"].numel():  # bound() stands one in for None
            del operands["workspace"]
        if operands.get("donate"):
            raise ContractError(
                op.name, ["donate=True gives its inputs away, which no graph allows: use plan.run"]
            )
        if plan:
            return (PLANS.only(plan) or PLANS.find(plan, _device(args))).run(*args, **operands)
        return convenience.run(op, spec_of(op, keywords), args, operands)

    return call


def out_kernel(op: Operator) -> Callable[..., None]:
    """Return the function behind ``.out``, which returns nothing."""
    call = kernel(op)

    def call_out(*args: Any, **keywords: Any) -> None:
        call(*args, **keywords)

    return call_out


def _device(args: tuple[Any, ...]) -> str:
    return str(next(tensors_of(args)).device)


def autograd(op: Operator, name: str) -> Callable[..., Any]:
    """Return the autograd kernel: no operator has a backward, so an input that wants one is refused."""
    base, _, overload = name.partition(".")

    def call(keys: Any, *args: Any, **keywords: Any) -> Any:
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors_of([*args, *keywords.values()])):
            raise ContractError(
                f"kimi_hal.{op.name}",
                [
                    "it has no backward, and an input requires grad; call it under torch.no_grad() or detach it"
                ],
            )
        packet = getattr(getattr(torch.ops, schema.NAMESPACE), base)
        target = getattr(packet, overload or "default")
        _bump(target, args, keywords)
        with torch._C._AutoDispatchBelowAutograd():
            return target.redispatch(keys & torch._C._after_autograd_keyset, *args, **keywords)

    return call


def _bump(target: Any, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
    """Tell autograd which arguments are written, so that a tensor saved for a backward is not used stale."""
    written = {a.name for a in target._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    given = dict(zip([a.name for a in target._schema.arguments], args, strict=False)) | dict(keywords)
    for tensor in tensors_of(v for n, v in given.items() if n in written):
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


def fake(op: Operator, name: str) -> Callable[..., Any]:
    """Return the function that tracing runs: shapes and dtypes of the outputs, nothing computed."""
    positional = [
        n for n, p in op.signature.parameters.items() if p.kind is not inspect.Parameter.KEYWORD_ONLY
    ]

    def call(*args: Any, plan: str = "", **keywords: Any) -> Any:
        if name != op.name or not (op.outs or op.listed):
            return None
        if op.listed:  # only the implementation knows; it runs on the fake tensors
            return kernel(op)(*args, plan=plan, **keywords)
        given = dict(zip(positional, args, strict=False)) | keywords
        known = PLANS.any(plan) if plan else None
        limits = known.limits if known else None
        first = next(tensors_of(args))
        shapes = output_shapes(op, spec_of(op, keywords), limits, given)
        outputs = tuple(first.new_empty(s.shape, dtype=torch_dtype(s.dtype)) for s in shapes)
        return outputs if len(outputs) > 1 else outputs[0]

    return call


def bound(plan: Plan) -> Callable[..., Any]:
    """Return the torch operator with a plan's fields and key filled in; the signature is the operator's.

    With output buffers it calls ``.out`` and returns them. It is a plain function over constants, which
    ``torch.compile`` traces into one node.
    """
    op = plan.operator
    packet = getattr(getattr(torch.ops, schema.NAMESPACE), op.name)
    make = written.function("make", _source(plan), f"<torch operator of plan {plan.key[:12]}>", {})
    into = packet.out if op.outs else None
    made: Callable[..., Any] = make(packet.default, into, _incomplete(op), torch.uint8)
    return made


def lone_workspace(op: Operator) -> bool:
    """Tell whether an absent workspace would break inductor (2.9 to 2.13).

    It cannot place an operator with one result whose only written argument is ``None``
    (``getitem is not an OpOverload``), so such a call gets an empty workspace.
    """
    return "workspace" in op.signature.parameters and len(op.outs) == 1 and not op.mutated


def _source(plan: Plan) -> str:
    op, outs = plan.operator, [o.keyword for o in plan.operator.outs]
    args: list[str] = []
    keywords: list[str] = []
    for name, parameter in op.signature.parameters.items():
        if name in outs:
            continue
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            args.append(name)
        elif name == "workspace" and lone_workspace(op):
            keywords.append(
                f"workspace=workspace if workspace is not None else {args[0]}.new_empty(0, dtype=uint8)"
            )
        else:
            keywords.append(f"{name}={name}")
    constants = [f"{n}={v!r}" for n, v in flatten(op, plan.spec).items()] + [f"plan={plan.key!r}"]
    given = ", ".join([*args, *keywords, *constants])
    lines = [f"def {op.name}{op.signature}:"]
    if not outs:
        lines.append(f"    return default({given})")
    else:
        lines += [
            f"    if {' and '.join(f'{o} is None' for o in outs)}:",
            f"        return default({given})",
            f"    if {' or '.join(f'{o} is None' for o in outs)}:",
            "        incomplete()",
            f"    into({given}, {', '.join(f'{o}={o}' for o in outs)})",
            f"    return {', '.join(outs)}",
        ]
    body = "\n".join(f"    {line}" for line in lines)
    return f"def make(default, into, incomplete, uint8):\n{body}\n    return {op.name}\n"


def _incomplete(op: Operator) -> Callable[[], None]:
    names = ", ".join(o.keyword for o in op.outs)

    def refuse() -> None:
        raise ContractError(
            op.name, [f"plan.op takes all of {names} or none: one node writes all its outputs"]
        )

    return refuse
