"""Gathering as a traced program: the exchange, then the layout. Bytes are moved, never converted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kimi_hal.ops.all_gather import GatherSpec, gathered_rows
from kimi_hal.parallel import ownership
from kimi_hal_tpu.xla.exchange import Exchange


def all_gather(spec: GatherSpec, given: Mapping[str, Any], group: Exchange | None) -> tuple[Tensor]:
    """Return every rank's tensor in the Spec's layout."""
    x, total = given["x"], given.get("total")
    parts = x[None] if group is None else group.all_gather(x)
    if spec.layout == "rank_major":
        return (parts,)
    if spec.layout == "last_dim":
        return (parts.movedim(0, -2).flatten(-2),)
    position = torch.arange(gathered_rows(spec, x.shape[0], total), device=x.device)
    return (parts[ownership.owner(position, spec.dcp), ownership.local(position, spec.dcp)],)
