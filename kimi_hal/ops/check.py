"""The metadata check that every implementation calls first: dtype, shape, strides, device, presence.

Two forms of one rule. ``problems`` walks the operator's description and collects every reason. ``compiled``
turns the same description into one straight-line Python function of attribute reads (``straightline.py``),
since it stands on the hot path; when any read differs it calls ``problems`` for the sentences. No value on
the device is read.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kimi_hal.errors import ContractError
from kimi_hal.ops import values
from kimi_hal.ops.operator import Arg, Dims, Operator, Out
from kimi_hal.ops.spec import Limits, Spec

if TYPE_CHECKING:
    from kimi_hal.dispatch.contract import Capability, Sizes, TensorCap

Check = Callable[..., None]

#: Bytes that the address of a workspace is a multiple of.
WORKSPACE_ALIGN = 256

#: Dimension letters that Limits bound, and the field that bounds them.
BOUNDED = {"T": "max_rows", "N": "max_reqs"}

#: Layout -> how many leading dimensions are free (negative: all but so many) and how to say it.
LAYOUTS = {
    "all": (0, ""),
    "inner": (1, " in all but its first dimension"),
    "heads": (-2, " in its last two dimensions"),
}


@dataclass(frozen=True)
class Terms:
    """What a plan asks of a call beyond the operator's contract.

    Args:
        limits: the sizes that the plan serves; ``None`` = any.
        workspace: bytes that a workspace has at least.
        step: bytes that a step buffer has at least.
        tensors: argument -> what the chosen kernel needs of it (``TensorCap``).
        static_rows: T must be one of ``limits.row_buckets``.
        device: where the operands must be, ``"cuda"`` for any index; ``None`` = wherever the first one is.
    """

    limits: Limits | None = None
    workspace: int = 0
    step: int = 0
    tensors: Mapping[str, TensorCap] = field(default_factory=dict)
    static_rows: bool = False
    device: str | None = None

    @classmethod
    def of(
        cls,
        limits: Limits | None,
        sizes: Sizes | None,
        capability: Capability | None = None,
        device: str | None = None,
    ) -> Terms:
        """Return the terms of a plan with these sizes and this capability."""
        return cls(
            limits=limits,
            workspace=sizes.workspace if sizes else 0,
            step=sizes.step if sizes else 0,
            tensors=capability.tensors if capability else {},
            static_rows=capability.properties.static_rows if capability else False,
            device=device,
        )


def problems(op: Operator, spec: Spec, tensors: Mapping[str, Any], terms: Terms | None = None) -> list[str]:
    """Return every reason why these operands break the operator's contract, or this plan's terms."""
    terms = terms or Terms()
    dims = Dims(spec.dims())
    presence = op.presence(spec) if op.presence else {}
    found: list[str] = []
    device = None
    for name, arg in op.binding_order:
        value = tensors.get(name)
        found += _presence(op, name, value, presence.get(name))
        if value is None:
            continue
        found += _count(name, arg, dims, value)
        cap = terms.tensors.get(name)
        for label, tensor in _each(name, arg, value, found):
            found += _operand(label, arg, spec, dims, tensor, cap)
            device = device or tensor.device
            found += _device(label, tensor, device, terms.device)
    found += _limits(dims, terms)
    found += _outputs(op, spec, dims, tensors, terms, device, shapes=not found)
    return found + list(_buffers(tensors, terms, device))


def compiled(
    op: Operator,
    spec: Spec,
    limits: Limits | None = None,
    sizes: Sizes | None = None,
    *,
    capability: Capability | None = None,
    device: str | None = None,
) -> Check:
    """Return ``check(**operands)`` for one plan: returns None, or raises with every reason.

    The parameters are the operator's, all optional, so that an implementation may leave out what it never
    gets; a required operand that is left out counts as missing. It reads about four attributes an operand.

    Args:
        op: the abstract operator.
        spec: the plan's Spec: dimensions, dtypes and which optional operands are present.
        limits: the plan's Limits; T and N beyond them are refused.
        sizes: the plan's sizes; a smaller workspace or step buffer is refused.
        capability: what the chosen kernel needs beyond the contract: alignment, contiguity, fewer dtypes.
        device: the plan's device.

    Raises:
        ContractError: from the returned function, with all reasons of all operands together.
    """
    from kimi_hal.ops import straightline

    terms = Terms.of(limits, sizes, capability, device)
    names = tuple(op.signature.parameters)

    def refuse(values: tuple[Any, ...]) -> None:
        reasons = problems(op, spec, dict(zip(names, values, strict=True)), terms)
        if reasons:
            raise ContractError(op.name, reasons)

    return straightline.function(op, spec, terms, refuse)


def accepted_dtypes(arg: Arg, spec: Spec, cap: TensorCap | None) -> tuple[str, ...]:
    """Return the dtype names that both the contract and the kernel accept; ``("*",)`` = any."""
    contract = arg.dtypes(spec)
    if cap is None or not cap.dtypes:
        return contract
    return cap.dtypes if contract == ("*",) else tuple(d for d in contract if d in cap.dtypes)


def contiguity(strided: str, cap: TensorCap | None) -> frozenset[str]:
    """Return the layouts that a tensor must have: of ``"last"``, ``"heads"``, ``"inner"``, ``"all"``."""
    needed = {strided} - {"any"}
    return frozenset(needed | set(cap.contiguous if cap else ()))


def uneven(sizes: tuple[int, ...], strides: tuple[int, ...], elements: int) -> bool:
    """Tell whether a stride that is used, other than the last, is not a multiple of ``elements``."""
    return any(n > 1 and st % elements for n, st in zip(sizes[:-1], strides[:-1], strict=True))


def _each(name: str, arg: Arg, value: Any, found: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield label and tensor of an operand, or of each entry of a list; note what is none."""
    if arg.many and not isinstance(value, list | tuple):
        found.append(f"{name} must be a list of tensors, got {type(value).__name__}")
        return
    entries = [(f"{name}[{i}]", v) for i, v in enumerate(value)] if arg.many else [(name, value)]
    for label, tensor in entries:
        if not _is_tensor(tensor):
            found.append(f"{label} must be a tensor, got {type(tensor).__name__}")
        elif kind := unusual(tensor):
            found.append(f"{label} must be a dense tensor, got a {kind} one")
        else:
            yield label, tensor


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "stride")


def unusual(tensor: Any) -> str:
    """Return what a tensor is that has no strides or no plain bytes (sparse, nested), or ``""``."""
    if getattr(tensor, "is_nested", False):
        return "nested"
    layout = str(getattr(tensor, "layout", "torch.strided")).removeprefix("torch.")
    return layout if layout != "strided" else ""


def _count(name: str, arg: Arg, dims: Dims, value: Any) -> Iterator[str]:
    wanted = dims.value(arg.count) if arg.count else None
    if wanted is not None and isinstance(value, list | tuple) and len(value) != wanted:
        yield f"{name} must be {wanted} tensors ({arg.count}), got {len(value)}"


def _presence(op: Operator, name: str, value: Any, rule: bool | None) -> Iterator[str]:
    if value is None and op.required(name, rule):
        yield f"{name} is required by this Spec"
    if value is not None and rule is False:
        yield f"{name} is refused by this Spec"


def _operand(
    label: str, arg: Arg, spec: Spec, dims: Dims, tensor: Any, cap: TensorCap | None
) -> Iterator[str]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if not (yield from dtype_and_shape(label, arg, spec, dims, dtype, tuple(tensor.shape), cap)):
        return
    yield from _layout(label, contiguity(arg.strided, cap), tensor)
    if arg.mutated:
        yield from _written(label, tensor)
    yield from _alignment(label, cap, tensor)


def dtype_and_shape(
    label: str,
    arg: Arg,
    spec: Spec,
    dims: Dims,
    dtype: str,
    shape: tuple[int, ...],
    cap: TensorCap | None = None,
) -> Generator[str, None, bool]:
    """Yield why an operand's dtype and shape are not the operator's, whichever library's array it is.

    Args:
        label: what to call it.
        arg: the operator's description of it.
        spec: of the call.
        dims: the letters so far; those that this operand is the first to have are bound.
        dtype: its name, as torch has it.
        shape: its sizes.
        cap: what the chosen kernel needs of it.

    Returns:
        Whether the shape is as described.
    """
    accepted = accepted_dtypes(arg, spec, cap)
    if dtype not in accepted and accepted != ("*",):
        narrowed = " for this implementation" if dtype in arg.dtypes(spec) else ""
        yield f"{label} must be {' or '.join(accepted)}{narrowed}, got {dtype}"
    if arg.ndim and len(shape) != getattr(spec, arg.ndim):
        yield f"{label} must have {getattr(spec, arg.ndim)} dimensions, got shape {list(shape)}"
    wrong = dims.mismatch(label, arg.shape, shape) if arg.shape != "*" else None
    if wrong:
        yield wrong
    return not wrong


def _layout(label: str, needed: frozenset[str], tensor: Any) -> Iterator[str]:
    if not tensor.numel() or not tensor.dim():
        return
    for layout, (free, words) in LAYOUTS.items():
        # The strictest that is asked for says it all: those after it follow.
        if layout in needed:
            free = max(0, tensor.dim() + free if free < 0 else free)
            if not tensor[(0,) * free].is_contiguous():
                yield f"{label} must be contiguous{words}, got strides {list(tensor.stride())}"
            return
    if needed and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        yield f"{label} must have stride 1 in its last dimension, got strides {list(tensor.stride())}"


def _written(label: str, tensor: Any) -> Iterator[str]:
    if values.shares_elements(tuple(tensor.shape), tuple(tensor.stride())):
        yield f"{label} is written and its elements share memory, got strides {list(tensor.stride())}"


def _alignment(label: str, cap: TensorCap | None, tensor: Any) -> Iterator[str]:
    if cap is None or not tensor.numel():
        return
    past = tensor.data_ptr() % cap.align
    if past:
        yield f"{label} must start at a multiple of {cap.align} bytes, starts {past} past one"
    elements = max(1, cap.align // tensor.element_size())
    if uneven(tuple(tensor.shape), tensor.stride(), elements):
        strides = list(tensor.stride())
        yield (
            f"{label} must have strides of whole {cap.align} bytes ({elements} elements) but for the last, "
            f"got strides {strides}"
        )


def _device(label: str, tensor: Any, first: Any, wanted: str | None) -> Iterator[str]:
    kind, _, index = (wanted or "").partition(":")
    if kind and (tensor.device.type != kind or (index and tensor.device.index != int(index))):
        yield f"{label} is on {tensor.device}, this plan is for {wanted}"
    elif first is not None and tensor.device != first:
        yield f"{label} is on {tensor.device}, the first operand on {first}"


def _limits(dims: Dims, terms: Terms) -> Iterator[str]:
    if terms.limits is None:
        return
    for letter, name in BOUNDED.items():
        size, most = dims.bound.get(letter), getattr(terms.limits, name)
        if size is not None and size > most:
            yield f"{letter}={size} is more than the plan's {name}={most}; plan with larger Limits"
    buckets, rows = terms.limits.row_buckets, dims.bound.get("T")
    if terms.static_rows and rows is not None and rows not in buckets:
        yield f"T={rows} is none of the plan's row_buckets {list(buckets)}; pad to the next one"


def _outputs(
    op: Operator,
    spec: Spec,
    dims: Dims,
    tensors: Mapping[str, Any],
    terms: Terms,
    device: Any,
    shapes: bool,
) -> Iterator[str]:
    """Check the buffers that the caller gave; shapes only where the operands agree on their letters."""
    given = [out for out in op.outs if tensors.get(out.keyword) is not None]
    shapes = shapes and all(hasattr(tensors[out.keyword], "stride") for out in given)
    if given and shapes and op.sizes is not None:
        dims.bound.update(op.sizes(spec, terms.limits, tensors))
    for out in given:
        buffer = tensors[out.keyword]
        if not _is_tensor(buffer):
            yield f"{out.keyword} must be a tensor, got {type(buffer).__name__}"
            continue
        cap = terms.tensors.get(out.keyword)
        yield from _output(out, spec, dims, buffer, cap, shapes)
        yield from _device(out.keyword, buffer, device, terms.device)


def _output(
    out: Out, spec: Spec, dims: Dims, buffer: Any, cap: TensorCap | None, shapes: bool
) -> Iterator[str]:
    got, wanted = str(buffer.dtype).removeprefix("torch."), out.dtype_name(spec)
    if got != wanted:
        yield f"{out.keyword} must be {wanted}, got {got}"
    wrong = dims.mismatch(out.keyword, out.shape, tuple(buffer.shape)) if shapes else None
    if wrong:
        yield wrong
        return
    yield from _layout(out.keyword, contiguity("last", cap), buffer)
    yield from _written(out.keyword, buffer)
    yield from _alignment(out.keyword, cap, buffer)


def _buffers(tensors: Mapping[str, Any], terms: Terms, device: Any) -> Iterator[str]:
    for name, least in (("step", terms.step), ("workspace", terms.workspace)):
        buffer = tensors.get(name)
        if buffer is None:
            continue
        if not _is_tensor(buffer):
            yield f"{name} must be a tensor, got {type(buffer).__name__}"
            continue
        if str(buffer.dtype) != "torch.uint8" or buffer.dim() != 1 or not buffer.is_contiguous():
            yield f"{name} must be a contiguous 1-D uint8 tensor, got {list(buffer.shape)} {buffer.dtype}"
        elif buffer.numel() < least:
            yield f"{name} has {buffer.numel()} bytes, the plan needs {least} (plan.{name}_bytes)"
        elif name == "workspace" and least and buffer.data_ptr() % WORKSPACE_ALIGN:
            past = buffer.data_ptr() % WORKSPACE_ALIGN
            yield f"workspace must start at a multiple of {WORKSPACE_ALIGN} bytes, starts {past} past one"
        yield from _device(name, buffer, device, terms.device)
