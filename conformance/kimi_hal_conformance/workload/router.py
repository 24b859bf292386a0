"""A router over 896 experts made from the text's own hidden states, with a bias that evens out the load.

The encoder has no router. What a trained one does is kept: its rows are directions along which real tokens
differ, tokens alike go to experts alike, and a correction bias balances them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kimi_hal.model import K3_1_PRO
from kimi_hal.workload import noise

#: Standard deviation of an expert's logit over the text.
SPREAD = 2.0
#: Rows and steps of the balancing, and the bias's first step; it falls to 0 linearly.
ROWS, STEPS, RATE = 4096, 100, 0.02


def directions(states: Tensor, ids: Tensor, seed: int) -> dict[str, Tensor]:
    """Choose one token an expert, distinct words first, and take what sets its state apart from the mean.

    Args:
        states: ``[S, 384]`` hidden states.
        ids: ``[S]`` vocabulary ids.
        seed: orders the candidates.

    Returns:
        ``router.codes [896, 384]`` int8, orthogonal to the mean state up to rounding, and
        ``router.gain [896]`` float32, which gives each expert's logits the same spread over the text.
    """
    states = states.double()
    mean = states.mean(0)
    apart = states[_prototypes(ids, seed)] - mean
    apart -= (apart @ mean)[:, None] / (mean @ mean) * mean
    codes = (apart / apart.abs().amax(-1, keepdim=True).clamp(min=1e-9) * 127).round()
    spread = (states @ codes.T).std(0).clamp(min=1e-9)
    return {"router.codes": codes.to(torch.int8), "router.gain": (SPREAD / spread).float()}


def _prototypes(ids: Tensor, seed: int) -> Tensor:
    """Return 896 positions: first ones of distinct words, then others, over again in a short text."""
    seen: set[int] = set()
    order = noise.permutation(seed, "router.prototypes", len(ids)).tolist()
    words = ids.tolist()
    first: list[int] = []
    later: list[int] = []
    for position in order:
        (later if words[position] in seen else first).append(position)
        seen.add(words[position])
    both = first + later
    return torch.tensor([both[i % len(both)] for i in range(K3_1_PRO.experts)])


def balance(logits: Tensor, advance: Callable[[int], None]) -> Tensor:
    """Return the bias ``[896]`` float32 that evens out the experts' load over ``logits [T, 896]``.

    After each pass every expert's bias moves one step, up if it had less than its share and down if more.
    Source: auxiliary-loss-free load balancing, as in DeepSeek-V3's ``noaux_tc``.
    """
    scores = logits.sigmoid()
    bias = torch.zeros(logits.shape[-1])
    for step in range(STEPS):
        chosen = (scores + bias).topk(K3_1_PRO.experts_per_token, sorted=False).indices
        load = torch.bincount(chosen.flatten(), minlength=len(bias)).float()
        bias += RATE * (1 - step / STEPS) * (load.mean() - load).sign()
        advance(1)
    return bias
