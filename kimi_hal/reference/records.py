"""Records: what a verify leaves for its commit, in the layout that ``sizes.py`` describes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_hal.ops.kda import KDASpec
from kimi_hal.reference.sizes import row_bytes


@dataclass(frozen=True)
class Records:
    """Records of n sequences: ``u [n, H, Q, V]``, ``k`` and ``g [n, H, Q, K]``, ``x [n, Q, C]``."""

    u: Tensor
    k: Tensor
    g: Tensor
    x: Tensor

    def write(self, buffer: Tensor, sequence: Tensor) -> None:
        """Write into rows ``sequence`` (int64 ``[n]``) of a records buffer; bytes beyond stay as they are."""
        fields = (self.u, self.k, self.g, self.x)
        packed = torch.cat([f.flatten(1).contiguous().view(torch.uint8) for f in fields], dim=1)
        buffer[sequence, : packed.shape[1]] = packed

    @classmethod
    def read(cls, spec: KDASpec, buffer: Tensor, sequence: Tensor, dtype: torch.dtype) -> Records:
        """Read rows ``sequence`` (int64 ``[n]``) of a buffer in which u has ``dtype``."""
        H, D, Q = spec.num_heads, spec.head_dim, room(spec, buffer, dtype)
        gate = getattr(torch, spec.gate_dtype)
        fields, at = [], 0
        # A copy of each field is dense and starts at an address of its own, so that any row length may be viewed.
        packed = buffer[sequence]
        for kind, shape in (
            (dtype, (H, Q, D)),
            (torch.bfloat16, (H, Q, D)),
            (gate, (H, Q, D)),
            (torch.bfloat16, (Q, spec.channels)),
        ):
            size = kind.itemsize * math.prod(shape)
            dense = packed[:, at : at + size].clone(memory_format=torch.contiguous_format)
            fields.append(dense.view(kind).view(len(packed), *shape))
            at += size
        return cls(*fields)


def room(spec: KDASpec, buffer: Tensor, dtype: torch.dtype) -> int:
    """Return how many rows of one sequence a records buffer holds if u has ``dtype``."""
    return int(buffer.shape[1]) // row_bytes(spec, dtype.itemsize)
