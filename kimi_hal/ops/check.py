"""The metadata check that every implementation calls first: dtype, shape, strides, device, presence.

Two forms of one rule. ``problems`` walks the operator's description and collects every reason. ``compiled``
turns the same description into one straight-line Python function of attribute reads, since it stands on the
hot path; when any read differs it calls ``problems`` for the sentence. No value on the device is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kimi_hal.errors import ContractError
from kimi_hal.ops.operator import Arg, Dims, Operator, Out, bind_dims, torch_dtype
from kimi_hal.ops.spec import Limits, Spec

Check = Callable[..., None]


def problems(op: Operator, spec: Spec, tensors: Mapping[str, Any], limits: Limits | None = None) -> list[str]:
    """Return every reason why these operands break the operator's metadata contract."""
    found: list[str] = []
    dims = Dims(spec.dims())
    presence = op.presence(spec) if op.presence else {}
    device = None
    for name, arg in op.binding_order:
        value = tensors.get(name)
        wrong = _presence(op, name, value, presence.get(name))
        if wrong:
            found.append(wrong)
        if value is None:
            continue
        found += _count(name, arg, dims, value)
        for label, tensor in _each(name, arg, value):
            if not _is_tensor(tensor):
                found.append(f"{label} must be a tensor, got {type(tensor).__name__}")
                continue
            found += _tensor(label, arg, spec, dims, tensor)
            device = device or tensor.device
            if tensor.device != device:
                found.append(f"{label} is on {tensor.device}, the first operand on {device}")
    if not found:
        found += _outputs(op, spec, dims, tensors, limits, device)
        found += _buffers(tensors, device)
    return found


def _count(name: str, arg: Arg, dims: Dims, value: Any) -> Iterator[str]:
    wanted = dims.value(arg.count) if arg.count else None
    if wanted is not None and len(value) != wanted:
        yield f"{name} must be {wanted} tensors ({arg.count}), got {len(value)}"


def _each(name: str, arg: Arg, value: Any) -> Iterator[tuple[str, Any]]:
    if not arg.many:
        yield name, value
        return
    for i, tensor in enumerate(value):
        yield f"{name}[{i}]", tensor


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "stride")


def _presence(op: Operator, name: str, value: Any, rule: bool | None) -> str | None:
    required = rule is True or (rule is None and op.signature.parameters[name].default is not None)
    if value is None and required:
        return f"{name} is required by this Spec"
    if value is not None and rule is False:
        return f"{name} is refused by this Spec"
    return None


def _tensor(label: str, arg: Arg, spec: Spec, dims: Dims, tensor: Any) -> Iterator[str]:
    accepted = arg.dtypes(spec)
    got = str(tensor.dtype).removeprefix("torch.")
    if got not in accepted and accepted != ("*",):
        yield f"{label} must be {' or '.join(accepted)}, got {got}"
    if arg.shape != "*":
        wrong = dims.mismatch(label, arg.shape, tuple(tensor.shape))
        if wrong:
            yield wrong
            return
    yield from _strides(label, arg.strided, tensor)


def _strides(label: str, rule: str, tensor: Any) -> Iterator[str]:
    if rule == "any" or not tensor.numel():
        return
    if rule == "last" and tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        yield f"{label} must have stride 1 in its last dimension, got strides {list(tensor.stride())}"
    if rule == "inner" and not tensor[0].is_contiguous():
        yield f"{label} must be contiguous in all but its first dimension, got strides {list(tensor.stride())}"
    if rule == "all" and not tensor.is_contiguous():
        yield f"{label} must be contiguous, got strides {list(tensor.stride())}"


def _outputs(
    op: Operator, spec: Spec, dims: Dims, tensors: Mapping[str, Any], limits: Limits | None, device: Any
) -> Iterator[str]:
    if op.sizes is not None:
        dims.bound.update(op.sizes(spec, limits, tensors))
    for out in op.outs:
        buffer = tensors.get(out.keyword)
        if buffer is None:
            continue
        got, wanted = str(buffer.dtype).removeprefix("torch."), out.dtype_name(spec)
        if got != wanted:
            yield f"{out.keyword} must be {wanted}, got {got}"
        wrong = dims.mismatch(out.keyword, out.shape, tuple(buffer.shape))
        if wrong:
            yield wrong
        else:
            yield from _strides(out.keyword, "last", buffer)
        if device is not None and buffer.device != device:
            yield f"{out.keyword} is on {buffer.device}, the first operand on {device}"


def _buffers(tensors: Mapping[str, Any], device: Any) -> Iterator[str]:
    for name in ("step", "workspace"):
        buffer = tensors.get(name)
        if buffer is None:
            continue
        if str(buffer.dtype) != "torch.uint8" or buffer.dim() != 1 or not buffer.is_contiguous():
            yield f"{name} must be a contiguous 1-D uint8 tensor, got {list(buffer.shape)} {buffer.dtype}"
        elif device is not None and buffer.device != device:
            yield f"{name} is on {buffer.device}, the first operand on {device}"
