"""Gathering in plain torch: the meaning of ``ops/all_gather.py``. Bytes are moved, so ``dtype`` has no effect."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kimi_hal.errors import ContractError
from kimi_hal.ops.all_gather import GatherSpec, gathered_rows, total_problem
from kimi_hal.parallel import ownership
from kimi_hal.parallel.groups import Group, require


def all_gather(
    spec: GatherSpec,
    x: Tensor,
    total: int | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    group: Group | None = None,
) -> Tensor:
    """Gather every rank's tensor and lay it out as the Spec says."""
    problem = total_problem(spec, x.shape[0], total)
    if problem:
        raise ContractError("all_gather", [problem])
    if spec.dcp.world == 1:
        parts = x.detach().clone(memory_format=torch.contiguous_format)[None]
    else:
        parts = require(group, spec.dcp).all_gather(x)
    if spec.layout == "rank_major":
        return parts
    if spec.layout == "last_dim":
        return parts.movedim(0, -2).flatten(-2)
    return token_order(spec, parts, gathered_rows(spec, x.shape[0], total))


def token_order(spec: GatherSpec, parts: Tensor, total: int) -> Tensor:
    """Pick the row of each position out of ``[W, T, …]``."""
    world, rows, *inner = parts.shape
    # As bytes: torch cannot index FP8 on every device.
    data = parts.reshape(world, rows, math.prod(inner)).view(torch.uint8)
    position = torch.arange(total, device=parts.device)
    picked = data[ownership.owner(position, spec.dcp), ownership.local(position, spec.dcp)]
    return picked.reshape(-1).view(parts.dtype).reshape(total, *inner)
