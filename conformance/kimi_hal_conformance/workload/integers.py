"""The integers that the workload file stores, from the encoder's floats: ``kimi_hal.workload.attention``."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_hal.workload import codes
from kimi_hal.workload.attention import HIDDEN_BITS, VALUE_BITS, WEIGHT_BITS
from kimi_hal_conformance.workload.encoder import Encoder

PROJECTIONS = ("query", "key", "value")


def hidden(states: Tensor) -> dict[str, Tensor]:
    """Quantise hidden states ``[S, 384]`` to six bits, with one scale a channel.

    A channel's scale is its largest magnitude / 31, rounded up to a whole multiple of 2⁻¹⁶: channels that
    stand out keep their own resolution and cost the others none.
    """
    largest = states.double().abs().amax(0)
    scale = (largest * 2**HIDDEN_BITS / codes.LIMIT).ceil().clamp(min=1)
    steps = (states.double() * 2**HIDDEN_BITS / scale).round()
    return {"hidden.codes": codes.pack(steps), "hidden.scale": scale.to(torch.int32)}


def projections(encoder: Encoder, layer: int) -> dict[str, Tensor]:
    """Round the layer's query, key and value weights to 2⁻¹³ and their biases to 2⁻¹²."""
    tensors = {}
    for name in PROJECTIONS:
        weight = encoder.weight(layer, f"attention.self.{name}.weight").double() * 2**WEIGHT_BITS
        bias = encoder.weight(layer, f"attention.self.{name}.bias").double() * 2**VALUE_BITS
        limits = torch.iinfo(torch.int16)
        if float(weight.abs().max()) > limits.max:
            raise OverflowError(f"layer {layer}'s {name} weight exceeds ±{limits.max * 2.0**-WEIGHT_BITS:g}")
        tensors[f"{name}.weight"] = weight.round().to(torch.int16)
        tensors[f"{name}.bias"] = bias.round().to(torch.int32)
    return tensors
