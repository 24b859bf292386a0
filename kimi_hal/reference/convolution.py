"""The causal convolution over ragged sequences, with the inputs before a sequence taken from its state."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_hal.ops.kda import KDASpec
from kimi_hal.reference.pointwise import silu
from kimi_hal.reference.sequences import Sequences

#: Elements of one tap gathered at once.
ELEMENTS = 1 << 24


def by_width(spec: KDASpec, conv_state: Tensor) -> Tensor:
    """Return a conv state as a view ``[slots, 3, C]``, whatever its layout."""
    return conv_state if spec.conv_layout == "width_channel" else conv_state.transpose(1, 2)


def history(spec: KDASpec, conv_state: Tensor, slot: Tensor, fresh: Tensor | None = None) -> Tensor:
    """Return the inputs before each sequence, ``[N, 3, C]``, oldest first; zero where fresh or padding."""
    empty = slot < 0 if fresh is None else fresh | (slot < 0)
    live = ~empty
    past = conv_state.new_zeros((len(slot), spec.conv_width - 1, spec.channels))
    past[live] = by_width(spec, conv_state)[slot[live]]
    return past


@dataclass(frozen=True)
class Inputs:
    """Raw inputs of N sequences: rows ``x [T, C]`` and what came before, ``past [N, 3, C]``."""

    x: Tensor
    past: Tensor
    sequences: Sequences

    def at(self, sequence: Tensor, place: Tensor) -> Tensor:
        """Return inputs ``[M, C]`` at places in sequences, int64 ``[M]`` each; −1 is the last past one."""
        width = self.past.shape[1]
        found = self.past[sequence, place.clamp(max=-1) + width].to(self.x.dtype)
        inside = place >= 0
        found[inside] = self.x[(self.sequences.start[sequence] + place)[inside]]
        return found

    def window(self, sequence: Tensor, count: Tensor) -> Tensor:
        """Return the last inputs before place ``count`` of some sequences, ``[M, 3, C]``: a conv state."""
        width = self.past.shape[1]
        back = torch.arange(-width, 0, device=count.device)
        return torch.stack([self.at(sequence, count + shift) for shift in back], dim=1)


def convolve(spec: KDASpec, inputs: Inputs, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``SiLU(conv(x))`` ``[T, C]`` in ``dtype``; rows of no sequence are zero."""
    y = inputs.x.new_zeros(inputs.x.shape, dtype=dtype)
    taps = weight.to(dtype).unbind(1)
    sequence, place = inputs.sequences.rows()
    step = max(1, ELEMENTS // spec.channels)
    for first in range(0, len(sequence), step):
        some, where = sequence[first : first + step], place[first : first + step]
        total = y.new_zeros((len(some), spec.channels))
        for j, tap in enumerate(taps):
            total += tap * inputs.at(some, where + j - len(taps) + 1).to(dtype)
        y[inputs.sequences.start[some] + where] = silu(total)
    return y


def store(spec: KDASpec, conv_state: Tensor, slot: Tensor, window: Tensor) -> None:
    """Write windows ``[M, 3, C]`` into slots; a slot of −1 is written nowhere."""
    kept = slot >= 0
    by_width(spec, conv_state)[slot[kept]] = window[kept].to(conv_state.dtype)
