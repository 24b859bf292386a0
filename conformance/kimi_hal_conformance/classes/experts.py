"""Activations of the experts that are quantised, before both products."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kimi_hal.formats import minifloat, scales
from kimi_hal.formats.minifloat import E4M3FN
from kimi_hal.reference import composites
from kimi_hal_conformance import roundings
from kimi_hal_conformance.oracle import Answer, Question, reference_weights

F64 = torch.float64
#: Elements that share a scale.
MX, BLOCK = 32, 128
Quantise = Callable[[Tensor], Tensor]


def mxfp8(x: Tensor) -> Tensor:
    """Quantise blocks of 32 to e4m3fn with the exponent ⌈log2(amax / 448)⌉, as rule 6 has it for MXFP4."""
    return _blocks(x, MX, lambda largest: scales.exp2(scales.ceil_log2(largest / E4M3FN.largest)))


def fp8_block(x: Tensor) -> Tensor:
    """Quantise blocks of 128 to e4m3fn with the scale amax / 448."""
    return _blocks(x, BLOCK, _quotient)


def fp8_tensor(x: Tensor) -> Tensor:
    """Quantise a tensor to e4m3fn with the scale amax / 448."""
    return _scaled(x, _quotient(scales.amax(x.flatten()))) if x.numel() else x


def _quotient(largest: Tensor) -> Tensor:
    return torch.where(largest > 0, largest / E4M3FN.largest, 1.0)


def _blocks(x: Tensor, size: int, scale: Callable[[Tensor], Tensor]) -> Tensor:
    """Quantise blocks of the last dimension; the last of them may be shorter."""
    short = -x.shape[-1] % size
    blocks = scales.groups(torch.nn.functional.pad(x, (0, short)), size)
    found = _scaled(blocks, scale(scales.amax(blocks))[..., None])
    return found.flatten(-2)[..., : x.shape[-1]]


def _scaled(x: Tensor, scale: Tensor) -> Tensor:
    codes = minifloat.encode(x.float() / scale, E4M3FN)
    return minifloat.decode(codes, E4M3FN, F64) * scale.to(F64)


def of(quantise: Quantise) -> Mapping[str, Callable[[Question], Sequence[Answer]]]:
    """Return the derivations of a class that quantises activations so."""
    return {
        "moe_experts": lambda question: [_experts(question, quantise)],
        "prepare_moe_weights": lambda question: [_experts(question.use(), quantise)],
        "moe_layer": lambda question: [_moe_layer(question, quantise)],
    }


def _experts(question: Question, quantise: Quantise) -> Answer:
    spec: Any = question.spec
    operands = {**question.operands, "weights": reference_weights(question)}
    return Answer({"out": roundings.experts(spec, **operands, quantise=quantise)}, {})


def _moe_layer(question: Question, quantise: Quantise) -> Answer:
    spec: Any = question.spec
    parts = dict(composites.reference_parts("moe_layer", spec, F64))
    parts["moe_experts"] = partial(roundings.experts, spec.experts, quantise=quantise)
    group = composites.sharers(spec, question.group)
    body = composites.compose_moe_layer(spec, parts, group, wide=F64, narrow=F64)
    operands = {**question.operands, "weights": reference_weights(question)}
    return Answer({"out": body(**operands)}, {})
