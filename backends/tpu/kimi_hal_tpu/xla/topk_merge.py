"""Selection from a row of scores as a traced program."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kimi_hal.ops.topk_merge import TopKSpec
from kimi_hal.parallel import ownership
from kimi_hal_tpu.xla import order


def topk_select(spec: TopKSpec, given: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return indices ``[T, k]`` and the selected scores."""
    scores = order.rounded(given["scores"], spec.score)
    width = given["size_L"].long()
    length = ownership.local_length(given["row_len"].long(), ownership.of_keys(spec.dcp))
    start = given.get("row_start")
    first = torch.zeros_like(length) if start is None else torch.minimum(start.long().clamp(min=0), width)
    index = order.select(scores, first, torch.minimum(length, width - first).clamp(min=0), spec.topk)
    best = order.chosen(scores, index, first)
    return index, best if spec.return_selected else best[:, :0]
