"""Operands in the other forms that a contract admits: another dtype, and no more alignment than is declared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kimi_hal.dispatch.contract import Capability, TensorCap
from kimi_hal.ops.check import contiguity, uneven
from kimi_hal.ops.operator import Operator
from kimi_hal_conformance.case import Make, Operands
from kimi_hal_conformance.draws import normal
from kimi_hal_conformance.poison import SHIFT


@dataclass(frozen=True)
class Form:
    """In which of the forms that a contract admits operands are given, by name.

    Args:
        dtypes: of operands that may have several.
        shifts: bytes by which they begin past an address that is aligned to more.
        gaps: bytes between their rows.
        aligned: bytes of which each of their strides is a multiple; 0: they are contiguous.
    """

    dtypes: Mapping[str, str] = field(default_factory=dict)
    shifts: Mapping[str, int] = field(default_factory=dict)
    gaps: Mapping[str, int] = field(default_factory=dict)
    aligned: Mapping[str, int] = field(default_factory=dict)


def formed(make: Make, form: Form) -> Make:
    """Return the operands in a form."""

    def wrapped(g: torch.Generator) -> Operands:
        drawn = make(g)
        if "ranks" in drawn:
            return {"ranks": [_formed(own, g, form) for own in drawn["ranks"]]}
        return _formed(drawn, g, form)

    return wrapped


def _formed(drawn: Operands, g: torch.Generator, form: Form) -> dict[str, Any]:
    operands = dict(drawn)
    for name, tensor in drawn.items():
        if not isinstance(tensor, Tensor):
            continue
        if name in form.dtypes:
            tensor = as_dtype(g, tensor, getattr(torch, form.dtypes[name]))
        if name in form.aligned:
            tensor = fitting(tensor, form.aligned[name])
        if name in form.gaps:
            tensor = spaced(tensor, form.gaps[name])
        if name in form.shifts:
            tensor = tensor[:]  # the mark is this view's alone
            setattr(tensor, SHIFT, max(1, form.shifts[name] // tensor.element_size()))
        operands[name] = tensor
    return operands


def as_dtype(g: torch.Generator, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in another dtype; one that becomes wider gets bits that only the wider one holds."""
    if tensor.dtype == dtype:
        return tensor
    wide = tensor.to(dtype)
    if dtype.itemsize > tensor.element_size() and dtype.is_floating_point:
        wide = wide * (1 + normal(g, *tensor.shape, spread=2.0**-12).to(dtype))
    return wide


def fitting(tensor: Tensor, align: int) -> Tensor:
    """Return the values as a kernel needs them: contiguous, or with strides of whole ``align`` bytes."""
    elements = max(1, align // tensor.element_size())
    if not align:
        return tensor.contiguous()
    if not uneven(tuple(tensor.shape), tensor.stride(), elements):
        return tensor
    return spaced(tensor.contiguous(), align)


def spaced(tensor: Tensor, gap: int) -> Tensor:
    """Return the values with rows (all dimensions but the first) that are ``gap`` bytes further apart."""
    if tensor.dim() < 2 or not tensor.is_contiguous() or not tensor.numel():
        return tensor
    elements = max(1, gap // tensor.element_size())
    inner = tensor.stride(0)
    first = -(-inner // elements) * elements + elements
    room = torch.zeros((tensor.shape[0] - 1) * first + inner, dtype=tensor.dtype)
    return room.as_strided(tensor.shape, (first, *tensor.stride()[1:])).copy_(tensor)


def alignments(op: Operator, capability: Capability) -> dict[str, int]:
    """Return how many bytes each operand is aligned to at the least: what is declared, else an element."""
    found = {}
    for name, arg in op.args.items():
        cap = capability.tensors.get(name)
        if not arg.many and arg.dtype != "*":
            found[name] = cap.align if cap else 1
    return found


def demanded(op: Operator, capability: Capability) -> dict[str, int]:
    """Return what kernels demand of strides, by operand: whole so many bytes, or 0: contiguous operands."""
    found = {}
    for name, cap in capability.tensors.items():
        if name in op.args and not op.args[name].many:
            found[name] = 0 if {"all", "heads"} & {*cap.contiguous} else cap.align
    return found


def may_be_spaced(op: Operator, capability: Capability) -> list[str]:
    """Return the operands whose rows need not touch."""
    found = []
    for name, arg in op.args.items():
        needed = contiguity(arg.strided, capability.tensors.get(name))
        whole = "all" in needed or ("heads" in needed and len(arg.shape.split()) < 3)
        if not arg.many and arg.shape != "*" and not whole:
            found.append(name)
    return found


def dtypes(op: Operator, capability: Capability) -> dict[str, list[str]]:
    """Return the dtypes of operands that may have several, those that are declared."""
    found = {}
    for name, arg in op.args.items():
        if isinstance(arg.dtype, tuple):
            cap = capability.tensors.get(name, TensorCap())
            found[name] = [d for d in arg.dtype if not cap.dtypes or d in cap.dtypes]
    return found
