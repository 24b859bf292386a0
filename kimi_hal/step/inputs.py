"""What the step computes on: activations of the real-text workload, or random ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from kimi_hal.model import K3_1_PRO as MODEL
from kimi_hal.workload import KDAInputs, Workload, load


class Inputs(Protocol):
    """Activations by position. Shapes as in ``kimi_hal.workload``."""

    context: int

    def index_keys(self, rows: slice) -> Tensor:
        """Return index keys ``[S, 128]``."""

    def index_query(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Return index queries ``[T, 32, 128]`` and head weights ``[T, 32]``."""

    def latents(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return latents ``[S, 512]`` and shared keys ``[S, 64]``."""

    def mla_query(self, rows: slice, heads: int) -> Tensor:
        """Return absorbed queries ``[T, H, 576]``."""

    def kda_inputs(self, rows: slice, heads: int) -> KDAInputs:
        """Return the KDA operators' operands."""

    def hidden(self, rows: slice, width: int) -> Tensor:
        """Return hidden states ``[T, width]``."""

    def router_logits(self, rows: slice) -> Tensor:
        """Return router logits ``[T, 896]`` float32."""


class RandomInputs:
    """Normal values from a seed: for a machine without the workload. They excite less than real ones."""

    def __init__(self, context: int, seed: int) -> None:
        self.context, self.seed = context, seed

    def _normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16, spread: float = 1.0) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + sum(shape))
        return (torch.randn(*shape, generator=generator) * spread).to(dtype)

    def _rows(self, rows: slice) -> int:
        return len(range(self.context)[rows])

    def index_keys(self, rows: slice) -> Tensor:
        """Return ``[S, 128]``."""
        return self._normal(self._rows(rows), MODEL.index_dim)

    def index_query(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Return ``[T, 32, 128]`` and ``[T, 32]``."""
        count = self._rows(rows)
        return self._normal(count, MODEL.index_heads, MODEL.index_dim), self._normal(count, MODEL.index_heads)

    def latents(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return ``[S, 512]`` and ``[S, 64]``."""
        return self._normal(stop - start, MODEL.kv_rank), self._normal(stop - start, MODEL.pe_dim)

    def mla_query(self, rows: slice, heads: int) -> Tensor:
        """Return ``[T, H, 576]``."""
        return self._normal(self._rows(rows), heads, MODEL.kv_rank + MODEL.pe_dim)

    def kda_inputs(self, rows: slice, heads: int) -> KDAInputs:
        """Return the KDA operators' operands."""
        count, dim = self._rows(rows), MODEL.kda_dim
        channels = 3 * heads * dim
        return KDAInputs(
            x=self._normal(count, channels),
            raw_g=self._normal(count, heads, dim),
            raw_beta=self._normal(count, heads),
            out_gate=self._normal(count, heads, dim, spread=2.0),
            conv_weight=self._normal(channels, MODEL.conv_width, spread=0.5),
            A_log=self._normal(heads, dtype=torch.float32).abs(),
            dt_bias=self._normal(heads * dim, dtype=torch.float32),
            norm_weight=torch.ones(dim),
        )

    def hidden(self, rows: slice, width: int) -> Tensor:
        """Return ``[T, width]``."""
        return self._normal(self._rows(rows), width)

    def router_logits(self, rows: slice) -> Tensor:
        """Return ``[T, 896]``."""
        return self._normal(self._rows(rows), MODEL.experts, dtype=torch.float32)


def choose(path: Path | None, random: bool, context: int, seed: int) -> Workload | RandomInputs:
    """Return random inputs, or the workload file, which must hold the context that was asked for."""
    if random:
        return RandomInputs(context, seed)
    found: Any = load(path)
    if context > found.context:
        raise ValueError(
            f"--context {context} is more than the workload's {found.context} tokens; or use --random"
        )
    return found  # type: ignore[no-any-return]
